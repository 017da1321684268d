# mypy: ignore-errors
# (Triton device code: its types are checked by Triton's compiler, not by mypy.)
"""int4 codes put into the order of packing.py on a GPU in one pass, where torch's operations take some hundred."""

import triton
import triton.language as tl

__all__ = ["pack_int4"]

_BLOCK = 1024


@triton.jit
def int4_words(codes, out, words, tiles, units, GATED: tl.constexpr, BLOCK: tl.constexpr):
    """codes [E, N, K / 2] u8 -> out [E, N / 64, K / 64, 4, 32, 4] int32; tiles, units: N / 64, K / 64."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < words
    word, lane, warp = at % 4, at // 4 % 32, at // 128 % 4
    unit, tile, expert = at // 512 % units, at // (512 * units) % tiles, at // (512 * units * tiles)
    if GATED:
        row = tile * 32 + warp * 8 + lane // 4
        other = row + tiles * 32
    else:
        row = tile * 64 + warp * 16 + lane // 4
        other = row + 8
    first = codes + expert.to(tl.int64) * (tiles * 64) * (units * 32) + unit * 32 + word * 8 + lane % 4
    a = tl.load(first + row * units * 32, mask=inside, other=0).to(tl.int32)
    b = tl.load(first + other * units * 32, mask=inside, other=0).to(tl.int32)
    c = tl.load(first + row * units * 32 + 4, mask=inside, other=0).to(tl.int32)
    d = tl.load(first + other * units * 32 + 4, mask=inside, other=0).to(tl.int32)
    low = (a & 15) | ((b & 15) << 4) | ((c & 15) << 8) | ((d & 15) << 12)
    high = (a >> 4) | ((b >> 4) << 4) | ((c >> 4) << 8) | ((d >> 4) << 12)
    tl.store(out + at, low | (high << 16), mask=inside)


def pack_int4(codes, out, gated):
    """codes [E, N, K / 2] u8, contiguous, N and K multiples of 64; out [E, N / 64, K / 64, 4, 32, 4] int32, fewer than
    2 ** 31 - 1024 of them; gated: the first half of the rows alternates with the second."""
    words = out.numel()
    tiles, units = out.shape[1:3]
    int4_words[(triton.cdiv(words, _BLOCK),)](codes, out, words, tiles, units, GATED=gated, BLOCK=_BLOCK, num_warps=4)
