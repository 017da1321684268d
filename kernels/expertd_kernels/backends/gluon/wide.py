# mypy: ignore-errors
# (Gluon device code: its types are checked by Triton's compiler, not by mypy.)
"""Kernel `wide`: bf16 weights and many tokens, persistent and warp-specialised.  `C` is a Tile: BM = 128 or 192, T = 4,
S = 1.

Nothing has to be unpacked, so both operands come from shared memory and tokens lie on the 64 side of wgmma: a tile is
BM tokens x 256 weight rows.  Each consumer warpgroup is a partition of its own with 64 tokens of the block: none waits
for the others, and a block costs what its tokens need.

Tiles are drawn by tickets: a CTA asks for its next one when it is ready for it, so blocks that share a column tile
begin together wherever the CTAs stand, and its weights come from memory once.  (In a fixed order the CTAs drift apart
by more than the L2 holds: a quarter slower with 256 tokens an expert.)

Inputs of w13 are gathered by the producer, or stand at the places of their routes already (C.placed), as h does, and
come as boxes by the copy engine; a warp is then enough for the producer.
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

from expertd_kernels.backends.gluon.pieces import (
    _BARRIER,
    barrier,
    block_list,
    copy_inputs,
    copy_tile,
    input_rows,
    routes,
)
from expertd_kernels.backends.gluon.tiles_of_tokens import find_even_tile, next_slot, skip_tile
from expertd_kernels.backends.gluon.wide_epilogue import epilogue

MMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
SIDE_BY_SIDE = gl.constexpr(16)
"""Blocks of an expert that take a column tile together, before its next one."""


@gluon.jit
def _before(slot, C: gl.constexpr):
    """the slot of the stage before"""
    return gl.where(slot == 0, C.ST - 1, slot - 1)


@gluon.jit
def _both(col, C: gl.constexpr):
    """whether the column tile has more than its first two row tiles"""
    return col * 4 + 2 < C.gemm.rows


@gluon.jit
def _expect(full, n, both, C: gl.constexpr):
    """the bytes of a stage: of weights, and of n inputs that come as boxes"""
    PARTS: gl.constexpr = C.parts
    if C.gathers:
        mbarrier.expect(full, 32768, pred=both)
        mbarrier.expect(full, 16384, pred=both == 0)
    else:
        for k in gl.static_range(PARTS):
            here = n > 64 * k
            if k + 1 < PARTS:
                here = here & (n <= 64 * (k + 1))
            mbarrier.expect(full, 32768 + (k + 1) * 8192, pred=here & both)
            mbarrier.expect(full, 16384 + (k + 1) * 8192, pred=here & (both == 0))


@gluon.jit
def _producer(x, xd, wd, counts, lists, tickets, ts, xs, wb, full, empty, C: gl.constexpr):
    PARTS: gl.constexpr = C.parts
    W: gl.constexpr = 4 if C.gathers else 1
    LT: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    words = wb._reinterpret(gl.int32, [2 * C.ST, 2, 64, 32], C.SW)
    ie, cnt, nb, cum, blocks = block_list(counts, C, W)
    tiles = blocks * C.column_tiles
    slot = gl.to_tensor(0)
    ph = gl.to_tensor(1)
    issued = gl.to_tensor(0)
    t = gl.program_id(0)
    while t < tiles:
        e, base, n, col = find_even_tile(ie, cnt, nb, cum, t, SIDE_BY_SIDE, C)
        row = e * C.gemm.rows + col * 4
        both = _both(col, C)
        if C.gathers:
            f0 = input_rows(routes(lists, base, 0, n, 64, C, gl.SliceLayout(1, C.LX)), C)
            f1 = input_rows(routes(lists, base, 64, n, 64, C, gl.SliceLayout(1, C.LX)), C)
        for i in range(C.iterations):
            mbarrier.wait(empty.index(slot), ph)
            if i == 0:
                ts.index(slot).store(gl.full([1], t, gl.int32, LT))
            _expect(full.index(slot), n, both, C)
            copy_tile(wd, [row, i * 64, 0], full.index(slot), words.index(2 * slot))
            copy_tile(wd, [row + 2, i * 64, 0], full.index(slot), words.index(2 * slot + 1), pred=both)
            if C.gathers:  # these rows are declared to be there one stage after they were asked for
                copy_inputs(x, f0, xs.index(2 * slot), i, True, C)
                if n > 64:
                    copy_inputs(x, f1, xs.index(2 * slot + 1), i, True, C)
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
        t = gl.num_programs(0) + gl.atomic_add(tickets, 1, sem="relaxed")
    if C.gathers:
        async_copy.wait_group(0)
        fence_async_shared()
        mbarrier.arrive(full.index(_before(slot, C)), count=1, pred=issued >= 1)
    mbarrier.wait(empty.index(slot), ph)
    ts.index(slot).store(gl.full([1], tiles, gl.int32, LT))
    mbarrier.arrive(full.index(slot), count=2 if C.gathers else 1)


@gluon.jit
def _tile(ts, full, slot, ph):
    """the number of the tile whose first stage is in this slot"""
    mbarrier.wait(full.index(slot), ph)
    return gl.max(ts.index(slot).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


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
def _sum_half(xs, wb, full, empty, slot, ph, PART: gl.constexpr, C: gl.constexpr):
    """_sum of a tile that has its first 128 rows only"""
    acc = warpgroup_mma_init(gl.zeros([64, 128], gl.float32, MMA))
    for i in range(C.iterations):
        mbarrier.wait(full.index(slot), ph)
        a = xs.index(C.parts * slot + PART)
        acc = warpgroup_mma(a, wb.index(slot).slice(0, 128, 0).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        acc = warpgroup_mma_init(acc)
        mbarrier.arrive(empty.index(_before(slot, C)), count=1, pred=i > 0)
        slot, ph = next_slot(slot, ph, C)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(_before(slot, C)), count=1)
    return acc, slot, ph


@gluon.jit
def _consumer(bias, counts, lists, tw, out, ts, xs, wb, full, empty, PART: gl.constexpr, C: gl.constexpr):
    """64 tokens of each block, from 64 * PART on"""
    ie, cnt, nb, cum, blocks = block_list(counts, C, 4)
    tiles = blocks * C.column_tiles
    HALF: gl.constexpr = C.gemm.rows % 4 == 1 or C.gemm.rows % 4 == 2
    i = 64 * PART + gl.arange(0, 64, gl.SliceLayout(1, MMA))
    slot = gl.to_tensor(0)
    ph = gl.to_tensor(0)
    t = _tile(ts, full, slot, ph)
    while t < tiles:
        e, base, n, col = find_even_tile(ie, cnt, nb, cum, t, SIDE_BY_SIDE, C)
        if n > 64 * PART:
            place = base + i
            ok = i < n
            route = gl.load(lists + place, mask=ok, other=0)
            w = gl.load(tw + (place if C.placed else route), mask=ok, other=0.0)
            row = place if C.gemm.first and C.listed else route
            if HALF and not _both(col, C):
                acc, slot, ph = _sum_half(xs, wb, full, empty, slot, ph, PART, C)
                epilogue(acc, bias, w, out, e, row, ok, 2 * col, C)
            else:
                acc0, acc1, slot, ph = _sum(xs, wb, full, empty, slot, ph, PART, C)
                epilogue(acc0, bias, w, out, e, row, ok, 2 * col, C)
                epilogue(acc1, bias, w, out, e, row, ok, 2 * col + 1, C)
        else:
            slot, ph = skip_tile(full, empty, slot, ph, C)
        t = _tile(ts, full, slot, ph)


@gluon.jit
def wide(x, xd, wd, bias, counts, lists, tw, tickets, out, C: gl.constexpr):
    """out[route] = act(w13 x[token]) or w2 h[route]; routes grouped by expert: counts [E], lists [routes].

    C.listed: h has instead of `route` the place of the route in the lists, and w2 reads it by its descriptor xd.
    C.placed: w13's inputs stand like that, too, and so do the router weights in tw.
    tickets [1] int32, zero at first: how many tiles were drawn beside the first one of each CTA."""
    if C.pdl:
        gdc_wait()
        gdc_launch_dependents()
    xs = gl.allocate_shared_memory(gl.bfloat16, [C.parts * C.ST, 64, 64], C.SX)
    wb = gl.allocate_shared_memory(gl.bfloat16, [C.ST, 256, 64], C.SX)
    ts = gl.allocate_shared_memory(gl.int32, [C.ST, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
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
                (_consumer, (bias, counts, lists, tw, out, ts, xs, wb, full, empty, 0, C)),
                (_consumer, (bias, counts, lists, tw, out, ts, xs, wb, full, empty, 1, C)),
                (_producer, (x, xd, wd, counts, lists, tickets, ts, xs, wb, full, empty, C)),
            ],
            [4, P],
            [232, 40],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (bias, counts, lists, tw, out, ts, xs, wb, full, empty, 0, C)),
                (_consumer, (bias, counts, lists, tw, out, ts, xs, wb, full, empty, 1, C)),
                (_consumer, (bias, counts, lists, tw, out, ts, xs, wb, full, empty, 2, C)),
                (_producer, (x, xd, wd, counts, lists, tickets, ts, xs, wb, full, empty, C)),
            ],
            [4, 4, P],
            [160, 160, 24],
        )
