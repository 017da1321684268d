"""What a call of the Triton rows keeps in scratch memory, by its sizes.  Needs no Triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from expertd_kernels.backends.scratch import Shapes

__all__ = ["CHUNK", "CHUNK_TOKENS", "Rounded", "block_bound", "expert_bins", "layer_space"]

CHUNK_TOKENS = 8192
"""Tokens of one pass: more are computed in chunks, so that scratch memory is bounded; far beyond the number from which
weights are read once for so many rows that reading them again costs nothing."""

CHUNK = 128
"""Routes of a program that sorts them by expert."""


def block_bound(routes: int, experts: int, bm: int) -> int:
    """Most blocks that any routing makes: sum of ceil(rows / bm) over the experts hit."""
    hit = min(routes, experts)
    return hit + (routes - hit) // bm


def expert_bins(experts: int) -> int:
    """Histogram bins: a power of two with room for the bin of routes to nowhere."""
    return max(128, 1 << experts.bit_length())


@dataclass(frozen=True)
class Rounded:
    """The input of a GEMM, rounded to 8 bits: rows of `padded` columns, `columns` of them with one scale (0: all)."""

    padded: int
    columns: int
    dtype: torch.dtype


def layer_space(
    experts: int,
    H: int,
    I: int,
    tokens: int,
    top_k: int,
    *,
    bm: int = 0,
    converted: bool = False,
    rounded: tuple[Rounded, Rounded] | None = None,
) -> Shapes:
    """bm: rows of a block, 0 = no routing kernel; converted: inputs are copied to bf16 first; rounded: the inputs of
    both GEMMs, where they are."""
    R = tokens * top_k
    shapes: Shapes = {
        "h": ((R, -(-I // 64) * 64), torch.bfloat16),
        "y": ((R, H), torch.bfloat16),
    }
    if converted:
        shapes["x"] = ((tokens, H), torch.bfloat16)
    if bm:
        chunks, bins = -(-R // CHUNK), expert_bins(experts)
        shapes["slots"] = ((R,), torch.int32)
        shapes["blocks"] = ((block_bound(R, experts, bm), 4), torch.int32)
        shapes["counts"] = ((chunks, bins), torch.int32)
        shapes["totals"] = ((bins,), torch.int32)
        shapes["base"] = ((chunks, bins), torch.int32)
    if rounded is not None:
        for name, rows, r in (("xq", tokens, rounded[0]), ("hq", R, rounded[1])):
            shapes[name] = ((rows, r.padded), r.dtype)
            shapes[name + "_scale"] = ((rows, -(-r.padded // r.columns) if r.columns else 1), torch.float32)
    return shapes
