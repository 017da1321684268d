# mypy: ignore-errors
# (Triton device code: its types are checked by Triton's compiler, not by mypy.)
"""Device code around the GEMMs: grouping routes by expert, and the sum over a token's routes.

A route is token * top_k + slot.  Its id may be -1 (computed elsewhere); anything outside 0..E-1 counts as -1.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["n"])
def group_routes(ids, counts, lists, n, TH: tl.constexpr, CH: tl.constexpr, PDL: tl.constexpr):
    """lists [n]: the routes of expert 0, of expert 1, ..., each in order; counts [E].  One program an expert.

    Row r of the [TH, CH] tile owns a contiguous part of the ids, so one scan over TH places them all."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    e = tl.program_id(0)
    per = ((n + TH - 1) // TH + CH - 1) // CH * CH
    b = tl.arange(0, TH) * per
    c = tl.zeros([TH], tl.int32)
    below = tl.zeros([TH], tl.int32)
    for s in range(0, per, CH):
        i = b[:, None] + (s + tl.arange(0, CH))[None, :]
        v = tl.load(ids + i, mask=i < n, other=-1)
        c += tl.sum((v == e).to(tl.int32), 1)
        below += tl.sum(((v >= 0) & (v < e)).to(tl.int32), 1)
    start = tl.sum(below, 0)
    p = start + tl.cumsum(c, 0) - c
    tl.store(counts + e, tl.sum(c, 0))
    for s in range(0, per, CH):
        i = b[:, None] + (s + tl.arange(0, CH))[None, :]
        v = (tl.load(ids + i, mask=i < n, other=-1) == e).to(tl.int32)
        tl.store(lists + p[:, None] + tl.cumsum(v, 1) - 1, i, mask=v > 0)
        p += tl.sum(v, 1)


@triton.jit(do_not_specialize=["n"])
def table_routes(
    ids,
    table,
    lists,
    n,
    E: tl.constexpr,
    EP: tl.constexpr,
    MAXB: tl.constexpr,
    BM: tl.constexpr,
    B: tl.constexpr,
    PDL: tl.constexpr,
):
    """Few routes: table[block] = expert | routes << 16 (-1: no block), lists[block * BM ..] = its routes.  One program
    an expert."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    e = tl.program_id(0)
    i = tl.arange(0, B)
    v = tl.load(ids + i, mask=i < n, other=-1)
    here = (v >= 0) & (v < E)
    nb = (tl.histogram(tl.where(here, v, 0), EP, mask=here) + BM - 1) // BM
    pre = tl.sum(tl.where(tl.arange(0, EP) < e, nb, 0), 0)
    mine = (v == e).to(tl.int32)
    cnt = tl.sum(mine, 0)
    tl.store(lists + pre * BM + tl.cumsum(mine, 0) - 1, i, mask=mine > 0)
    b = tl.arange(0, MAXB)
    tl.store(table + pre + b, e | (tl.minimum(cnt - b * BM, BM) << 16), mask=b * BM < cnt)
    if e == E - 1:
        total = pre + (cnt + BM - 1) // BM
        tl.store(table + b, -1, mask=b >= total)


@triton.jit
def combine(
    y,
    ids,
    out,
    H,
    E,
    TOPK: tl.constexpr,
    B: tl.constexpr,
    PDL: tl.constexpr,
    PARTS: tl.constexpr = 1,
    done=None,
    COUNTERS: tl.constexpr = 0,
):
    """out[t] = sum of y[route] over the token's routes that are computed here, in f32, in the order of the slots.
    y [PARTS, tokens * TOPK, H]: each route's result as the sum of PARTS.  done [COUNTERS]: set back to 0."""
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * B + tl.arange(0, B)
    here = 0
    for k in tl.static_range(TOPK):  # the ids are older than the kernel before: no need to wait for it
        e = tl.load(ids + t * TOPK + k)
        here |= ((e >= 0) & (e < E)).to(tl.int32) << k
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if COUNTERS > 0 and (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(done + tl.arange(0, COUNTERS), 0)
    a = tl.zeros([B], tl.float32)
    for i in tl.static_range(TOPK * PARTS):
        at = (i // TOPK * tl.num_programs(0) + t) * TOPK + i % TOPK
        a += tl.load(y + at * H + c, mask=(c < H) & ((here >> (i % TOPK)) & 1 == 1), other=0.0).to(tl.float32)
    tl.store(out + t * H + c, a.to(out.dtype.element_ty), mask=c < H)
