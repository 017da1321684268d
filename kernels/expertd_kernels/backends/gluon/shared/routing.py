# mypy: ignore-errors
# (Triton device code: its types are checked by Triton's compiler, not by mypy.)
"""Device code around the GEMMs: grouping routes by expert, and the sum over a token's routes.

A route is token * top_k + slot.  Its id may be -1 (computed elsewhere); anything outside 0..E-1 counts as -1.

Grouping is a stable counting sort, without the host and without atomics.  Few routes: a program an expert looks at all
of them (`group_few`, `table_routes`).  Many: `count_routes` leaves each chunk's count of each expert, and
`place_routes`, a program a chunk, which has ranked its ids meanwhile, adds up what stands before them.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _set_bits(m):
    """How many bits of each uint32 are 1: an instruction, which LLVM recognizes in this."""
    m = m - ((m >> 1) & 0x55555555)
    m = (m & 0x33333333) + ((m >> 2) & 0x33333333)
    m = (m + (m >> 4)) & 0x0F0F0F0F
    return ((m * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _load_ids(ids, i, n):
    """The ids at i, -1 beyond n; 16 bytes at a time where n allows, which one mask i < n would not."""
    whole = i // 4 * 4 + 3 < n
    v = tl.load(ids + i, mask=whole, other=-1)
    return tl.where(whole, v, tl.load(ids + i, mask=(i < n) & (i // 4 * 4 + 3 >= n), other=-1))


@triton.jit(do_not_specialize=["n"])
def group_few(ids, counts, lists, n, TH: tl.constexpr, CH: tl.constexpr, PDL: tl.constexpr):
    """lists [n]: the routes of expert 0, of expert 1, ..., each in order; counts [E].  One program an expert.

    Row r of the [TH, CH] tile owns a contiguous part of the ids, so one scan over TH places them all.  bits: in
    which of up to 32 steps an element's route is this expert's, so that the ids are read once."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    e = tl.program_id(0)
    steps = tl.cdiv(n, TH * CH)
    i = (tl.arange(0, TH) * (steps * CH))[:, None] + tl.arange(0, CH)[None, :]
    bits = tl.zeros([TH, CH], tl.int32)
    below = tl.zeros([TH, CH], tl.int32)
    for s in range(steps):
        v = _load_ids(ids, i + s * CH, n)
        bits |= (v == e).to(tl.int32) << s
        below += ((v >= 0) & (v < e)).to(tl.int32)
    mine = tl.sum(_set_bits(bits.to(tl.uint32)), 1)
    p = tl.sum(tl.sum(below, 1), 0) + tl.cumsum(mine, 0) - mine
    tl.store(counts + e, tl.sum(mine, 0))
    for s in range(steps):
        here = (bits >> s) & 1
        tl.store(lists + p[:, None] + tl.cumsum(here, 1) - 1, i + s * CH, mask=here > 0)
        p += tl.sum(here, 1)


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
def _matches(v, here, EP: tl.constexpr, G: tl.constexpr):
    """ids v [G * 32], those that count `here` -> how many equal ones stand before each among its 32 [G * 32], and how
    many of each expert's stand in each 32 [G, EP].  One word holds one bit of 32 ids; two ids are equal where all of
    their bits agree, so log2(EP) words compare each id with 32 others."""
    BITS: tl.constexpr = tl.standard._log2(EP)
    u = tl.reshape(v, [G, 32]).to(tl.uint32)
    lane = tl.arange(0, 32).to(tl.uint32)[None, :]
    expert = tl.arange(0, EP).to(tl.uint32)[None, :]
    w = tl.xor_sum(tl.reshape(here, [G, 32]).to(tl.uint32) << lane, 1)[:, None]
    before = w & ((tl.full([1, 32], 1, tl.uint32) << lane) - 1)
    each = tl.broadcast_to(w, [G, EP])
    for b in tl.static_range(BITS):
        bit = (u >> b) & 1
        w = tl.xor_sum(bit << lane, 1)[:, None]
        before &= w ^ (bit - 1)
        each &= w ^ (((expert >> b) & 1) - 1)
    return tl.reshape(_set_bits(before), [G * 32]), _set_bits(each)


