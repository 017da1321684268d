# mypy: ignore-errors
# (Gluon device code: its types are checked by Triton's compiler, not by mypy.)
"""Kernel `wide`: bf16 weights and many tokens, persistent and warp-specialised.  `C` is a Tile: BM = 128 or 192, T = 4,
S = 1.

Nothing has to be unpacked, so both operands come from shared memory and tokens lie on the 64 side of wgmma: a tile is
BM tokens x 256 weight rows.  Each consumer warpgroup is a partition of its own with 64 tokens of the block: none waits
for the others, and a block costs what its tokens need.

The producer gathers w13's inputs; where both GEMMs run like this (C.listed), h stands in the order of the route lists,
so that w2's are boxes that the copy engine fetches, and one warp is producer enough.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from expertd_kernels.backends.gluon.shared.tickets import EARLY, find_even_tile, next_slot, skip_tile, tell, told
from expertd_kernels.backends.gluon.shared.triton_versions import barrier, copy_tile, reinterpret, warpgroup_mma_wait
from expertd_kernels.backends.gluon.weight_only.pieces import _BARRIER, block_list, copy_inputs, input_rows, routes
from expertd_kernels.backends.gluon.weight_only.wide_epilogue import epilogue

MMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
SIDE_BY_SIDE = gl.constexpr(16)
"""Blocks of an expert that take a column tile together, before its next one."""


@gluon.jit
def _before(slot, C: gl.constexpr):
    """the slot of the stage before"""
    return gl.where(slot == 0, C.ST - 1, slot - 1)


@gluon.jit
def _fill(x, xd, wd, f0, f1, f2, row, base, n, i, xs, wb, full, empty, slot, ph, issued, C: gl.constexpr):
    """stage i of a tile, in the next slot"""
    PARTS: gl.constexpr = C.parts
    mbarrier.wait(empty.index(slot), ph)
    if C.gathers:
        mbarrier.expect(full.index(slot), 32768)
    else:
        for k in gl.static_range(PARTS):
            here = n > 64 * k
            if k + 1 < PARTS:
                here = here & (n <= 64 * (k + 1))
            mbarrier.expect(full.index(slot), 32768 + (k + 1) * 8192, pred=here)
    copy_tile(wd, [row, i * 64, 0], full.index(slot), reinterpret(wb, gl.int32, [C.ST, 4, 64, 32], C.SW).index(slot))
    if C.gathers:  # these rows are declared to be there one stage after they were asked for
        copy_inputs(x, f0, xs.index(PARTS * slot), i, True, C)
        if n > 64:
            copy_inputs(x, f1, xs.index(PARTS * slot + 1), i, True, C)
        if PARTS > 2 and n > 128:
            copy_inputs(x, f2, xs.index(PARTS * slot + 2), i, True, C)
        async_copy.commit_group()
        async_copy.wait_group(1)
        fence_async_shared()
        mbarrier.arrive(full.index(_before(slot, C)), count=1, pred=issued >= 1)
        issued += 1
    else:
        for k in gl.static_range(PARTS):
            at = [base + 64 * k, i * 64]
            copy_tile(xd, at, full.index(slot), xs.index(PARTS * slot + k), pred=n > 64 * k)
    slot, ph = next_slot(slot, ph, C)
    return slot, ph, issued


@gluon.jit
def _rows(lists, base, n0: gl.constexpr, n, C: gl.constexpr):
    """input rows of 64 routes of a block"""
    return input_rows(routes(lists, base, n0, n, 64, C, gl.SliceLayout(1, C.LX)), C)


@gluon.jit
def _producer(x, xd, wd, counts, lists, tickets, tile, xs, wb, full, empty, C: gl.constexpr):
    W: gl.constexpr = 4 if C.gathers else 1
    ALMOST: gl.constexpr = C.iterations - EARLY if C.iterations > EARLY else 0
    ie, cnt, nb, cum = block_list(counts, C, W)
    slot = gl.to_tensor(0)
    ph = gl.to_tensor(1)
    issued = gl.to_tensor(0)
    e, base, n, col = find_even_tile(ie, cnt, nb, cum, gl.program_id(0), SIDE_BY_SIDE, C)
    while n > 0:
        row = e * C.gemm.rows + col * 4
        f0 = 0
        f1 = 0
        f2 = 0
        if C.gathers:
            f0 = _rows(lists, base, 0, n, C)
            f1 = _rows(lists, base, 64, n, C)
            if C.parts > 2:
                f2 = _rows(lists, base, 128, n, C)
        mbarrier.wait(empty.index(slot), ph)
        tell(tile, slot, e, base, n, col, W)
        for i in range(ALMOST):
            slot, ph, issued = _fill(x, xd, wd, f0, f1, f2, row, base, n, i, xs, wb, full, empty, slot, ph, issued, C)
        t = gl.num_programs(0) + gl.atomic_add(tickets, 1, sem="relaxed")
        e, next_base, next_n, col = find_even_tile(ie, cnt, nb, cum, t, SIDE_BY_SIDE, C)
        for i in range(ALMOST, C.iterations):
            slot, ph, issued = _fill(x, xd, wd, f0, f1, f2, row, base, n, i, xs, wb, full, empty, slot, ph, issued, C)
        base = next_base
        n = next_n
    if C.gathers:
        async_copy.wait_group(0)
        fence_async_shared()
        mbarrier.arrive(full.index(_before(slot, C)), count=1, pred=issued >= 1)
    mbarrier.wait(empty.index(slot), ph)
    tell(tile, slot, 0, 0, 0, 0, W)
    mbarrier.arrive(full.index(slot), count=2 if C.gathers else 1)


@gluon.jit
def _sum(xs, wb, full, empty, slot, ph, PART: gl.constexpr, C: gl.constexpr):
    """The part's tokens times the tile's first and last 128 rows, [64, 128] f32 each; the products of two stages in
    flight.  (One wgmma of 256 rows would need more registers than three warpgroups may have.)"""
    acc0 = warpgroup_mma_init(gl.zeros([64, 128], gl.float32, MMA))
    acc1 = warpgroup_mma_init(gl.zeros([64, 128], gl.float32, MMA))
    for i in range(C.iterations):
        mbarrier.wait(full.index(slot), ph)
        a = xs.index(C.parts * slot + PART)
        acc0 = warpgroup_mma(a, wb.index(slot).slice(0, 128, 0).permute((1, 0)), acc0, is_async=True)
        acc1 = warpgroup_mma(a, wb.index(slot).slice(128, 128, 0).permute((1, 0)), acc1, is_async=True)
        acc0, acc1 = warpgroup_mma_wait(2, deps=[acc0, acc1])
        acc0 = warpgroup_mma_init(acc0)
        acc1 = warpgroup_mma_init(acc1)
        mbarrier.arrive(empty.index(_before(slot, C)), count=1, pred=i > 0)
        slot, ph = next_slot(slot, ph, C)
    acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
    mbarrier.arrive(empty.index(_before(slot, C)), count=1)
    return acc0, acc1, slot, ph


@gluon.jit
def _consumer(bias, lists, tw, out, tile, xs, wb, full, empty, PART: gl.constexpr, C: gl.constexpr):
    """64 tokens of each block, from 64 * PART on.  The routes of the next tile are fetched while this one is stored,
    their weights while it is multiplied."""
    r = 64 * PART + gl.arange(0, 64, gl.SliceLayout(1, MMA))
    slot = gl.to_tensor(0)
    ph = gl.to_tensor(0)
    e, base, n, col = told(tile, full, slot, ph)
    route = gl.load(lists + base + r, mask=r < n, other=0)
    while n > 0:
        ok = r < n
        w = gl.load(tw + route, mask=ok, other=0.0)
        row = base + r if C.gemm.first and C.listed else route
        if n > 64 * PART:
            acc0, acc1, slot, ph = _sum(xs, wb, full, empty, slot, ph, PART, C)
            e2, base2, n2, col2 = told(tile, full, slot, ph)
            route2 = gl.load(lists + base2 + r, mask=r < n2, other=0)
            epilogue(acc0, bias, w, out, e, row, ok, 2 * col, C)
            epilogue(acc1, bias, w, out, e, row, ok, 2 * col + 1, C)
        else:
            slot, ph = skip_tile(full, empty, slot, ph, C)
            e2, base2, n2, col2 = told(tile, full, slot, ph)
            route2 = gl.load(lists + base2 + r, mask=r < n2, other=0)
        e = e2
        base = base2
        n = n2
        col = col2
        route = route2


@gluon.jit
def wide(x, xd, wd, bias, counts, lists, tw, tickets, out, C: gl.constexpr):
    """out[route] = act(w13 x[token]) or w2 h[route]; routes grouped by expert: counts [E], lists [routes].  C.listed: h
    has instead of `route` the place of the route in the lists, and w2 reads it by its descriptor xd.
    tickets [1] int32, zero at first: how many tiles were drawn beside the first one of each CTA."""
    if C.pdl:
        gdc_wait()
        gdc_launch_dependents()
    xs = gl.allocate_shared_memory(gl.bfloat16, [C.parts * C.ST, 64, 64], C.SX)
    wb = gl.allocate_shared_memory(gl.bfloat16, [C.ST, 256, 64], C.SX)
    tile = gl.allocate_shared_memory(gl.int32, [4 * C.ST, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [C.ST, 1], _BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [C.ST, 1], _BARRIER)
    ST: gl.constexpr = C.ST
    for i in gl.static_range(ST):
        mbarrier.init(full.index(i), count=2 if C.gathers else 1)
        mbarrier.init(empty.index(i), count=C.parts)
    fence_async_shared()
    barrier()
    P: gl.constexpr = 4 if C.gathers else 1
    if C.parts == 2:
        gl.warp_specialize(
            [
                (_consumer, (bias, lists, tw, out, tile, xs, wb, full, empty, 0, C)),
                (_consumer, (bias, lists, tw, out, tile, xs, wb, full, empty, 1, C)),
                (_producer, (x, xd, wd, counts, lists, tickets, tile, xs, wb, full, empty, C)),
            ],
            [4, P],
            [232, 40],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (bias, lists, tw, out, tile, xs, wb, full, empty, 0, C)),
                (_consumer, (bias, lists, tw, out, tile, xs, wb, full, empty, 1, C)),
                (_consumer, (bias, lists, tw, out, tile, xs, wb, full, empty, 2, C)),
                (_producer, (x, xd, wd, counts, lists, tickets, tile, xs, wb, full, empty, C)),
            ],
            [4, 4, P],
            [160, 160, 32],
        )
