"""Static configuration of one e4m3 x e4m3 GEMM launch: what the compiler sees as constants.  Needs triton, no GPU."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from triton.experimental.gluon import language as gl

from expertd_kernels.backends.gluon.w8a8.plan import GROUP, TOKENS, Few8, Plan8

__all__ = ["Gemm8", "Tile8", "TileFew", "tile8", "tile_few"]


@dataclass(frozen=True)
class Gemm8:
    """One of the two GEMMs of a layer, weights and inputs e4m3.

    K           columns of the weights and of the input, a multiple of 128
    segment     weight rows of one projection: I for w13 (gate, then up), H for w2; a multiple of 128
    first       w13, with the activation, or w2
    grouped     scales by 128 x 128 weights and by 128 input columns, and w13 rounds its result likewise; else one scale
                a weight row and one an input row, and w13 writes bf16
    static      one given scale for all inputs, one for all of w13's results, which it rounds (not with `grouped`)
    weight      whether the router weight multiplies this GEMM's result (w13 where it belongs on the input; w2 of few
                tokens: of many, the sum multiplies)
    """

    K: int
    segment: int
    experts: int
    top_k: int
    first: bool
    grouped: bool
    weight: bool
    bias: bool
    act: str = "silu_and_mul"
    alpha: float = 0.0
    beta: float = 0.0
    limit: float = 0.0
    limited: bool = False
    static: bool = False


@dataclass(frozen=True, eq=False)
class Tile8:
    """The constants of a kernel.  One object a distinct configuration (`tile8` caches), so hashing is by identity."""

    gemm: Gemm8
    ST: int
    GM: int
    BM: int
    depth: int
    listed: bool
    pdl: bool
    consumer_registers: int
    producer_registers: int
    source: str
    MMA: Any
    MMA64: Any
    LX: Any
    LH: Any
    LH64: Any
    LY: Any
    SA: Any
    SB: Any

    @property
    def iterations(self) -> int:
        return self.gemm.K // GROUP

    @property
    def column_tiles(self) -> int:
        """Tiles of 256 weight rows: 128 of gate and 128 of up, or 256 of w2 (the last may be half empty)."""
        return self.gemm.segment // GROUP if self.gemm.first else -(-self.gemm.segment // (2 * GROUP))

    @property
    def rows(self) -> int:
        """Weight rows of an expert."""
        return 2 * self.gemm.segment if self.gemm.first else self.gemm.segment

    @property
    def half_tiles(self) -> bool:
        """Whether the second half of the last tile lies beyond the matrix."""
        return not self.gemm.first and self.gemm.segment % (2 * GROUP) != 0

    @property
    def split(self) -> bool:
        """Whether both warpgroups compute a block that has tokens for one, half of the columns each.  In w13 they wait
        for each other at a barrier that knows two rounds: none may be a whole tile ahead, which a ring shorter than a
        tile sees to."""
        return self.gemm.grouped and not (self.gemm.first and self.iterations <= self.ST)

    @property
    def padded_experts(self) -> int:
        return max(32, 1 << (self.gemm.experts - 1).bit_length())

    @property
    def stage_bytes(self) -> int:
        """What the bulk copies of a stage bring: weights, and the inputs of w2."""
        return 2 * GROUP * GROUP + (TOKENS * GROUP if self.listed else 0)


_SOURCE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
"""Part of each Tile8: Triton's cache of compiled kernels keys on its text, not on what its properties compute."""


def _rows_by_warp(vector: int, columns: int = GROUP) -> Any:
    """[64, columns] as an accumulator's rows lie (16 a warp), but `vector` columns in a row for each lane: the two
    differ inside groups of four lanes only, so that the change of layout needs no barrier."""
    bits, more = vector.bit_length() - 1, columns.bit_length() - 1
    return gl.DistributedLinearLayout(
        [[0, 1 << i] for i in range(bits)] + [[0, 1 << i] for i in range(bits + 2, more)] + [[8, 0]],
        [[0, vector], [0, 2 * vector], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, columns],
    )


@cache
def tile8(gemm: Gemm8, plan: Plan8, pdl: bool) -> Tile8:
    """The constants of `plan` for `gemm`.  ValueError where they do not go together."""
    if gemm.K % GROUP or gemm.segment % GROUP:
        raise ValueError(f"w8a8 {gemm.segment} x {gemm.K}: want multiples of {GROUP}")
    return Tile8(
        gemm,
        plan.stages,
        plan.together,
        TOKENS,
        plan.depth,
        plan.listed or not gemm.first,
        pdl,
        plan.consumer_registers,
        plan.producer_registers,
        _SOURCE,
        gl.NVMMADistributedLayout([3, 0], [4, 1], [16, GROUP, 32]),
        gl.NVMMADistributedLayout([3, 0], [4, 1], [16, GROUP // 2, 32]),
        gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]),
        _rows_by_warp(16),
        _rows_by_warp(16, GROUP // 2),
        _rows_by_warp(8),
        gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2),
        gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2),
    )


@dataclass(frozen=True, eq=False)
class TileFew:
    """The constants of kernel `w8a8_few`.  From the plan (Few8): N1 rows, N2 many, ST stages, Z parts.  routes: most
    routes of a call, a power of two."""

    gemm: Gemm8
    routes: int
    by_route: bool
    N1: int
    N2: int
    ST: int
    Z: int
    source: str
    LX: Any
    LO: Any
    SB: Any

    @property
    def units(self) -> int:
        """Blocks of 128 columns in a stage of the ring."""
        return 1 if self.gemm.first else 2

    @property
    def iterations(self) -> int:
        """Stages of the ring that a CTA reads for a block of routes."""
        return self.gemm.K // GROUP // self.units // self.Z

    @property
    def column_tiles(self) -> int:
        return self.gemm.segment // GROUP

    @property
    def rows(self) -> int:
        """Weight rows of an expert."""
        return 2 * self.gemm.segment if self.gemm.first else self.gemm.segment


@cache
def tile_few(gemm: Gemm8, plan: Few8, routes: int, by_route: bool) -> TileFew:
    """The constants of `plan` for `gemm`, with room for so many routes (32 or more, a power of two).  ValueError where
    they do not go together."""
    parts = 1 if gemm.first else plan.parts
    if gemm.K % GROUP or gemm.segment % GROUP or (not gemm.first and gemm.K % (2 * GROUP * parts)):
        raise ValueError(f"w8a8_few {gemm.segment} x {gemm.K} in {parts} parts: want multiples of {GROUP}, w2 of twice")
    return TileFew(
        gemm,
        routes,
        by_route,
        plan.rows,
        plan.many,
        plan.stages,
        parts,
        _SOURCE,
        gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]),
        gl.BlockedLayout([8, 1], [16, 2], [1, 4], [0, 1]),
        gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2),
    )
