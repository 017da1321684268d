# mypy: ignore-errors
# (Triton device code: its types are checked by Triton's compiler, not by mypy.)
"""The kernels that kernels.py launches."""

import triton
import triton.language as tl

from expertd_kernels.backends.gather.rounding import largest_of, to_codes
from expertd_kernels.backends.gather.table import WORDS

__all__ = ["AS_CODES", "FROM_STAGED", "NOTHING", "WIDENED", "collect", "deliver", "signal"]

NOTHING, WIDENED, AS_CODES, FROM_STAGED = 0, 1, 2, 3
"""What collect makes of hidden states: nothing; numbers of `hidden`'s type; e4m3 codes and scales, of what the table
names, or of `staged`."""

_WORDS = tl.constexpr(WORDS)


@triton.jit
def _e4m3(codes):
    """e4m3fn codes (uint8) -> f32, by their bits: not every device converts them."""
    magnitude = (codes & 0x7F).to(tl.int32)
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    small = (magnitude & 7).to(tl.float32) * 0.001953125  # 2^-9
    value = tl.where(magnitude < 8, small, normal)
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    return tl.where(codes >= 0x80, -value, value)


@triton.jit
def _hidden(from_hidden, from_scales, row, info, hidden, H: tl.constexpr, BLOCK_H: tl.constexpr):
    kind = info & 15
    out = hidden + row * H
    columns = tl.arange(0, BLOCK_H)
    inside = columns < H
    if kind == 3:  # bf16
        x = tl.load(from_hidden.to(tl.pointer_type(tl.bfloat16)) + columns, mask=inside, other=0.0)
        tl.store(out + columns, x.to(hidden.dtype.element_ty), mask=inside)
    elif kind == 1:  # f32
        x = tl.load(from_hidden.to(tl.pointer_type(tl.float32)) + columns, mask=inside, other=0.0)
        tl.store(out + columns, x.to(hidden.dtype.element_ty), mask=inside)
    elif kind == 2:  # f16
        x = tl.load(from_hidden.to(tl.pointer_type(tl.float16)) + columns, mask=inside, other=0.0)
        tl.store(out + columns, x.to(tl.float32).to(hidden.dtype.element_ty), mask=inside)
    elif kind == 4:  # e4m3 with a scale for 128 columns
        codes = tl.load(from_hidden.to(tl.pointer_type(tl.uint8)) + columns, mask=inside, other=0)
        scales = from_scales.to(tl.pointer_type(tl.float32))
        scale = tl.load(scales + columns // 128, mask=inside, other=0.0)
        tl.store(out + columns, (_e4m3(codes) * scale).to(hidden.dtype.element_ty), mask=inside)
    else:
        tl.store(out + columns, tl.zeros([BLOCK_H], hidden.dtype.element_ty), mask=inside)


@triton.jit
def _codes(
    from_hidden, from_scales, row, info, codes, scales, staged, H: tl.constexpr, BLOCK_H: tl.constexpr,
    STAGED: tl.constexpr,
):  # fmt: skip
    """One row as codes and scales: e4m3 as it is, other numbers rounded to bf16 first, as where nothing takes codes.
    STAGED: somebody else has brought it, e4m3 to its place."""
    kind = info & 15
    columns, group = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_H // 128)
    inside, there = columns < H, group < H // 128
    codes += row * H
    scales += row * (H // 128)
    if kind == 4:
        if not STAGED:
            c = tl.load(from_hidden.to(tl.pointer_type(tl.uint8)) + columns, mask=inside, other=0)
            s = tl.load(from_scales.to(tl.pointer_type(tl.float32)) + group, mask=there, other=0.0)
            tl.store(codes + columns, c, mask=inside)
            tl.store(scales + group, s, mask=there)
    else:
        x = tl.zeros([BLOCK_H], tl.float32)  # padding's
        if STAGED:
            x = tl.load(staged + row * H + columns, mask=inside & (info != 0), other=0.0).to(tl.float32)
        elif kind == 3:
            x = tl.load(from_hidden.to(tl.pointer_type(tl.bfloat16)) + columns, mask=inside, other=0.0).to(tl.float32)
        elif kind == 1:
            x = tl.load(from_hidden.to(tl.pointer_type(tl.float32)) + columns, mask=inside, other=0.0)
        elif kind == 2:
            x = tl.load(from_hidden.to(tl.pointer_type(tl.float16)) + columns, mask=inside, other=0.0).to(tl.float32)
        v = tl.reshape(x.to(tl.bfloat16).to(tl.float32), [1, BLOCK_H // 128, 128])
        largest = largest_of(v)
        c = to_codes(tl.reshape(v / largest[:, :, None], [BLOCK_H])).to(tl.uint8, bitcast=True)
        tl.store(codes + columns, c, mask=inside)
        tl.store(scales + group, tl.reshape(largest, [BLOCK_H // 128]), mask=there)


@triton.jit
def collect(
    table, hidden, scales, staged, slots, weights, verdicts,
    H: tl.constexpr, K: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
    HIDDEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    line = table + row * _WORDS
    # The line is the host's: all of it is asked for at once, then waited for once.  What depends on it likewise.
    from_hidden, from_ids, from_weights = tl.load(line), tl.load(line + 1), tl.load(line + 2)
    info, from_scales, from_slots, counts = tl.load(line + 4), tl.load(line + 5), tl.load(line + 6), tl.load(line + 7)
    there = info != 0
    top_k = ((info >> 16) & 0xFFFF).to(tl.int32)
    E = info >> 32
    slot_of = from_slots.to(tl.pointer_type(tl.int32))
    route = tl.arange(0, BLOCK_K)
    mine = (route < top_k) & (route < K) & there
    id = tl.full([BLOCK_K], -1, tl.int64)
    if ((info >> 4) & 15) == 6:
        id = tl.load(from_ids.to(tl.pointer_type(tl.int64)) + route, mask=mine, other=-1)
    else:
        id = tl.load(from_ids.to(tl.pointer_type(tl.int32)) + route, mask=mine, other=-1).to(tl.int64)
    w = tl.zeros([BLOCK_K], tl.float32)
    weight_kind = (info >> 8) & 15
    if weight_kind == 1:
        w = tl.load(from_weights.to(tl.pointer_type(tl.float32)) + route, mask=mine, other=0.0)
    elif weight_kind == 3:
        w = tl.load(from_weights.to(tl.pointer_type(tl.bfloat16)) + route, mask=mine, other=0.0).to(tl.float32)
    else:
        w = tl.load(from_weights.to(tl.pointer_type(tl.float16)) + route, mask=mine, other=0.0).to(tl.float32)
    if HIDDEN == 1:
        _hidden(from_hidden, from_scales, row, info, hidden, H, BLOCK_H)
    elif HIDDEN > 1:
        _codes(from_hidden, from_scales, row, info, hidden, scales, staged, H, BLOCK_H, HIDDEN == 3)
    odd_id = mine & ((id < -1) | (id >= E))
    odd_weight = mine & ((w != w) | (tl.abs(w) == float("inf")))
    # The first column that is wrong, an id before a weight: 1 + column, the top bit where it is a weight; 0 = none.
    first_id = tl.min(tl.where(odd_id, route, BLOCK_K), 0)
    first_weight = tl.min(tl.where(odd_weight, route, BLOCK_K), 0)
    wrong = (first_id < BLOCK_K) | (first_weight < BLOCK_K)
    which = tl.where(first_id < BLOCK_K, first_id + 1, (first_weight + 1) | -2147483648)
    slot = tl.load(slot_of + tl.where((id >= 0) & (id < E), id, E), mask=mine, other=-1)
    slot = tl.where(mine & (wrong == 0), slot, -1)
    tl.store(slots + row * K + route, slot, mask=route < K)
    tl.store(weights + row * K + route, tl.where(mine & (wrong == 0), w, 0.0), mask=route < K)
    tl.store(verdicts + row * 2, tl.sum((slot >= 0).to(tl.int32), 0))
    tl.store(verdicts + row * 2 + 1, tl.where(wrong, which, 0))
    if counts != 0:
        tl.atomic_add(counts.to(tl.pointer_type(tl.int64)) + slot, 1, mask=slot >= 0, sem="relaxed")


@triton.jit
def deliver(table, out, H: tl.constexpr, BLOCK_H: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    line = table + row * _WORDS
    info = tl.load(line + 4)
    to = tl.load(line + 3)
    kind = (info >> 12) & 15
    columns = tl.arange(0, BLOCK_H)
    x = tl.load(out + row * H + columns, mask=columns < H, other=0.0)  # while the line is on its way
    inside = (columns < H) & (info != 0)
    if kind == 3:
        tl.store(to.to(tl.pointer_type(tl.bfloat16)) + columns, x.to(tl.bfloat16), mask=inside)
    elif kind == 1:
        tl.store(to.to(tl.pointer_type(tl.float32)) + columns, x.to(tl.float32), mask=inside)
    elif kind == 2:
        tl.store(to.to(tl.pointer_type(tl.float16)) + columns, x.to(tl.float32).to(tl.float16), mask=inside)


@triton.jit
def signal(done):
    tl.atomic_xchg(done, 1, sem="release", scope="sys")
