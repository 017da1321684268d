# mypy: ignore-errors
# (Gluon device code: its types are checked by Triton's compiler, not by mypy.)
"""Kernel `w8a8`: e4m3 weights times e4m3 activations, persistent and warp-specialised.  `C` is a Tile8.

Tokens lie on the 64 side of wgmma, weight rows on its N side: an activation scale is then one number a thread and row,
a weight scale one number for a whole product.  A tile is 128 tokens x two times 128 weight rows, of gate and up for
w13.  128 columns at a time are summed by the tensor core (its own sums have few bits) and added in f32, scaled.

Each consumer warpgroup is a partition of its own with 64 tokens of the block, so that none waits for the other: while
one adds, the tensor cores work for the other.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from expertd_kernels.backends.gluon.pieces import _BARRIER, barrier, block_list, copy_elements, copy_tile
from expertd_kernels.backends.gluon.tiles_of_tokens import EARLY, find_tile, next_slot, skip_tile, tell, told
from expertd_kernels.backends.gluon.w8a8_epilogue import epilogue, row_of


@gluon.jit
def _back(slot, k: gl.constexpr, C: gl.constexpr):
    """the slot k stages before"""
    return gl.where(slot < k, slot + (C.ST - k), slot - k)


@gluon.jit
def _fill(x, xd, wd, p, m, run0, run1, base, i, a_s, b_s, full, empty, slot, ph, issued, C: gl.constexpr):
    """stage i of a tile, in the next slot"""
    D: gl.constexpr = C.depth  # gathered inputs are declared to be there D stages after they were asked for
    mbarrier.wait(empty.index(slot), ph)
    mbarrier.expect(full.index(slot), C.stage_bytes)
    copy_tile(wd, [run0 + i * 128, 0], full.index(slot), b_s.index(2 * slot))
    copy_tile(wd, [run1 + i * 128, 0], full.index(slot), b_s.index(2 * slot + 1))
    if not C.listed:
        copy_elements(a_s.index(slot), p + i * 128, mask=m)
        async_copy.commit_group()
        async_copy.wait_group(D)
        fence_async_shared()
        mbarrier.arrive(full.index(_back(slot, D, C)), count=1, pred=issued >= D)
        issued += 1
    else:
        copy_tile(xd, [base, i * 128], full.index(slot), a_s.index(slot))
    slot, ph = next_slot(slot, ph, C)
    return slot, ph, issued


@gluon.jit
def _producer(x, xd, wd, counts, lists, tickets, tile, a_s, b_s, full, empty, C: gl.constexpr):
    ie, cnt, nb, cum, _blocks = block_list(counts, C, 4)
    slot = gl.to_tensor(0)
    ph = gl.to_tensor(1)
    issued = gl.to_tensor(0)
    ALMOST: gl.constexpr = C.iterations - EARLY if C.iterations > EARLY else 0
    L: gl.constexpr = gl.SliceLayout(1, C.LX)
    r = gl.arange(0, 128, L)
    e, base, n, col = find_tile(ie, cnt, nb, cum, gl.program_id(0), C.GM, C)
    while n > 0:
        if C.gemm.first:
            run0 = e * (C.rows // 128) + col
            run1 = run0 + C.gemm.segment // 128
        else:
            run0 = e * (C.rows // 128) + 2 * col
            run1 = run0 + 1
        p = 0
        m = 0
        if not C.listed:
            f = gl.load(lists + base + r, mask=r < n, other=0) // C.gemm.top_k
            p = gl.expand_dims(f.to(gl.int64) * C.gemm.K, 1)
            p = x + p + gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, C.LX)), 0)
            m = gl.expand_dims(r < n, 1)
        run0 *= C.iterations * 128
        run1 *= C.iterations * 128
        mbarrier.wait(empty.index(slot), ph)
        tell(tile, slot, e, base, n, col, 4)
        for i in range(ALMOST):
            slot, ph, issued = _fill(x, xd, wd, p, m, run0, run1, base, i, a_s, b_s, full, empty, slot, ph, issued, C)
        t = gl.num_programs(0) + gl.atomic_add(tickets, 1, sem="relaxed")
        e, next_base, next_n, col = find_tile(ie, cnt, nb, cum, t, C.GM, C)
        for i in range(ALMOST, C.iterations):
            slot, ph, issued = _fill(x, xd, wd, p, m, run0, run1, base, i, a_s, b_s, full, empty, slot, ph, issued, C)
        base = next_base
        n = next_n
    if not C.listed:
        D: gl.constexpr = C.depth
        async_copy.wait_group(0)
        fence_async_shared()
        for k in gl.static_range(D):
            mbarrier.arrive(full.index(_back(slot, D - k, C)), count=1, pred=issued >= D - k)
    mbarrier.wait(empty.index(slot), ph)
    tell(tile, slot, 0, 0, 0, 0, 4)
    mbarrier.arrive(full.index(slot), count=1 if C.listed else 2)


@gluon.jit
def _add_scaled(acc, p, s):
    """acc + p * s by row, at this place: left to itself, the compiler moves it behind the next product, and two
    products are more than the registers hold."""
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [p, gl.expand_dims(s, 1), acc], dtype=gl.float32, is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def _multiply(pointers, first, ok, a_s, b_s, full, empty, slot, ph, PART: gl.constexpr, C: gl.constexpr):
    """acc0, acc1 [64, 128] f32: the part's rows times the tile's two runs of 128 weight rows.  pointers: as _pointers
    gives them; first: what they point to.

    Nothing stands between the end of a product and the issue of the next but the addition of its result: the barriers,
    and the scales of the next stage, are waited for while a product runs."""
    xs, ws0, ws1 = pointers
    x, w0, w1 = first
    M: gl.constexpr = 64
    MMA: gl.constexpr = C.MMA
    acc0 = gl.zeros([M, 128], gl.float32, MMA)
    acc1 = gl.zeros([M, 128], gl.float32, MMA)
    none = gl.zeros([M, 128], gl.float32, MMA)
    mbarrier.wait(full.index(slot), ph)
    for i in range(C.iterations):
        a = a_s.index(slot).slice(64 * PART, 64, 0)
        b0 = b_s.index(2 * slot).permute((1, 0))
        b1 = b_s.index(2 * slot + 1).permute((1, 0))
        t = warpgroup_mma(a, b0, warpgroup_mma_init(none), use_acc=False, is_async=True)
        mbarrier.arrive(empty.index(_back(slot, 1, C)), count=1, pred=i > 0)
        more = ok & (i + 1 < C.iterations)
        nx = gl.load(xs + (i + 1), mask=more, other=0.0)
        n0 = gl.load(ws0 + (i + 1), mask=more, other=0.0)
        n1 = gl.load(ws1 + (i + 1), mask=more, other=0.0)
        s0 = x * w0
        s1 = x * w1
        slot, ph = next_slot(slot, ph, C)
        p = warpgroup_mma_wait(0, deps=[t])
        acc0 = _add_scaled(acc0, p, s0)
        t = warpgroup_mma(a, b1, warpgroup_mma_init(none), use_acc=False, is_async=True)
        mbarrier.wait(full.index(slot), ph, pred=i + 1 < C.iterations)
        p = warpgroup_mma_wait(0, deps=[t])
        acc1 = _add_scaled(acc1, p, s1)
        x = nx
        w0 = n0
        w1 = n1
    mbarrier.arrive(empty.index(_back(slot, 1, C)), count=1)
    return acc0, acc1, slot, ph


@gluon.jit
def _sum(a_s, b_s, full, empty, slot, ph, PART: gl.constexpr, C: gl.constexpr):
    """as _multiply, before any scale: the tensor core sums all of K, the products of two stages in flight"""
    M: gl.constexpr = 64
    MMA: gl.constexpr = C.MMA
    t0 = warpgroup_mma_init(gl.zeros([M, 128], gl.float32, MMA))
    t1 = warpgroup_mma_init(gl.zeros([M, 128], gl.float32, MMA))
    for i in range(C.iterations):
        mbarrier.wait(full.index(slot), ph)
        a = a_s.index(slot).slice(64 * PART, 64, 0)
        t0 = warpgroup_mma(a, b_s.index(2 * slot).permute((1, 0)), t0, is_async=True)
        t1 = warpgroup_mma(a, b_s.index(2 * slot + 1).permute((1, 0)), t1, is_async=True)
        t0, t1 = warpgroup_mma_wait(2, deps=[t0, t1])
        t0 = warpgroup_mma_init(t0)
        t1 = warpgroup_mma_init(t1)
        mbarrier.arrive(empty.index(_back(slot, 1, C)), count=1, pred=i > 0)
        slot, ph = next_slot(slot, ph, C)
    acc0, acc1 = warpgroup_mma_wait(0, deps=[t0, t1])
    mbarrier.arrive(empty.index(_back(slot, 1, C)), count=1)
    return acc0, acc1, slot, ph


@gluon.jit
def _pointers(xs, ws, e, base, col, route, PART: gl.constexpr, C: gl.constexpr):
    """to the first scale of each row of the part and of the tile's two runs of weight rows, [64] each"""
    G: gl.constexpr = C.iterations if C.gemm.grouped else 1
    L: gl.constexpr = gl.SliceLayout(1, C.MMA)
    if C.gemm.static:
        x = gl.zeros([64], gl.int32, L)
    elif not C.listed:
        x = route // C.gemm.top_k
    else:
        x = base + 64 * PART + gl.arange(0, 64, L)
    run0 = col
    run1 = col + C.gemm.segment // 128
    if not C.gemm.first:
        run0 = 2 * col
        run1 = gl.minimum(run0 + 1, C.rows // 128 - 1)
    run0 += e * (C.rows // 128)
    run1 += e * (C.rows // 128)
    if C.gemm.grouped:  # a pointer a row: else ptxas keeps the scale in a uniform register, and waits for it at once
        each = gl.zeros([64], gl.int32, L)
        p = (xs + x * G, ws + (run0 * G + each), ws + (run1 * G + each))
    else:
        p = (xs + x, ws + run0 * 128, ws + run1 * 128)
    return p


@gluon.jit
def _routes(lists, base, n, PART: gl.constexpr, C: gl.constexpr):
    """the part's routes [64]"""
    r = 64 * PART + gl.arange(0, 64, gl.SliceLayout(1, C.MMA))
    return gl.load(lists + base + r, mask=r < n, other=0)


@gluon.jit
def _first(xs, ws, e, base, n, col, route, PART: gl.constexpr, C: gl.constexpr):
    """the first scales of the part's rows and of the tile's runs, [64] each"""
    ok = 64 * PART + gl.arange(0, 64, gl.SliceLayout(1, C.MMA)) < n
    px, p0, p1 = _pointers(xs, ws, e, base, col, route, PART, C)
    x = gl.load(px, mask=ok, other=0.0)
    first = (x, x, x)
    if C.gemm.grouped:
        first = (x, gl.load(p0, mask=ok, other=0.0), gl.load(p1, mask=ok, other=0.0))
    return first


@gluon.jit
def _sums(xs, ws, a_s, b_s, full, empty, e, base, n, col, route, first, slot, ph, PART: gl.constexpr, C: gl.constexpr):
    """acc0, acc1 [64, 128] f32, all scales applied"""
    ok = 64 * PART + gl.arange(0, 64, gl.SliceLayout(1, C.MMA)) < n
    p = _pointers(xs, ws, e, base, col, route, PART, C)
    if C.gemm.grouped:
        acc0, acc1, slot, ph = _multiply(p, first, ok, a_s, b_s, full, empty, slot, ph, PART, C)
    else:
        acc0, acc1, slot, ph = _sum(a_s, b_s, full, empty, slot, ph, PART, C)
        x = gl.expand_dims(first[0], 1)
        acc0 = acc0 * x * row_of(p[1], C)
        acc1 = acc1 * x * row_of(p[2], C)
    return acc0, acc1, slot, ph


@gluon.jit
def _consumer(
    xs, ws, bias, lists, tw, out, out_scale, tile, a_s, b_s, full, empty, PART: gl.constexpr, C: gl.constexpr
):
    """64 tokens of each block, from 64 * PART on.  The routes and first scales of the next tile are fetched while this
    one is stored."""
    slot = gl.to_tensor(0)
    ph = gl.to_tensor(0)
    e, base, n, col = told(tile, full, slot, ph)
    route = _routes(lists, base, n, PART, C)
    first = _first(xs, ws, e, base, n, col, route, PART, C)
    r = 64 * PART + gl.arange(0, 64, gl.SliceLayout(1, C.MMA))
    while n > 0:
        w = gl.load(tw + route, mask=r < n, other=0.0)
        if n > 64 * PART:
            acc0, acc1, slot, ph = _sums(
                xs, ws, a_s, b_s, full, empty, e, base, n, col, route, first, slot, ph, PART, C
            )
            e2, base2, n2, col2 = told(tile, full, slot, ph)
            route2 = _routes(lists, base2, n2, PART, C)
            first2 = _first(xs, ws, e2, base2, n2, col2, route2, PART, C)
            epilogue(acc0, acc1, bias, out, out_scale, e, base, n, col, route, w, PART, C)
        else:
            slot, ph = skip_tile(full, empty, slot, ph, C)
            e2, base2, n2, col2 = told(tile, full, slot, ph)
            route2 = _routes(lists, base2, n2, PART, C)
            first2 = _first(xs, ws, e2, base2, n2, col2, route2, PART, C)
        e = e2
        base = base2
        n = n2
        col = col2
        route = route2
        first = first2


@gluon.jit
def w8a8(x, xd, xs, wd, ws, bias, counts, lists, tw, out, out_scale, tickets, C: gl.constexpr):
    """First: out[i] = act(w13 x[token of lists[i]]); else out[lists[i]] bf16 = w2 x[i].

    x e4m3 [rows, K] (gathered for w13; by its descriptor xd for w2), weights by descriptor wd e4m3 (blocks of
    128 x 128 that follow each other as [E, rows / 128, K / 128, 128, 128], seen as rows of 128).
    Scales f32 by Gemm8:  grouped  xs [rows, K / 128], ws [E, rows / 128, K / 128]; out e4m3, out_scale like xs, written
                          static   xs [1], ws [E, rows]; out e4m3, out_scale [1], read
                          neither  xs [rows], ws [E, rows]; out bf16
    Routes grouped by expert: counts [E], lists [routes]; tw [routes] f32 the router's weights, bias [E, rows] f32.
    tickets [1] int32, zero at first: how many tiles were drawn beside the first one of each CTA."""
    if C.pdl:
        gdc_wait()
        gdc_launch_dependents()
    a_s = gl.allocate_shared_memory(gl.float8e4nv, [C.ST, 128, 128], C.SA)
    b_s = gl.allocate_shared_memory(gl.float8e4nv, [2 * C.ST, 128, 128], C.SB)
    tile = gl.allocate_shared_memory(gl.int32, [4 * C.ST, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [C.ST, 1], _BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [C.ST, 1], _BARRIER)
    ST: gl.constexpr = C.ST
    for i in gl.static_range(ST):
        mbarrier.init(full.index(i), count=1 if C.listed else 2)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (_consumer, (xs, ws, bias, lists, tw, out, out_scale, tile, a_s, b_s, full, empty, 0, C)),
            (_consumer, (xs, ws, bias, lists, tw, out, out_scale, tile, a_s, b_s, full, empty, 1, C)),
            (_producer, (x, xd, wd, counts, lists, tickets, tile, a_s, b_s, full, empty, C)),
        ],
        [4, 4],
        [C.consumer_registers, C.producer_registers],
    )
