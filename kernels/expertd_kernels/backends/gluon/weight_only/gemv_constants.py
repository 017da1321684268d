"""Static configuration of a launch of kernel `gemv`: what the compiler sees as constants.  Needs triton, no GPU."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from triton.experimental.gluon import language as gl

from expertd_kernels.backends.gluon.weight_only import codec as codec_module
from expertd_kernels.backends.gluon.weight_only.codec import Codec
from expertd_kernels.backends.gluon.weight_only.constants import Gemm
from expertd_kernels.backends.gluon.weight_only.plan import TilePlan

__all__ = ["Slices", "slices"]

SHARED_MEMORY = 228 * 1024
"""Bytes of shared memory of an SM (H100, H200); each CTA takes KEPT more than it asks for."""
KEPT = 1024
SUMS = 2048
"""Bytes of shared memory, at most, for the sums over warps."""


@dataclass(frozen=True, eq=False)
class Slices:
    """The constants of kernel `gemv`.  One object a configuration (`slices` caches), so hashing is by identity.

    slices   of 16 rows a CTA; parts: in how many its W warps share out K (w2: a token's slots and K)
    S        64-column blocks a step; ahead: steps under way
    slots    experts that a part takes one after another (w2); splits: parts of K of one expert
    even     CTAs that an SM takes at most; 0: as many as fit
    TT, SK   parts and S by the names that `weights` knows
    """

    gemm: Gemm
    codec: Codec
    W: int
    slices: int
    parts: int
    S: int
    ahead: int
    slots: int
    splits: int
    even: int
    TT: int
    SK: int
    source: str
    LQ: Any
    LS: Any
    LX: Any
    LB: Any
    LV: Any
    SX: Any
    MMA: Any

    @property
    def tiles(self) -> int:
        """CTAs a route (w13) or token (w2)."""
        return self.gemm.rows * 4 // self.slices

    @property
    def steps(self) -> int:
        """Steps over all of K."""
        return self.gemm.K // (64 * self.S)

    @property
    def part_steps(self) -> int:
        """Steps of a part in one expert; the last part may have fewer."""
        return -(-self.steps // self.splits)

    @property
    def iterations(self) -> int:
        return self.slots * self.part_steps

    @property
    def rounds(self) -> int:
        return -(-self.iterations // self.ahead)

    @property
    def fill(self) -> int:
        """Rounds whose inputs are copied together, with about 16 copies a thread."""
        copies = 4 * self.W // (self.parts * self.ahead * self.S) * 16
        return min(1 << (self.rounds - 1).bit_length(), 1 << max(0, copies.bit_length() - 1))

    @property
    def padded_rounds(self) -> int:
        return -(-self.rounds // self.fill) * self.fill

    @property
    def input_rounds(self) -> int:
        """Rounds of inputs that there is shared memory for: as many more than there are as keep further CTAs from an
        SM that has its share.  Else CTAs that come while those of the kernel in front leave pile up where these leave
        first."""
        each = self.parts * self.ahead * 64 * self.S * 2
        least = -(-(SHARED_MEMORY // (self.even + 1) - KEPT + 1) // each)
        most = (SHARED_MEMORY // max(1, self.even) - KEPT - SUMS) // each
        return least if self.even and self.padded_rounds <= least <= most else self.padded_rounds

    @property
    def slice_words(self) -> int:
        """Stored words of a unit's 16 rows (bf16: elements of a block's)."""
        return 128 if self.codec.planes else 1024

    @property
    def step_words(self) -> int:
        """Stored words (bf16: elements) of a 64-row tile and step."""
        return self.S * (self.codec.units * 512 if self.codec.planes else 4096)

    @property
    def tile_words(self) -> int:
        """Stored words (bf16: elements) of a 64-row tile over all of K."""
        return self.step_words * self.steps

    @property
    def chunks(self) -> int:
        return -(-self.gemm.K // self.codec.chunk)

    @property
    def scales_a_word(self) -> int:
        """Stored numbers that are loaded, and kept until they are used, as one: the exponents of a lane, else 1."""
        return 2 * self.codec.chunk // self.codec.group if self.codec.e8m0 else 1

    @property
    def scale_bits(self) -> int:
        """Bits of that one."""
        return 8 * self.codec.scale_bytes * self.scales_a_word

    @property
    def slice_scales(self) -> int:
        """Words of 16 rows, a plane and chunk."""
        return 16 * self.codec.chunk // self.codec.group // self.scales_a_word

    @property
    def chunk_scales(self) -> int:
        """Words of 64 rows and a chunk."""
        return self.codec.chunk_scales // self.scales_a_word

    @property
    def step_scales(self) -> int:
        """Stored numbers that the CTA's slices of one part read in a step."""
        return self.codec.load_scales(self.S) // 4 * self.slices


_SOURCE = hashlib.sha256(Path(__file__).read_bytes() + Path(codec_module.__file__).read_bytes()).hexdigest()[:16]
"""Part of each Slices: Triton's cache of compiled kernels keys on its text, not on what its properties compute."""


def _log(n: int) -> int:
    return n.bit_length() - 1


