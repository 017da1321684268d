"""Tile sizes for a layer and a number of tokens: a pure function of sizes, so that grids never depend on routing.

The rows of an expert decide: few rows an expert means reading weights (narrow token tiles, several programs an SM in
flight), many means multiplying (tall and wide tiles, fewer and larger programs).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from expertd_kernels.backends.plan_words import in_words
from expertd_kernels.backends.portable.layout import ELEM, FLOAT, Layout
from expertd_kernels.weights.scheme import Element

__all__ = ["Facts", "TilingPlan", "Tile", "fit", "make_plan", "stage_bytes"]

INFINITE = float("inf")
E2M1 = ELEM[Element.E2M1]


@dataclass(frozen=True)
class Tile:
    """One GEMM.

    weight_rows  of each segment; BN in gemm.py
    containers   a step, or k_blocks whole K blocks; BC and KPB in gemm.py
    together     blocks that share a row tile in L2 at a time; GROUP_M in gemm.py
    weighted     scales on the operand (gemm.py), ignored where the layout forbids or demands it
    """

    weight_rows: int
    containers: int
    warps: int
    stages: int
    together: int = 1
    weighted: bool = False
    k_blocks: int = 1

    def __str__(self) -> str:
        return in_words(self)


@dataclass(frozen=True)
class TilingPlan:
    """Of a layer.  rows: tokens of a block; direct: no routing kernel, one block a route."""

    rows: int
    w13: Tile
    w2: Tile
    direct: bool = False

    def __str__(self) -> str:
        return in_words(self)


@dataclass(frozen=True)
class Facts:
    """What a plan depends on.  shared_bytes: shared memory a program may use; narrowest: fewest tokens of a tile that
    the device multiplies; multiprocessors: to be filled; rounded: e4m3 activations; hidden, inner: H and I."""

    num_experts: int
    top_k: int
    segments: int
    w13: Layout
    w2: Layout
    hidden: int
    inner: int
    multiprocessors: int
    rounded: bool = False
    shared_bytes: int = 227 * 1024
    narrowest: int = 8


# Rows an expert up to which a line holds, rows a block, tile of GEMM 1, tile of GEMM 2.  Found with bench/triton_tune
# on an H200 (Qwen3-30B-A3B, gpt-oss-120b); `fit` cuts the tiles to other layouts and devices.
_INT4 = (
    (5, 8, Tile(64, 64, 4, 3, 1, True), Tile(128, 64, 4, 3, 1, True)),
    (12, 16, Tile(64, 64, 4, 3, 1, True), Tile(128, 64, 4, 3, 1, True)),
    (24, 32, Tile(64, 32, 4, 3, 1, True), Tile(64, 32, 4, 3, 1, True)),
    (96, 64, Tile(128, 32, 4, 3, 1, True), Tile(128, 32, 4, 2, 1, True)),
    (INFINITE, 128, Tile(64, 32, 4, 3, 4, True), Tile(128, 32, 8, 2, 4, True)),
)
_E2M1 = (
    (5, 8, Tile(128, 64, 4, 3), Tile(128, 64, 4, 3)),
    (12, 16, Tile(128, 64, 4, 3), Tile(128, 64, 4, 3)),
    (24, 32, Tile(64, 32, 4, 3), Tile(64, 32, 4, 3)),
    (96, 64, Tile(64, 32, 4, 3), Tile(128, 32, 4, 2)),
    (INFINITE, 128, Tile(64, 32, 4, 3, 4), Tile(128, 32, 8, 2, 4)),
)
_EIGHT = (
    (5, 8, Tile(64, 64, 4, 3), Tile(32, 64, 2, 3)),
    (12, 16, Tile(64, 64, 4, 3), Tile(32, 64, 2, 3)),
    (24, 32, Tile(64, 64, 4, 3, 1, True), Tile(64, 64, 4, 3, 1, True)),
    (96, 64, Tile(64, 64, 4, 4, 1, True), Tile(128, 64, 8, 3, 1, True)),
    (256, 128, Tile(64, 32, 4, 3, 4, True), Tile(128, 32, 4, 3, 4, True)),
    (INFINITE, 128, Tile(128, 64, 8, 3, 4, True), Tile(256, 32, 8, 3, 4, True)),
)
_EIGHT_F32 = (
    (5, 8, Tile(32, 64, 2, 3), Tile(32, 64, 2, 3)),
    (12, 16, Tile(64, 64, 4, 3), Tile(32, 64, 2, 3)),
    (24, 32, Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)),
    (256, 64, Tile(64, 64, 4, 3, 4), Tile(64, 64, 4, 3, 4)),
    (INFINITE, 128, Tile(128, 64, 8, 3, 4, True), Tile(256, 32, 8, 3, 4, True)),
)
_FLOAT = (
    (5, 16, Tile(32, 128, 2, 3), Tile(64, 128, 4, 3)),
    (12, 16, Tile(64, 128, 4, 3), Tile(128, 128, 4, 3)),
    (24, 32, Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)),
    (96, 64, Tile(64, 64, 4, 3), Tile(128, 64, 8, 4)),
    (256, 128, Tile(128, 64, 8, 4, 4), Tile(128, 64, 8, 3, 4)),
    (INFINITE, 128, Tile(128, 64, 8, 3, 4), Tile(128, 64, 8, 3, 4)),
)
_ROUNDED = (
    (12, 16, Tile(64, 64, 4, 4), Tile(64, 64, 4, 4)),
    (24, 32, Tile(64, 64, 4, 4), Tile(64, 64, 4, 4)),
    (INFINITE, 64, Tile(64, 64, 4, 3, 4), Tile(128, 64, 4, 3, 4)),
)
_SLICED = (
    (12, 16, Tile(64, 64, 4, 4), Tile(64, 64, 4, 4)),
    (24, 32, Tile(64, 64, 8, 4), Tile(64, 64, 8, 4)),
    (INFINITE, 64, Tile(64, 64, 8, 3, 4), Tile(128, 64, 8, 3, 4)),
)
_ODD = Tile(32, 16, 4, 1, 1, True)
"""Layouts that read a scale for each weight: right, not fast, and hungry for shared memory."""


def _lines(lay: Layout, rounded: bool) -> tuple[tuple[float, int, Tile, Tile], ...]:
    """The table for a layout: by bits of a code, and by what its scales cost."""
    if rounded:
        return _SLICED if lay.p == 4 else _ROUNDED
    if lay.elem == FLOAT:
        return _FLOAT
    if lay.p == 2:
        return _EIGHT_F32 if lay.group > 0 and lay.fold != 1 else _EIGHT
    return _E2M1 if lay.elem == E2M1 else _INT4


def stage_bytes(tile: Tile, bm: int, lay: Layout, segments: int, rounded: bool) -> int:
    """Shared memory of one pipeline stage: weights of each segment, x for each code of a container, scale words."""
    if rounded:
        return (segments * tile.weight_rows + bm) * lay.block
    weights = segments * tile.weight_rows * tile.containers * 2
    scales = 0 if lay.elem == FLOAT else 8 * segments * tile.weight_rows
    return tile.k_blocks * (weights + lay.p * bm * tile.containers * 2 + scales)


def fit(tile: Tile, bm: int, lay: Layout, segments: int, facts: Facts) -> Tile:
    """The tile cut to the layout's slice width and to shared memory."""
    if lay.odd:
        return _ODD
    if lay.elem != FLOAT:
        tile = replace(tile, containers=min(tile.containers, lay.sw))
        tile = replace(tile, k_blocks=tile.k_blocks if tile.containers == lay.sw else 1)
        if lay.fold == 2 and bm <= 16:  # with few accumulators it is cheaper to multiply those
            tile = replace(tile, weighted=False)
    while tile.stages > 1 and tile.stages * stage_bytes(tile, bm, lay, segments, facts.rounded) > facts.shared_bytes:
        tile = replace(tile, stages=tile.stages - 1)
    return tile


