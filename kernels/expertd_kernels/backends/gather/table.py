"""The table that describes a batch to a device: one line of eight words a row.  Imports no torch.

    0  address of the row's hidden states, [H]
    1  address of its global expert ids, [top_k]
    2  address of its router weights, [top_k]
    3  address of its output, [H]
    4  element types and top_k, see `info`; 0 = padding: no routes, nothing is read or written
    5  address of the scales of e4m3 hidden states, f32 [ceil(H / 128)]
    6  address of the layer's slots on the device, [num_experts + 1] int32: where each expert is, -1 = not here; the
       last one is for -1
    7  address of the layer's counts on the device, [experts held] int64, which grow by the routes that each serves; 0 =
       not counted

Addresses are those that the device reads: host memory registered as pinned, or its own.
"""

from __future__ import annotations

__all__ = ["BF16", "E4M3", "F16", "F32", "I32", "I64", "SCALED_COLUMNS", "WORDS", "info"]

WORDS = 8
"""int64 of a line."""
F32, F16, BF16, E4M3, I32, I64 = 1, 2, 3, 4, 5, 6
"""Element types, numbered as on the wire."""
SCALED_COLUMNS = 128
"""Columns of e4m3 hidden states that share a scale."""


def info(top_k: int, num_experts: int, hidden: int = BF16, ids: int = I32, weights: int = F32, out: int = BF16) -> int:
    """Word 4 of a row."""
    return hidden | ids << 4 | weights << 8 | out << 12 | top_k << 16 | num_experts << 32
