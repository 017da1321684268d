"""Backend `gluon_sm90`: weight-only expert layers for Hopper, in Triton's Gluon dialect.

Four launches a layer (route, w13 + activation, w2 + router weight, combine; no route for one token), chained by
programmatic dependent launch; no host synchronization.  One packing serves every number of tokens.

Packing and its inverse need no GPU and no Triton; `experts` needs both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from expertd_kernels.backends.gluon.matrix import pack_matrix, unpack_matrix
from expertd_kernels.backends.protocol import Packed
from expertd_kernels.canonical import Weights
from expertd_kernels.oracle import Refused
from expertd_kernels.problem import Problem
from expertd_kernels.scheme import ActivationQuant
from expertd_kernels.serial import activation_from_json, activation_to_json

if TYPE_CHECKING:
    from expertd_kernels.backends.gluon.layer import GluonExperts

__all__ = ["experts", "pack", "unpack"]

LAYOUT_VERSION = 1


def pack(weights: Weights, problem: Problem) -> Packed:
    """Canonical weights in the layout of gluon/packing.py, rows and columns padded to multiples of 64.

    Scales that bf16 does not hold exactly (f16, f32) are rounded for the kernel and kept beside it for `unpack`.
    Refused: activation order, second-level scales, e4m3 NaNs, scales beyond what a power of two brings into bf16."""
    if problem.activation_quant is not ActivationQuant.NONE:
        raise Refused(f"rounds no activations, {problem.activation_quant.value} is asked")
    tensors: dict[str, Tensor] = {}
    meta: dict[str, Any] = {
        "layout": LAYOUT_VERSION,
        "activation": activation_to_json(weights.activation),
        "checkpoint_activation": weights.checkpoint_activation.value,
    }
    for name, q, gated in (("w13", weights.w13, weights.activation.gated), ("w2", weights.w2, False)):
        parts, meta[name] = pack_matrix(name, q, gated)
        tensors.update({f"{name}.{k}": t for k, t in parts.items()})
    if weights.input_scales is not None:
        tensors["input_scales"] = weights.input_scales
    return Packed("gluon_sm90", tensors, meta)


def unpack(packed: Packed) -> Weights:
    """The exact inverse of `pack`."""

    def parts(name: str) -> dict[str, Tensor]:
        return {k.removeprefix(f"{name}."): t for k, t in packed.tensors.items() if k.startswith(f"{name}.")}

    return Weights(
        unpack_matrix(parts("w13"), packed.meta["w13"]),
        unpack_matrix(parts("w2"), packed.meta["w2"]),
        activation_from_json(packed.meta["activation"]),
        ActivationQuant(packed.meta["checkpoint_activation"]),
        packed.tensors.get("input_scales"),
    )


def experts(packed: Packed, problem: Problem) -> GluonExperts:
    """Ready to compute.  Needs a Hopper GPU and Triton; the packed tensors move to the current CUDA device."""
    from expertd_kernels.backends.gluon.layer import GluonExperts

    return GluonExperts(packed, problem)
