"""Backend `gluon_sm90`: weight-only expert layers for Hopper, in Triton's Gluon dialect.

Four launches a layer (route, w13 + activation, w2 + router weight, combine; no route for one token), chained by
programmatic dependent launch; no host synchronization.  One packing serves every number of tokens.

Packing and its inverse need no GPU and no Triton; `experts` needs both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from expertd_kernels.backends.envelope import pack_layer, require_version, unpack_layer
from expertd_kernels.backends.gluon.weight_only.packed_matrix import pack_matrix, unpack_matrix
from expertd_kernels.common.problem import Problem
from expertd_kernels.common.protocol import Packed
from expertd_kernels.weights.canonical import Weights
from expertd_kernels.weights.scheme import ActivationQuant

if TYPE_CHECKING:
    from expertd_kernels.backends.gluon.weight_only.experts import GluonExperts

__all__ = ["experts", "pack", "unpack"]

LAYOUT_VERSION = 2


def pack(weights: Weights, problem: Problem) -> Packed:
    """Canonical weights in the layout of gluon/weight_only/packing.py, rows and columns padded to multiples of 64.

    Scales that bf16 does not hold exactly (f16, f32) are rounded for the kernel and kept beside it for `unpack`.
    Refused: e4m3 NaNs, scales beyond what a power of two brings into bf16."""
    assert problem.activation_quant is ActivationQuant.NONE, "rounded activations are not the row's"
    gated = weights.activation.gated
    return pack_layer(
        "gluon_sm90", LAYOUT_VERSION, weights, lambda name, q: pack_matrix(name, q, gated and name == "w13")
    )


def unpack(packed: Packed) -> Weights:
    """The exact inverse of `pack`."""
    return unpack_layer(packed, unpack_matrix)


def experts(packed: Packed, problem: Problem) -> GluonExperts:
    """Ready to compute.  Needs a Hopper GPU and Triton; the packed tensors move to the current CUDA device."""
    from expertd_kernels.backends.gluon.weight_only.experts import GluonExperts

    require_version(packed, LAYOUT_VERSION)
    return GluonExperts(packed, problem)
