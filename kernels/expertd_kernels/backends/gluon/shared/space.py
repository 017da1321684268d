"""What a call of the Hopper rows keeps in scratch memory, by its sizes.  Needs no Triton.

Each part is written before it is read, or what is read of it is thrown away; only the counters have to be zero."""

from __future__ import annotations

from functools import cache

import torch

from expertd_kernels.backends.gluon.shared.grouping import LINE, Chunks
from expertd_kernels.backends.gluon.w8a8.plan import GROUP, Shape8
from expertd_kernels.backends.gluon.weight_only.packed_matrix import TILE, round_up
from expertd_kernels.backends.scratch import COUNTERS, Layout

__all__ = ["FLOAT32_TOKENS", "LISTED_ROWS", "layer_space", "tokens_of", "w8a8_space"]

FLOAT32_TOKENS = 64
"""Up to here w2's results are f32 (kernel `ws` has no shared memory for it).  With 128 tokens bf16, half of the traffic
of the sum, is 2 % of the layer faster, with 32 it is not."""

LISTED_ROWS = 32
"""Routes of a block, of which lists of blocks are made: with fewer, another kernel makes a table."""


def tokens_of(tokens: int) -> int:
    """The number of tokens that a call of `tokens` has room for: a power of two, so that there are few layouts."""
    return max(16, 1 << (tokens - 1).bit_length())


@cache
def layer_space(experts: int, H: int, I: int, tokens: int, top_k: int) -> Layout:
    """gluon_sm90, for `tokens` (see tokens_of) of top_k routes."""
    n = tokens * top_k
    return Layout(
        {
            # table (at most n blocks, rounded up) and route lists (whole blocks of at most 64), or counts and lists
            "ints": ((2 * n + round_up(experts, 16) + n + 64 * min(experts, n) + 64,), torch.int32),
            "chunks": (Chunks.table(n, experts), torch.int16),
            # a list of blocks of at least LISTED_ROWS: see routing._list_blocks
            "blocks": ((2 + 2 * (1 << (n // LISTED_ROWS + min(experts, n)).bit_length()),), torch.int32),
            "h": ((n * round_up(I, TILE),), torch.bfloat16),
            # w2's results, or those of few tokens as f32
            "y": ((max(n, 2 * min(n, FLOAT32_TOKENS * top_k)) * H,), torch.bfloat16),
        },
        # finished tiles of w13 a block; or w13's tickets, and a line on w2's (kernels "wide" and "ws")
        {"done": (0, COUNTERS), "tickets": (LINE, COUNTERS)},
    )


@cache
def w8a8_space(shape: Shape8, grouped: bool, static: bool, tokens: int, parts: int) -> Layout:
    """gluon_w8a8.  grouped, static: how activations are rounded; parts: of w2's columns (kernel `w8a8_few`)."""
    E, H, I, n = shape.experts, shape.H, shape.I, tokens * shape.top_k
    e4m3, f32 = torch.float8_e4m3fn, torch.float32

    def scales(rows: int, columns: int) -> tuple[int, int]:
        return (0 if static else rows, columns // GROUP if grouped else 1)

    return Layout(
        {
            "counts": ((E,), torch.int32),
            "chunks": (Chunks.table(n, E), torch.int16),  # each chunk's routes of each expert
            "lists": ((n,), torch.int32),
            "places": ((n,), torch.int32),  # the inverse of lists
            "x": ((tokens, H), e4m3),
            "x_scale": (scales(tokens, H), f32),
            "listed_scale": (scales(n, H), f32),  # of the inputs in the order of the list
            "h": ((n, I), e4m3),  # in the order of the list
            "h_scale": (scales(n, I), f32),
            "wide": ((0 if grouped or static else n, I), torch.bfloat16),  # h before it is rounded, by rows
            "y": ((n, H), torch.bfloat16),  # and before that the listed inputs
            "partial": ((parts * n if parts > 1 else 0, H), f32),
        },
        {"tickets": (0, 2 * LINE), "second": (LINE, 2 * LINE)},  # tiles that were drawn of w13 and, a line on, of w2
    )
