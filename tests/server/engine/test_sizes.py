"""The sizes that batches are padded to, and how many graphs that makes: the plan of memory counts with them."""

from collections import Counter
from itertools import product

import pytest

from expertd_server.engine.sizes import (
    BATCH_SLOTS,
    STREAMED_ROWS,
    WHOLE_ROWS,
    batch_slot_routes,
    graph_count,
    padded,
    sizes_up_to,
)


def test_sizes_are_few_and_none_is_far_from_its_batch():
    assert [padded(n) for n in (1, 2, 3, 5, 33, 64)] == [1, 2, 4, 8, 64, 64]
    assert [padded(n) for n in (65, 96, 97, 128, 129, 193, 300, 385, 513, 3000)] == [
        96, 96, 128, 128, 192, 256, 384, 512, 768, 3072,
    ]  # fmt: skip
    assert all(n <= padded(n) < 1.5 * n for n in range(65, 5000))
    assert sizes_up_to(100) == [1, 2, 4, 8, 16, 32, 64, 96, 128]


@pytest.mark.parametrize("most", [1, 2, 3, 64, 65, 100, 512, 3000, 4096])
def test_the_sizes_are_those_that_batches_are_padded_to(most):
    assert sizes_up_to(most) == sorted({padded(n) for n in range(1, most + 1)})


def captured(layers, tokens: int) -> int:
    """As device.py captures: every batch slot, size and number of routes of every layer, one after another."""
    seen = Counter()
    for (layer, (H, routes, coded)), batch_slot, rows in product(
        enumerate(layers), range(BATCH_SLOTS), sizes_up_to(tokens)
    ):
        for k in routes:
            wanted = [("experts", layer, k), ("collect", H, k, coded), ("deliver", H, 0)]
            wanted += [("collect routes", H, k, coded)] if rows >= STREAMED_ROWS else []
            wanted += [("whole", layer, k)] if rows <= WHOLE_ROWS else []
            seen.update((batch_slot, rows, *what) for what in wanted)
    return len(seen)


@pytest.mark.parametrize(
    ("layers", "tokens"),
    [
        ([], 4096),
        ([(2048, [8], False)], 1),
        ([(2048, [8], True)] * 48, 4096),
        ([(2048, [8, 1], False), (2048, [8, 1], False), (7168, [6], True)], 300),
        ([(2048, [8], False), (2048, [4], False)], 64),
        ([(2048, [8], False), (2048, [8], True), (2048, [4], True)], 300),
    ],
)
def test_graphs_are_counted_as_they_are_captured(layers, tokens):
    assert graph_count(layers, tokens) == captured(layers, tokens)


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"), [(1, 1, 1), (1, 8, 128), (70, 4, 64), (100, 8, 6), (300, 8, 256), (1000, 2, 512)]
)
def test_a_lane_has_room_for_every_batch_that_the_core_cuts(tokens, top_k, experts):
    """At most tokens x top_k routes together (queues.cpp), any number for a token."""
    needed = [padded(n) * k for n in range(1, tokens + 1) for k in range(1, experts + 1) if n * k <= tokens * top_k]
    assert batch_slot_routes(tokens, top_k, experts) == max(needed)


def test_room_for_routes_is_little():
    assert batch_slot_routes(4096, 8, 256) < 1.5 * 4096 * 8
