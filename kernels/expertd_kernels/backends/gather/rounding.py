# mypy: ignore-errors
# (Triton device code: its types are checked by Triton's compiler, not by mypy.)
"""How numbers are rounded to e4m3 with a scale for 128 columns: one rule for `collect` and for gluon_w8a8's own
kernels, so that a row has the same codes and scales, whoever makes them."""

import triton
import triton.language as tl

__all__ = ["largest_of", "to_codes"]


@triton.jit
def largest_of(v):
    """The scale of each group, absolute maximum / 448: v [..., columns] f32 of three dimensions -> the first two."""
    return tl.maximum(tl.max(tl.abs(v), 2), 1e-30) / 448.0


@triton.jit
def to_codes(v):
    """f32 -> e4m3, to nearest even; what lies beyond its largest number becomes that."""
    return tl.minimum(tl.maximum(v, -448.0), 448.0).to(tl.float8e4nv)
