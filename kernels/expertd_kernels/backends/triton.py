"""Backend `triton`: the whole layer in portable Triton kernels (CUDA, ROCm, XPU; the interpreter on a CPU).

Weight-only on every scheme; the rows `triton_w8a8` and `triton_w4a8` are the same module with activations rounded to 8
bits: e4m3 by token, by group of 128, by group of 32 (mxfp8) or by the checkpoint's static scale, int8 by token.
Activation order is not computed with rounded activations: rows are rounded once for all experts, and each expert has an
order of its own.
See portable/ for the layout, the kernels and the plan of tile sizes.  Imports are absolute, so `import triton`
means the compiler, also here.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from expertd_kernels.backends.envelope import activation_of, fields, pack_layer, require_version, unpack_layer
from expertd_kernels.backends.portable.experts import TritonExperts
from expertd_kernels.backends.portable.layout import Layout, pack_matrix, unpack_matrix
from expertd_kernels.backends.portable.matrix import Matrix
from expertd_kernels.common.problem import Problem
from expertd_kernels.common.protocol import Packed
from expertd_kernels.weights.canonical import QuantTensor, Weights
from expertd_kernels.weights.scheme import ActivationQuant, Element
from expertd_kernels.weights.serial import matrix_to_json, scheme_from_json

__all__ = ["experts", "pack", "unpack"]

LAYOUT_VERSION = 1

ROUNDINGS = {
    Element.E4M3: (
        ActivationQuant.E4M3_TOKEN,
        ActivationQuant.E4M3_TENSOR,
        ActivationQuant.E4M3_GROUP128,
        ActivationQuant.MXFP8,
    ),
    Element.INT8: (ActivationQuant.INT8_TOKEN,),
    Element.INT4: (ActivationQuant.E4M3_TOKEN, ActivationQuant.E4M3_GROUP128, ActivationQuant.INT8_TOKEN),
    Element.E2M1: (ActivationQuant.MXFP8,),
}
"""How activations can be rounded, by the type of the weights."""


def _row(problem: Problem) -> str:
    """The row of the table that this problem is served by."""
    if problem.activation_quant is ActivationQuant.NONE:
        return "triton"
    return "triton_w4a8" if problem.w13.element.packed else "triton_w8a8"


def pack(weights: Weights, problem: Problem) -> Packed:
    """On the weights' device, one expert at a time."""
    quant = problem.activation_quant
    for q in (weights.w13, weights.w2):
        known = quant is ActivationQuant.NONE or quant in ROUNDINGS.get(q.scheme.element, ())
        assert known, f"{q.scheme.name} with activations rounded to {quant.value} is not the row's"
    assert not quant.static or weights.input_scales is not None, "static rounding without scales is not the row's"
    return pack_layer(_row(problem), LAYOUT_VERSION, weights, lambda _, q: _pack_matrix(q, quant))


def _pack_matrix(q: QuantTensor, quant: ActivationQuant) -> tuple[dict[str, Tensor], dict[str, Any]]:
    eight = quant is not ActivationQuant.NONE
    packed, lay = pack_matrix(q, eight)
    if eight:
        known = q.zeros is None or q.scheme.element is Element.INT4
        assert known, "zero points of 8 bits with rounded activations are not the row's"
        assert q.columns is None, "activation order with rounded activations is not the row's"
        assert not lay.odd, f"groups of {lay.group} with rounded activations are not the row's"
    return packed, {**matrix_to_json(q), "layout": lay.to_json()}


def _unpack_matrix(tensors: dict[str, Tensor], m: dict[str, Any]) -> QuantTensor:
    E, N, K = m["shape"]
    return unpack_matrix(tensors, Layout(**m["layout"]), scheme_from_json(m["scheme"]), (E, N, K), m["segments"])


def unpack(packed: Packed) -> Weights:
    """The exact inverse of pack."""
    return unpack_layer(packed, _unpack_matrix)


def experts(packed: Packed, problem: Problem) -> TritonExperts:
    """Ready to compute.  Raises Refused for a Packed of another layout version."""
    require_version(packed, LAYOUT_VERSION)

    def matrix(name: str) -> Matrix:
        m = packed.meta[name]
        _, N, K = m["shape"]
        return Matrix(fields(packed, name), Layout(**m["layout"]), N // m["segments"], K, m["segments"])

    quant, static = problem.activation_quant, None
    if quant is ActivationQuant.E4M3_TENSOR:  # a token goes to several experts but is rounded once: the largest scale
        static = packed.tensors["input_scales"].float().amax(0)
    made = TritonExperts(_row(problem), matrix("w13"), matrix("w2"), activation_of(packed), quant, input_scales=static)
    made.one_plan = problem.batch_invariant
    return made
