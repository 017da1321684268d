"""What a call of a row around another package's grouped GEMMs keeps in scratch memory.  Needs no Triton."""

from __future__ import annotations

import torch

from expertd_kernels.backends.portable.space import CHUNK, expert_bins
from expertd_kernels.backends.scratch import Shapes

__all__ = ["MOST_BYTES", "MOST_ROUTES", "between", "call_space", "capacity", "sorted_rows"]

MOST_ROUTES = 1 << 16
MOST_BYTES = 1 << 31
"""Routes of one call, and bytes of its widest matrix without padding: more tokens are computed in pieces."""
GROUP = 128
"""Columns of activations with one scale."""


def capacity(routes: int, experts: int, alignment: int) -> int:
    """Rows that any routing needs when each expert's first is at a multiple of `alignment`, itself rounded up."""
    worst = routes + min(routes, experts) * (alignment - 1)
    return -(-worst // alignment) * alignment


def call_space(routes: int, experts: int, extra: Shapes, *aligned: int) -> Shapes:
    """`extra`, and what sorting routes by expert needs; aligned: what rows of an expert begin at multiples of."""
    chunks, bins = -(-routes // CHUNK), expert_bins(experts)
    shapes = dict(extra)
    for name in ("counts", "base"):
        shapes[name] = ((chunks, bins), torch.int32)
    shapes["totals"] = ((bins,), torch.int32)
    for alignment in dict.fromkeys(aligned):
        rows = capacity(routes, experts, alignment)
        for name, size in (("row", routes), ("start", experts + 1), ("route", rows), ("expert", rows)):
            shapes[f"{name}/{alignment}"] = ((size,), torch.int32)
        shapes[f"block/{alignment}"] = ((rows // alignment,), torch.int32)
    return shapes


def between(routes: int, width: int, inner: int, hidden: int, gathered: bool = False) -> Shapes:
    """The matrices around two GEMMs that read and write the routes' rows: w13's results, the activation, w2's results;
    gathered: and inputs that are sorted by expert."""
    shapes: Shapes = {
        "h": ((routes, width), torch.bfloat16),
        "a": ((routes, inner), torch.bfloat16),
        "y": ((routes, hidden), torch.bfloat16),
    }
    if gathered:
        shapes["x"] = ((routes, hidden), torch.bfloat16)
    return shapes


def sorted_rows(rows: int, width: int, inner: int, hidden: int, rounded: bool) -> Shapes:
    """The matrices around two GEMMs on rows sorted by expert; rounded: inputs are e4m3, and their scales have the rows
    as the last dimension, as deepgemm would transpose them."""
    read = torch.float8_e4m3fn if rounded else torch.bfloat16
    shapes: Shapes = {
        "x": ((rows, hidden), read),
        "h": ((rows, width), torch.bfloat16),
        "a": ((rows, inner), read),
        "y": ((rows, hidden), torch.bfloat16),
    }
    if rounded:
        shapes["x_scale"] = ((hidden // GROUP, rows), torch.float32)
        shapes["a_scale"] = ((inner // GROUP, rows), torch.float32)
    return shapes