def fill(tile: Tile, blocks: float, rows: int, facts: Facts) -> Tile:
    """Narrower row tiles while `blocks` blocks of a matrix with `rows` rows leave multiprocessors without a program."""
    while tile.weight_rows > 16 and blocks * -(-rows // tile.weight_rows) < 1.25 * facts.multiprocessors:
        tile = replace(tile, weight_rows=tile.weight_rows // 2, warps=max(1, min(tile.warps, tile.weight_rows // 32)))
    return tile


def make_plan(facts: Facts, tokens: int) -> TilingPlan:
    """The plan for `tokens` tokens."""
    routes = tokens * facts.top_k
    rows = routes / min(facts.num_experts, routes)
    direct = tokens == 1 or routes * 4 <= facts.num_experts
    bm, tile1 = next((bm, t) for most, bm, t, _ in _lines(facts.w13, facts.rounded) if rows <= most)
    tile2 = next(t for most, _, _, t in _lines(facts.w2, facts.rounded) if rows <= most)
    if facts.w13.odd or facts.w2.odd:
        bm = 16
    bm = max(bm, facts.narrowest)
    if not facts.rounded or bm <= 16:  # the narrow tile of a tall block has too few registers for rounded operands
        blocks = min(facts.num_experts, routes) * max(1.0, rows / bm)
        tile1, tile2 = fill(tile1, blocks, facts.inner, facts), fill(tile2, blocks, facts.hidden, facts)
    return TilingPlan(bm, fit(tile1, bm, facts.w13, facts.segments, facts), fit(tile2, bm, facts.w2, 1, facts), direct)