def _bases(first: int, count: int) -> list[list[int]]:
    """[0, first], [0, 2 * first], ..: `count` bits of the second coordinate."""
    return [[0, first << i] for i in range(count)]


def _register_layouts(codec: Codec, R: int, P: int, S: int) -> tuple[Any, Any]:
    """(LQ, LS): how registers hold a step's weights [P parts, words of R slices], 16 bytes a lane, and their scales.

    Words of 4 and 8 bits lie as the operand needs them.  Of bf16 a lane has two runs of eight columns of rows r, r + 8.
    """
    parts = [[1 << i, 0] for i in range(_log(P))]
    if not codec.planes:
        registers = [*_bases(1, 3), [0, 32], [0, 512], *_bases(1024 * R, _log(S))]
        lanes, warps = [[0, 8], [0, 16], *_bases(64, 3)], [*_bases(1024, _log(R)), *parts]
        return gl.DistributedLinearLayout(registers, lanes, warps, [], [P, 1024 * R * S]), None
    units = S * codec.units
    registers, warps = [*_bases(1, 2), *_bases(128 * R, _log(units))], [*_bases(128, _log(R)), *parts]
    LQ = gl.DistributedLinearLayout(registers, _bases(4, 5), warps, [], [P, 128 * R * units])
    # scales of a chunk: [plane, slice, lane/4 8, group, i0 2]
    gc, loaded = codec.chunk // codec.group, codec.load_scales(S) // 4 * R
    if codec.e8m0:  # a lane's exponents of a chunk are one word
        registers = _bases(8 * R, _log(loaded // (2 * gc) // (8 * R)))
        lanes, warps = [[0, 0], [0, 0], *_bases(1, 3)], [*_bases(8, _log(R)), *parts]
        return LQ, gl.DistributedLinearLayout(registers, lanes, warps, [], [P, loaded // (2 * gc)])
    registers = [*_bases(1, 1 + _log(gc)), *_bases(16 * R * gc, _log(loaded // (16 * R * gc)))]
    lanes, warps = [[0, 0], [0, 0], *_bases(2 * gc, 3)], [*_bases(16 * gc, _log(R)), *parts]
    return LQ, gl.DistributedLinearLayout(registers, lanes, warps, [], [P, loaded])


def _input_layout(plain: bool, W: int, P: int, S: int) -> Any:
    """[64 * S columns, copies, P parts]: a step's inputs as a lane of the operand reads them, in every warp."""
    columns, lanes = ([1, 2, 4, 32], [8, 16]) if plain else ([1, 8, 16, 32], [2, 4])
    columns += [64 << i for i in range(_log(S))]
    return gl.DistributedLinearLayout(
        [[v, 0, 0] for v in columns],
        [[v, 0, 0] for v in lanes]
        + [[0, 0, 1 << i] for i in range(_log(P))]
        + [[0, 1 << i, 0] for i in range(3 - _log(P))],
        [[0, 0, 0]] * _log(W),
        [],
        [64 * S, 8 // P, P],
    )


def _row_layout(W: int, R: int) -> Any:
    """[16 * R] rows, gate and up of a pair (rows r, r + 8) in one lane, in every warp."""
    lanes = [[1], [2], [4], [16 if R > 1 else 0], [32 if R > 2 else 0]]
    return gl.DistributedLinearLayout([[8]], lanes, [[0]] * _log(W), [], [16 * R])


@cache
def slices(gemm: Gemm, plan: TilePlan, even: int = 0) -> Slices:
    """The constants of `plan` for `gemm`; even: CTAs an SM at most, 0 for as many as fit.  ValueError where they do not
    go together."""
    c, codec = plan, gemm.codec
    P, S = c.warps // c.tiles, c.columns // 64
    if c.kernel != "gemv" or c.tiles not in (1, 2, 4) or P not in (1, 2, 4, 8) or P * c.tiles != c.warps:
        raise ValueError(f"plan {c}: want kernel gemv with tiles 1, 2 or 4 and warps 1, 2, 4 or 8 times as many")
    if S not in (1, 2, 4) or gemm.K % c.columns:
        raise ValueError(f"plan {c}: want {gemm.K} columns in whole steps of columns 64, 128 or 256")
    if codec.planes and c.columns % codec.group and codec.group % c.columns:
        raise ValueError(f"plan {c}: a step of {c.columns} columns does not hold whole groups of {codec.group}")
    slots, splits = 1, P
    if not gemm.first:
        splits = max(1, P // (1 << (gemm.top_k - 1).bit_length()))
        slots = -(-gemm.top_k // (P // splits))
    LQ, LS = _register_layouts(codec, c.tiles, P, S)
    return Slices(
        gemm,
        codec,
        c.warps,
        c.tiles,
        P,
        S,
        c.stages,
        slots,
        splits,
        even,
        P,
        S,
        _SOURCE,
        LQ,
        LS,
        gl.BlockedLayout([1, 8], [4 // S, 8 * S], [c.warps, 1], [1, 0]),
        _input_layout(not codec.planes, c.warps, P, S),
        _row_layout(c.warps, c.tiles),
        gl.SwizzledSharedLayout(8, 1, P, [1, 0]),
        gl.NVMMADistributedLayout([2, 0], [c.warps, 1], [16, 8]),
    )
