"""Backend `triton`: the whole layer in portable Triton kernels (CUDA, ROCm, XPU; the interpreter on a CPU).

Weight-only on every scheme; the row `triton_w8a8` is the same module with e4m3 weights and activations rounded to e4m3.
See triton_kernels/ for the layout, the kernels and the plan of tile sizes.  Imports are absolute, so `import triton`
means the compiler, also here.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from expertd_kernels.backends.protocol import Packed
from expertd_kernels.backends.triton_kernels.layer import TritonExperts
from expertd_kernels.backends.triton_kernels.layout import Layout, pack_matrix, unpack_matrix
from expertd_kernels.backends.triton_kernels.matrix import Matrix
from expertd_kernels.canonical import QuantTensor, Weights
from expertd_kernels.oracle import Refused
from expertd_kernels.problem import Problem
from expertd_kernels.scheme import ActivationQuant
from expertd_kernels.serial import activation_from_json, activation_to_json, scheme_from_json, scheme_to_json

__all__ = ["experts", "pack", "unpack"]

LAYOUT_VERSION = 1


def _row(problem: Problem) -> str:
    """The row of the table that this problem is served by."""
    return "triton" if problem.activation_quant is ActivationQuant.NONE else "triton_w8a8"


def pack(weights: Weights, problem: Problem) -> Packed:
    """On the weights' device, one expert at a time."""
    tensors: dict[str, Tensor] = {}
    meta: dict[str, Any] = {
        "layout_version": LAYOUT_VERSION,
        "activation": activation_to_json(weights.activation),
        "checkpoint_activation": weights.checkpoint_activation.value,
    }
    for name, q in (("w13", weights.w13), ("w2", weights.w2)):
        packed, lay = pack_matrix(q)
        tensors.update({f"{name}.{field}": t for field, t in packed.items()})
        meta[name] = {
            "scheme": scheme_to_json(q.scheme),
            "shape": list(q.shape),
            "segments": q.segments,
            "layout": lay.to_json(),
        }
    if weights.input_scales is not None:
        tensors["input_scales"] = weights.input_scales
    return Packed(_row(problem), tensors, meta)


def _fields(packed: Packed, name: str) -> dict[str, Tensor]:
    return {k.removeprefix(f"{name}."): t for k, t in packed.tensors.items() if k.startswith(f"{name}.")}


def unpack(packed: Packed) -> Weights:
    """The exact inverse of pack."""

    def matrix(name: str) -> QuantTensor:
        m = packed.meta[name]
        E, N, K = m["shape"]
        scheme = scheme_from_json(m["scheme"])
        return unpack_matrix(_fields(packed, name), Layout(**m["layout"]), scheme, (E, N, K), m["segments"])

    return Weights(
        matrix("w13"),
        matrix("w2"),
        activation_from_json(packed.meta["activation"]),
        ActivationQuant(packed.meta["checkpoint_activation"]),
        packed.tensors.get("input_scales"),
    )


def experts(packed: Packed, problem: Problem) -> TritonExperts:
    """Ready to compute.  Raises Refused for a Packed of another layout version."""
    version = packed.meta["layout_version"]
    if version != LAYOUT_VERSION:
        raise Refused(f"packed weights have layout version {version}, want {LAYOUT_VERSION}: pack them again")

    def matrix(name: str) -> Matrix:
        m = packed.meta[name]
        _, N, K = m["shape"]
        return Matrix(_fields(packed, name), Layout(**m["layout"]), N // m["segments"], K, m["segments"])

    activation = activation_from_json(packed.meta["activation"])
    return TritonExperts(_row(problem), matrix("w13"), matrix("w2"), activation, problem.activation_quant)
