"""Tile sizes for a layer and a number of tokens: a pure function of sizes, so that grids never depend on routing.

The rows of an expert decide: few rows an expert means reading weights (narrow token tiles, several programs an SM in
flight), many means multiplying (tall and wide tiles, fewer and larger programs).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from expertd_kernels.backends.triton_kernels.layout import FLOAT, Layout

__all__ = ["Facts", "Plan", "Tile", "fit", "make_plan"]


@dataclass(frozen=True)
class Tile:
    """bn weight rows of each segment; bc containers a step, or kpb whole K blocks; group_m: blocks that share a row
    tile in L2 at a time; weighted: scales on the operand (gemm.py), ignored where the layout forbids or demands it."""

    bn: int
    bc: int
    warps: int
    stages: int
    group_m: int = 1
    weighted: bool = False
    kpb: int = 1


@dataclass(frozen=True)
class Plan:
    """bm rows a block; direct: no routing kernel, one block a route."""

    bm: int
    gemm1: Tile
    gemm2: Tile
    direct: bool = False


@dataclass(frozen=True)
class Facts:
    """What a plan depends on.  shared_bytes: shared memory a program may use; rounded: e4m3 activations."""

    num_experts: int
    top_k: int
    segments: int
    w13: Layout
    w2: Layout
    hidden_size: int
    intermediate_size: int
    rounded: bool = False
    shared_bytes: int = 227 * 1024


def stage_bytes(tile: Tile, bm: int, lay: Layout, segments: int, rounded: bool) -> int:
    """Shared memory of one pipeline stage: weights of each segment, x for each code of a container, scale words."""
    if rounded:
        return (segments * tile.bn + bm) * lay.block
    weights = segments * tile.bn * tile.bc * 2
    return tile.kpb * (weights + lay.p * bm * tile.bc * 2 + (0 if lay.elem == FLOAT else 8 * segments * tile.bn))


def fit(tile: Tile, bm: int, lay: Layout, segments: int, facts: Facts) -> Tile:
    """The tile cut to the layout's slice width and to shared memory."""
    if lay.elem != FLOAT:
        tile = replace(tile, bc=min(tile.bc, lay.sw))
        tile = replace(tile, kpb=tile.kpb if tile.bc == lay.sw else 1)
    while tile.stages > 1 and tile.stages * stage_bytes(tile, bm, lay, segments, facts.rounded) > facts.shared_bytes:
        tile = replace(tile, stages=tile.stages - 1)
    return tile


def make_plan(facts: Facts, tokens: int) -> Plan:
    """The plan for `tokens` tokens."""
    routes = tokens * facts.top_k
    rows = routes / min(facts.num_experts, routes)
    direct = routes * 4 <= facts.num_experts or tokens == 1
    if rows <= 12:
        bm, t1, t2 = 16, Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)
    elif rows <= 24:
        bm, t1, t2 = 32, Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)
    elif rows <= 96:
        bm, t1, t2 = 64, Tile(64, 32, 4, 3, 1, True), Tile(128, 32, 8, 3, 1, True)
    else:
        bm, t1, t2 = 128, Tile(128, 32, 8, 3, 4, True), Tile(128, 32, 8, 3, 4, True)
    return Plan(
        bm,
        fit(t1, bm, facts.w13, facts.segments, facts),
        fit(t2, bm, facts.w2, 1, facts),
        direct,
    )