@triton.jit(do_not_specialize=["n"])
def count_routes(ids, table, n, E: tl.constexpr, EP: tl.constexpr, C: tl.constexpr, PDL: tl.constexpr):
    """table [programs, EP] int16: the routes of each expert in each C ids."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # not before the ids are there: the next kernel reads them before it waits for this one
    chunk = tl.program_id(0)
    r = chunk * C + tl.arange(0, C)
    v = tl.load(ids + r, mask=r < n, other=-1)
    here = (v >= 0) & (v < E)
    h = tl.histogram(tl.where(here, v, 0), EP, mask=here)
    tl.store(table + chunk * EP + tl.arange(0, EP), h.to(table.dtype.element_ty))


@triton.jit
def _before(table, chunk, chunks, EP: tl.constexpr, BC: tl.constexpr):
    """table of count_routes -> the routes of each expert in all chunks, and in those before this one [EP]."""
    every = tl.zeros([BC, EP], tl.int32)
    earlier = tl.zeros([BC, EP], tl.int32)
    for c0 in range(0, chunks, BC):
        c = (c0 + tl.arange(0, BC))[:, None]
        h = tl.load(table + c * EP + tl.arange(0, EP)[None, :], mask=c < chunks, other=0).to(tl.int32)
        every += h
        earlier += tl.where(c < chunk, h, 0)
    return tl.sum(every, 0), tl.sum(earlier, 0)


@triton.jit
def place(
    ids, table, counts, lists, places, n, chunks, E: tl.constexpr, EP: tl.constexpr, C: tl.constexpr,
    BC: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """This program's chunk of place_routes.  WAIT: for the kernel before, with this chunk's ids ranked."""
    G: tl.constexpr = C // 32
    chunk, experts = tl.program_id(0), tl.arange(0, EP)
    r = chunk * C + tl.arange(0, C)
    v = tl.load(ids + r, mask=r < n, other=-1)
    here = (v >= 0) & (v < E)
    rank, each = _matches(v, here, EP, G)
    if WAIT:
        gdc_wait()
    total, before = _before(table, chunk, chunks, EP, BC)
    if chunk == 0:
        tl.store(counts + experts, total, mask=experts < E)
    base = (tl.cumsum(total, 0) - total + before)[None, :] + tl.cumsum(each, 0) - each
    at = tl.gather(tl.reshape(base, [G * EP]), tl.where(here, v, 0) + tl.arange(0, C) // 32 * EP, 0) + rank
    tl.store(lists + at, r, mask=here)
    if places is not None:
        tl.store(places + r, tl.where(here, at, -1), mask=r < n)


@triton.jit
def _list_blocks(
    table, blocks, chunks, E: tl.constexpr, EP: tl.constexpr, BC: tl.constexpr,
    BM: tl.constexpr, X: tl.constexpr, MAXB: tl.constexpr,
):  # fmt: skip
    """blocks [2 + 2 * MAXB]: how many there are; from 2 on of each expert | routes << 16 and its first place in the
    list, beyond the last one expert E without routes.  An expert's last block has up to BM + X routes; blocks of more
    than BM / 2 routes of all experts come first."""
    experts = tl.arange(0, EP)
    cnt, _ = _before(table, 0, chunks, EP, BC)
    n = tl.where(cnt > X, (cnt - X + (BM - 1)) // BM, tl.minimum(cnt, 1))
    last = cnt - (n - 1) * BM
    short = ((cnt > 0) & (last <= BM // 2)).to(tl.int32)
    long = n - short
    all_long = tl.sum(long, 0)
    first_long, first_short = tl.cumsum(long, 0) - long, tl.cumsum(short, 0) - short
    base = tl.cumsum(cnt, 0) - cnt
    total = all_long + tl.sum(short, 0)
    tl.store(blocks, total)
    for j in range(tl.max(n, 0)):
        at = blocks + 2 + 2 * tl.where(j < long, first_long + j, all_long + first_short)
        tl.store(at, experts | (tl.where(j == n - 1, last, BM) << 16), mask=j < n)
        tl.store(at + 1, base + j * BM, mask=j < n)
    b = tl.arange(0, MAXB)
    tl.store(blocks + 2 + 2 * b, E, mask=b >= total)


@triton.jit(do_not_specialize=["n", "chunks"])
def place_routes(
    ids, table, counts, lists, places, n, chunks, E: tl.constexpr, EP: tl.constexpr, C: tl.constexpr,
    BC: tl.constexpr, PDL: tl.constexpr, blocks=None, BM: tl.constexpr = 0, X: tl.constexpr = 0,
    MAXB: tl.constexpr = 0,
):  # fmt: skip
    """counts [E], lists [n] as group_few leaves them, a program a chunk of C ids; table: what count_routes left, BC
    chunks of it at a time; places [n]: the inverse of lists, -1 where a route goes nowhere; or None.  blocks: see
    _list_blocks; a program more lists them."""
    if PDL:
        gdc_launch_dependents()
    if MAXB > 0:
        if tl.program_id(0) == chunks:
            if PDL:
                gdc_wait()
            _list_blocks(table, blocks, chunks, E, EP, BC, BM, X, MAXB)
        else:
            place(ids, table, counts, lists, places, n, chunks, E, EP, C, BC, PDL)
    else:
        place(ids, table, counts, lists, places, n, chunks, E, EP, C, BC, PDL)


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
    weights=None,
):
    """out[t] = sum of y[route] over the token's routes that are computed here, in f32, in the order of the slots.
    y [PARTS, tokens * TOPK, H]: each route's result as the sum of PARTS.  done [COUNTERS]: set back to 0.
    weights [tokens, TOPK] f32: what each result is multiplied by, or None."""
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
        computed = (here >> (i % TOPK)) & 1 == 1
        v = tl.load(y + at * H + c, mask=(c < H) & computed, other=0.0).to(tl.float32)
        if weights is not None:
            v *= tl.load(weights + t * TOPK + i % TOPK, mask=computed, other=0.0)
        a += v
    tl.store(out + t * H + c, a.to(out.dtype.element_ty), mask=c < H)
