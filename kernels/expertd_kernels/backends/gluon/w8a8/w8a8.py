# mypy: ignore-errors
# (Gluon device code: its types are checked by Triton's compiler, not by mypy.)
"""Kernel `w8a8`: e4m3 weights times e4m3 activations, persistent and warp-specialised.  `C` is a Tile8.

Tokens lie on the 64 side of wgmma, weight rows on its N side: an activation scale is then one number a thread and row,
a weight scale one number for a whole product.  A tile is 128 tokens x two times 128 weight rows, of gate and up for
w13.  128 columns at a time are summed by the tensor core (its own sums have few bits) and added in f32, scaled.

Each consumer warpgroup is a partition of its own with 64 tokens of the block, so that none waits for the other: while
one adds, the tensor cores work for the other.  Of a block of up to 64 tokens, where activations are scaled by 128
columns, each has all tokens and half of the columns (C.split).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from expertd_kernels.backends.gluon.shared.tickets import EARLY, find_tile, next_slot, skip_tile, tell, told
from expertd_kernels.backends.gluon.shared.triton_versions import barrier, copy_elements, copy_tile
from expertd_kernels.backends.gluon.w8a8.epilogue import epilogue, store_half_h, store_half_y
from expertd_kernels.backends.gluon.w8a8.products import (
    back,
    first_scales,
    multiply,
    pointers_to,
    routes_of,
    rows_of,
    sums,
)
from expertd_kernels.backends.gluon.weight_only.pieces import _BARRIER, block_list


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
        mbarrier.arrive(full.index(back(slot, D, C)), count=1, pred=issued >= D)
        issued += 1
    else:
        copy_tile(xd, [base, i * 128], full.index(slot), a_s.index(slot))
    slot, ph = next_slot(slot, ph, C)
    return slot, ph, issued


@gluon.jit
def _producer(x, xd, wd, counts, lists, tickets, tile, a_s, b_s, full, empty, C: gl.constexpr):
    ie, cnt, nb, cum = block_list(counts, C, 4)
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
            mbarrier.arrive(full.index(back(slot, D - k, C)), count=1, pred=issued >= D - k)
    mbarrier.wait(empty.index(slot), ph)
    tell(tile, slot, 0, 0, 0, 0, 4)
    mbarrier.arrive(full.index(slot), count=1 if C.listed else 2)


@gluon.jit
def _next(xs, ws, lists, tile, full, slot, ph, PART: gl.constexpr, C: gl.constexpr):
    """the tile that begins in this slot: as told, the part's routes, their first scales"""
    e, base, n, col = told(tile, full, slot, ph)
    route = routes_of(lists, base, n, PART, C)
    return e, base, n, col, route, first_scales(xs, ws, e, base, n, col, route, PART, C)


@gluon.jit
def _consumer(
    xs, ws, bias, lists, tw, out, out_scale, tile, a_s, b_s, full, empty, largest, met, PART: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    """64 tokens of each block, from 64 * PART on, or, where C.split, half of the columns of a block that has no more.
    The routes and first scales of the next tile are fetched while this one is stored."""
    slot = gl.to_tensor(0)
    ph = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    e, base, n, col, route, first = _next(xs, ws, lists, tile, full, slot, ph, PART, C)
    while n > 0:
        w = route
        if C.gemm.weight:  # w13 alone: w2 leaves them to the sum
            w = gl.load(tw + route, mask=rows_of(n, PART, C) < n, other=0.0)
        if n > 64 * PART and (not C.split or n > 64):
            acc0, acc1, slot, ph = sums(xs, ws, a_s, b_s, full, empty, e, base, n, col, route, first, slot, ph, PART, C)
            e2, base2, n2, col2, route2, first2 = _next(xs, ws, lists, tile, full, slot, ph, PART, C)
            epilogue(acc0, acc1, bias, out, out_scale, e, base, n, col, route, w, PART, C)
        else:
            if C.split:
                pointers = pointers_to(xs, ws, e, base, n, col, route, PART, C)
                half0, half1, slot, ph = multiply(
                    pointers, first, rows_of(n, PART, C) < n, a_s, b_s, full, empty, slot, ph, PART, True, C
                )
            else:
                slot, ph = skip_tile(full, empty, slot, ph, C)
            e2, base2, n2, col2, route2, first2 = _next(xs, ws, lists, tile, full, slot, ph, PART, C)
            if C.split and C.gemm.first:
                store_half_h(half0, half1, bias, w, out, out_scale, e, base, n, col, largest, met, turn, PART, C)
                turn = turn ^ 1
            elif C.split:
                store_half_y(half0, bias, out, e, n, col, route, PART, C)
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
    largest = tile
    met = full
    if C.split and C.gemm.first:  # not for w2: the memory of a barrier without users would be free for other data
        largest = gl.allocate_shared_memory(gl.float32, [4, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        met = gl.allocate_shared_memory(gl.int64, [2, 1], _BARRIER)
        for i in gl.static_range(2):
            mbarrier.init(met.index(i), count=1)
    ST: gl.constexpr = C.ST
    for i in gl.static_range(ST):
        mbarrier.init(full.index(i), count=1 if C.listed else 2)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (_consumer, (xs, ws, bias, lists, tw, out, out_scale, tile, a_s, b_s, full, empty, largest, met, 0, C)),
            (_consumer, (xs, ws, bias, lists, tw, out, out_scale, tile, a_s, b_s, full, empty, largest, met, 1, C)),
            (_producer, (x, xd, wd, counts, lists, tickets, tile, a_s, b_s, full, empty, C)),
        ],
        [4, 4],
        [C.consumer_registers, C.producer_registers],
    )
