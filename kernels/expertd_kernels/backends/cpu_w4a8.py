"""Backend `cpu_w4a8`: the C++ kernel with int4 weights and 8-bit activations, a scale for each 16 columns or each row.

A named choice, never a silent one: about 1.0 % relative error (a scale a row: 1.5 %) instead of 0.2 %, for half the
arithmetic.  The layout is that of `cpu`.
"""

from __future__ import annotations

from expertd_kernels.backends import cpu
from expertd_kernels.common.problem import Problem
from expertd_kernels.common.protocol import Packed
from expertd_kernels.weights.canonical import Weights
from expertd_kernels.weights.scheme import ActivationQuant, Element

__all__ = ["experts", "pack", "unpack"]

NAME = "cpu_w4a8"


def pack(weights: Weights, problem: Problem) -> Packed:
    """As cpu.pack_blocks."""
    rounding = (ActivationQuant.INT8_GROUP, ActivationQuant.INT8_TOKEN)
    assert problem.activation_quant in rounding, "activations rounded otherwise are not the row's"
    for q in (weights.w13, weights.w2):
        assert q.scheme.element is Element.INT4, f"{q.scheme.name} is not the row's"
    return cpu.pack_blocks(NAME, weights)


def unpack(packed: Packed) -> Weights:
    """The exact inverse of pack."""
    return cpu.unpack(packed)


def experts(packed: Packed, problem: Problem) -> cpu.CpuExperts:
    return cpu.CpuExperts(packed, problem, backend=NAME)
