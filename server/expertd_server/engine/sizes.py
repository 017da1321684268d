"""The sizes that batches of an accelerator are padded to, and how many graphs are captured for them.  Pure: the plan of
memory, the warm-up and both engines ask here.

Few sizes, so that there are few graphs and every one is soon there: powers of two to 64, then steps of at most a third.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from expertd.common.dtypes import scales_of_row

__all__ = [
    "BATCH_SLOTS",
    "MOST_OTHERS",
    "MOST_POOLS",
    "POOL_BYTES",
    "STREAMED_ROWS",
    "WHOLE_ROWS",
    "graph_count",
    "batch_slot_bytes",
    "batch_slot_routes",
    "padded",
    "sizes_up_to",
]

BATCH_SLOTS = 2
"""Batches under way on an accelerator."""
STREAMED_ROWS = 128
"""From so many rows on copy engines move a batch beside another's kernels (docs/log/data-path.md)."""
WHOLE_ROWS = 8
"""Up to so many rows a launch less is worth a graph more."""
MOST_OTHERS = 1024
"""Graphs of batches that the plan of memory does not count (pieces.py), as they come."""
MOST_POOLS = 16
"""Sessions of callers on other GPUs at once."""
POOL_BYTES = 64 << 20
"""Of the server's GPU for each of them."""
_DOUBLING = 64


def padded(tokens: int) -> int:
    """The size that a batch of `tokens` is given; the rest of it has no routes."""
    if tokens <= _DOUBLING:
        return 1 << (tokens - 1).bit_length()
    step = 1 << ((tokens - 1).bit_length() - 2)
    return -(-tokens // step) * step


def sizes_up_to(tokens: int) -> list[int]:
    """The sizes of batches of up to `tokens`."""
    sizes = [1]
    while sizes[-1] < tokens:
        sizes.append(padded(sizes[-1] + 1))
    return sizes


def batch_slot_routes(tokens: int, top_k: int, num_experts: int) -> int:
    """Slots that a batch of a layer needs at most: the core cuts batches at tokens x top_k routes (queues.cpp),
    whatever number a token has, up to one for each expert; then they are padded."""
    most = before = 0
    for size in sizes_up_to(tokens):
        most = max(most, size * max(1, min(num_experts, tokens * top_k // (before + 1))))
        before = size
    return most


def batch_slot_bytes(tokens: int, hidden_size: int, routes: int, element: int, in_place: bool, coded: int = 0) -> int:
    """Of a batch slot's buffers: inputs and output of `element` bytes a number, a slot and a weight for each route.

    in_place: the output lies where the inputs did; routes: of batch_slot_routes(); coded: columns of inputs that there
    are as e4m3, too."""
    codes = tokens * (coded + 4 * scales_of_row(coded))
    return tokens * (1 if in_place else 2) * element * hidden_size + 8 * routes + codes


def graph_count(layers: Iterable[tuple[int, Collection[int], bool]], tokens: int) -> int:
    """Graphs of pieces.py once every size up to `tokens` has come, of calls that are known at the boot; graphs.py
    keeps fewer.

    layers: (hidden size, numbers of routes a token, whether it takes e4m3) of each layer that may be captured.  A layer
    has its experts, and its whole call where that is small, for each number of routes; collecting is captured once for
    all layers of a hidden size that are alike in that, delivering for all of a hidden size."""
    sizes = sizes_up_to(tokens)
    whole = sum(n <= WHOLE_ROWS for n in sizes)
    streamed = sum(n >= STREAMED_ROWS for n in sizes)
    own, shared = 0, set()
    for hidden_size, routes, takes_e4m3 in layers:
        own += len(routes) * (len(sizes) + whole)
        shared |= {(hidden_size, k, takes_e4m3) for k in routes}
    collected = len(shared) * (len(sizes) + streamed)
    return BATCH_SLOTS * (own + collected + len({H for H, _, _ in shared}) * len(sizes))
