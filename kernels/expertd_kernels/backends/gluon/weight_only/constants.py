"""Static configuration of one GEMM launch: what the compiler sees as constants.  Needs triton (layouts), no GPU."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from triton.experimental.gluon import language as gl

from expertd_kernels.backends.gluon.weight_only import codec as codec_module
from expertd_kernels.backends.gluon.weight_only.codec import Codec
from expertd_kernels.backends.gluon.weight_only.plan import TilePlan

__all__ = ["Gemm", "Tile", "tile"]


@dataclass(frozen=True)
class Gemm:
    """One of the two GEMMs of a layer.

    codec       how weights are stored; K, rows: columns and 64-row tiles of one expert's packed matrix
    x_columns   columns of the input that exist (the rest up to K counts as zero); x_stride: elements a row
    out_columns columns of the output that exist = elements an output row
    first       w13 (with the activation) or w2; gated: w13 rows alternate 8 gate, 8 up
    weight      whether the router weight multiplies this GEMM's result (w2; w13 where it belongs on the input)
    """

    codec: Codec
    K: int
    rows: int
    x_columns: int
    x_stride: int
    out_columns: int
    experts: int
    top_k: int
    first: bool
    gated: bool
    weight: bool
    bias: bool
    act: str = "silu_and_mul"
    alpha: float = 0.0
    beta: float = 0.0
    limit: float = 0.0
    limited: bool = False


@dataclass(frozen=True, eq=False)
class Tile:
    """The constants of a kernel.  One object a distinct configuration (`tile` caches), so hashing is by identity.

    The plan's numbers (TilePlan) by the letters of the kernels: BM rows, T tiles, W warps, S columns and SK MMA columns
    in 64-column blocks, ST stages, D delay, V narrower, X stretch, Z parts.
    words: mode "ids": 32-bit words that hold a bit a route; 0: no two routes share an expert, or it does not matter.
    TT: 64-row tiles an A operand covers (T; half of it in kernel "ws").
    listed: whether the intermediate stands in the order of the route lists (kernel "wide" for both GEMMs).
    tabled: mode "lists": whether blocks were listed (routing._list_blocks); else each CTA counts them from the counts.
    counted: w13's tiles of a block, which it counts and w2's tiles of that block wait for; 0: w2 waits for all of w13.
    """

    gemm: Gemm
    codec: Codec
    mode: str
    words: int
    BM: int
    T: int
    TT: int
    W: int
    S: int
    ST: int
    D: int
    SK: int
    V: int
    X: int
    Z: int
    pdl: bool
    early: bool
    source: str
    LQ: Any
    LS: Any
    LX: Any
    LC: Any
    LI: Any
    SX: Any
    SW: Any
    listed: bool
    counted: int
    tabled: bool

    @property
    def slices(self) -> int:
        """Slices of 16 rows in a row tile."""
        return 4

    @property
    def iterations(self) -> int:
        """Stages that cover a CTA's part of K; the last may reach beyond it."""
        return -(-self.gemm.K // (64 * self.S * self.Z))

    @property
    def producer_registers(self) -> int:
        """Kernel "ws": of a thread that copies.  What those of four row tiles and one warpgroup leave."""
        return 48 if 4 * self.TT == self.T else 56

    @property
    def parts(self) -> int:
        """Kernel "wide": warpgroups that multiply, each 64 tokens of a block."""
        return self.BM // 64

    @property
    def gathers(self) -> bool:
        """Kernel "wide": whether the producer fetches inputs row by row."""
        return self.gemm.first or not self.listed

    @property
    def column_tiles(self) -> int:
        return -(-self.gemm.rows // self.T)

    @property
    def padded_experts(self) -> int:
        """Experts, rounded up to a power of two and at least a warp."""
        return max(32, 1 << (self.gemm.experts - 1).bit_length())

    @property
    def out_rows(self) -> int:
        """Output columns that one 64-row tile makes."""
        return 32 if self.gemm.first and self.gemm.gated else 64

    @property
    def x_masked(self) -> bool:
        return self.gemm.x_columns % (64 * self.S) != 0

    @property
    def rows_masked(self) -> bool:
        return self.gemm.rows % self.T != 0

    @property
    def out_masked(self) -> bool:
        return self.gemm.out_columns != self.column_tiles * self.T * self.out_rows

    @property
    def stage_units(self) -> int:
        """2 KiB units of weights a 64-row tile and stage."""
        return self.S * self.codec.units

    @property
    def stage_scales(self) -> int:
        """Stored scales (and zero points) a 64-row tile and stage."""
        return self.S * 64 // self.codec.chunk * self.codec.chunk_scales

    @property
    def expert_scales(self) -> int:
        """Stored scales of one 64-row tile over all of K."""
        return -(-self.gemm.K // self.codec.chunk) * self.codec.chunk_scales


_SOURCE = hashlib.sha256(Path(__file__).read_bytes() + Path(codec_module.__file__).read_bytes()).hexdigest()[:16]
"""Part of each Tile: Triton's cache of compiled kernels keys on its text, not on what its properties compute."""


def _register_layouts(codec: Codec, TT: int, W: int, SK: int) -> tuple[Any, Any]:
    """(LQ, LS): how registers hold SK 64-column blocks of weights [TT, 16 * units, 32] words, and their scales.

    A lane reads its four words of every unit (bits 0, 1 of the flat word index), lanes bits 2..6, warps bits 7, 8.
    More warps than four lie along the row tiles.
    """

    def word(v: int) -> list[int]:
        return [0, 0, v] if v < 32 else [0, v // 32, 0]

    over_warps = [1 << i for i in range((W // 4).bit_length() - 1)]
    over_registers = [t for t in (1, 2, 4, 8) if t < TT and t not in over_warps]
    units = SK * codec.units
    LQ = gl.DistributedLinearLayout(
        [word(1), word(2)]
        + [word(512 << i) for i in range(units.bit_length() - 1)]
        + [[t, 0, 0] for t in over_registers],
        [word(4 << i) for i in range(5)],
        [word(128), word(256)] + [[t, 0, 0] for t in over_warps],
        [],
        [TT, 16 * units, 32],
    )
    # scales of a chunk: [plane, warp 4, lane/4 8, group, i0 2]
    gc, loaded = codec.chunk // codec.group, codec.load_scales(SK)
    lane = 2 * gc
    registers = [1] + [2 << i for i in range(gc.bit_length() - 1)]
    registers += [64 * gc << i for i in range((loaded // (64 * gc)).bit_length() - 1)]
    LS = gl.DistributedLinearLayout(
        [[0, v] for v in registers] + [[t, 0] for t in over_registers],
        [[0, 0], [0, 0], [0, lane], [0, 2 * lane], [0, 4 * lane]],
        [[0, 8 * lane], [0, 16 * lane]] + [[t, 0] for t in over_warps],
        [],
        [TT, loaded],
    )
    return LQ, LS


def _copy_layout(columns: int, vector: int, warps: int) -> Any:
    """[rows, columns] by copies of `vector` elements (16 bytes) a thread."""
    n = min(columns // vector, 32)
    return gl.BlockedLayout([1, vector], [32 // n, n], [warps, 1], [1, 0])


def _every_warp(n: int, warps: int) -> Any:
    """[n], element i in lane i % 32 of each warp."""
    lanes = [[1 << i] for i in range(5)]
    return gl.DistributedLinearLayout(
        [[32 << i] for i in range((n // 32).bit_length() - 1)], lanes, [[0]] * (warps.bit_length() - 1), [], [n]
    )


@cache
def tile(
    gemm: Gemm,
    plan: TilePlan,
    mode: str,
    pdl: bool,
    words: int = 0,
    listed: bool = False,
    counted: int = 0,
    tabled: bool = False,
) -> Tile:
    """The constants of `plan` for `gemm`.  ValueError where they do not go together."""
    codec, c = gemm.codec, plan
    if (
        not codec.planes
        and c.kernel != "wide"
        and (c.kernel == "ws" or (c.tiles > 1 and c.columns > 64) or c.delay > 1)
    ):
        raise ValueError(
            f"plan {c}: bf16 weights go with kernel wide, and with kernel block under delay 1 and tiles 1 or columns 64"
        )
    fixed = (c.tiles, c.warps, c.columns, c.stretch)
    if c.kernel == "wide" and (codec.planes or c.rows not in (128, 192) or fixed != (4, 4, 64, 0)):
        raise ValueError(f"plan {c}: kernel wide takes bf16 weights, rows 128 or 192, tiles 4, warps 4, columns 64")
    if c.columns % codec.chunk or (c.mma_columns % codec.group and codec.group % c.mma_columns):
        raise ValueError(f"plan {c}: a stage of {c.columns} columns does not hold whole groups of {codec.group}")
    TT = c.tiles
    if c.kernel == "ws":
        TT = c.tiles // 4 if c.rows == 64 and c.warps == 4 and c.tiles == 4 else c.tiles // 2
    if c.warps // 4 > TT:
        raise ValueError(f"plan {c}: {c.warps} warps need {c.warps // 4} row tiles an operand, it has {TT}")
    stretches = c.kernel == "ws" or (c.kernel == "block" and codec.planes)
    if c.stretch and (not stretches or mode != "lists" or c.stretch < 8 or c.stretch & (c.stretch - 1)):
        raise ValueError(
            f"plan {c}: stretch goes with kernels ws and block, mode lists, and is a power of two, at least 8"
        )
    if c.parts > 1 and (gemm.first or c.kernel != "block" or gemm.K % (c.columns * c.parts)):
        raise ValueError(f"plan {c}: parts go with w2 in kernel block, and {gemm.K} columns in whole stages")
    LQ, LS = _register_layouts(codec, TT, c.warps, c.mma_columns // 64) if codec.planes else (None, None)
    copiers = c.warps if c.kernel == "block" else 4
    scales = c.columns // codec.chunk * codec.chunk_scales
    return Tile(
        gemm,
        codec,
        mode,
        words,
        c.rows,
        c.tiles,
        TT,
        c.warps,
        c.columns // 64,
        c.stages,
        c.delay,
        c.mma_columns // 64,
        c.narrower,
        c.stretch,
        c.parts,
        pdl,
        pdl and not c.late and not gemm.first,
        _SOURCE,
        LQ,
        LS,
        _copy_layout(c.columns, 8, copiers),
        _copy_layout(scales, 16 // codec.scale_bytes, copiers) if codec.planes else None,
        _every_warp(32 * words, c.warps) if words else None,
        gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2),
        gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=3),
        listed,
        counted,
        tabled,
    )
