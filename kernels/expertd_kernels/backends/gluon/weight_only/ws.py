# mypy: ignore-errors
# (Gluon device code: its types are checked by Triton's compiler, not by mypy.)
"""Kernel `ws`: persistent and warp-specialised, for many tokens an expert.

Blocks have BM tokens; the last one of an expert may have up to X more, in an accumulator of its own, instead of a
nearly empty block.  Tiles are drawn by tickets (tickets.py), those of long blocks of all experts before those
of the short ones.

Four producer warps gather inputs and fetch weights into a ring of stages.  W consumer warps unpack and multiply, on two
halves of their rows with an accumulator each: while the tensor cores run on one half, the other is unpacked.
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

from expertd_kernels.backends.gluon.shared.tickets import EARLY, next_slot, tell, told
from expertd_kernels.backends.gluon.shared.triton_versions import barrier, warpgroup_mma_wait
from expertd_kernels.backends.gluon.weight_only.dequant import load, unpack
from expertd_kernels.backends.gluon.weight_only.pieces import (
    _BARRIER,
    await_block,
    copy_inputs,
    copy_weights,
    count_tile,
    epilogue,
    find_of_both,
    find_ordered,
    input_rows,
    load_bias,
    order_of,
    route_weights,
    routes,
    stages,
)


@gluon.jit
def _fill(x, wd, ws, row, n, f, f2, i, wb, xs, xt, sb, full, empty, slot, ph, C: gl.constexpr):
    """stage i of a tile, in the next slot"""
    mbarrier.wait(empty.index(slot), ph)
    copy_weights(wd, ws, row, wb, sb, full, i, slot, True, C)
    copy_inputs(x, f, xs.index(slot), i, True, C)
    if C.X > 0 and n > C.BM:
        copy_inputs(x, f2, xt.index(slot), i, True, C)
    async_copy.mbarrier_arrive(full.index(slot), increment_count=False)  # each thread, once its copies landed
    return next_slot(slot, ph, C)


@gluon.jit
def _producer(x, wd, ws, counts, lists, tickets, tiles, wb, xs, xt, sb, full, empty, C: gl.constexpr):
    ALMOST: gl.constexpr = C.iterations - EARLY if C.iterations > EARLY else 0
    order = order_of(counts, C, 4)
    slot = gl.to_tensor(0)
    ph = gl.to_tensor(1)
    e, base, n, col = find_ordered(order, gl.program_id(0), C)
    while n > 0:
        f = input_rows(routes(lists, base, 0, n, C.BM, C, gl.SliceLayout(1, C.LX)), C)
        NX: gl.constexpr = C.X if C.X > 0 else C.BM
        f2 = input_rows(routes(lists, base, C.BM, n, NX, C, gl.SliceLayout(1, C.LX)), C)
        row = e * C.gemm.rows + col * C.T
        mbarrier.wait(empty.index(slot), ph)
        tell(tiles, slot, e, base, n, col, 4)
        for i in range(ALMOST):
            slot, ph = _fill(x, wd, ws, row, n, f, f2, i, wb, xs, xt, sb, full, empty, slot, ph, C)
        t = gl.num_programs(0) + gl.atomic_add(tickets, 1, sem="relaxed")
        e, base, next_n, col = find_ordered(order, t, C)
        for i in range(ALMOST, C.iterations):
            slot, ph = _fill(x, wd, ws, row, n, f, f2, i, wb, xs, xt, sb, full, empty, slot, ph, C)
        n = next_n
    async_copy.wait_group(0)
    mbarrier.wait(empty.index(slot), ph)
    tell(tiles, slot, 0, 0, 0, 0, 4)
    mbarrier.arrive(full.index(slot), count=129)


@gluon.jit
def _load(wb, sb, slot, t: gl.constexpr, j: gl.constexpr, C: gl.constexpr):
    """row tiles t .. t + TT of a stage, columns 64 * SK * j .."""
    return load(wb.index(slot).slice(t, C.TT, 0), sb.index(slot).slice(t, C.TT, 0), j, C)


@gluon.jit
def _multiply(
    acc, more, q, s, xs, xt, slot, j: gl.constexpr, N: gl.constexpr, X: gl.constexpr, C: gl.constexpr, AL: gl.constexpr
):
    """acc += weights x N tokens; with X > 0 also more += weights x X further tokens"""
    a = unpack(q, s, C, AL)
    x = xs.index(slot).slice(0, N, 0).slice(j * 64 * C.SK, 64 * C.SK, 1).permute((1, 0))
    acc = warpgroup_mma(a, x, acc, is_async=True)
    if X > 0:  # the same A registers: the layouts of the two operands agree
        MX: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C.W, 1], [16, X, 16])
        x2 = xt.index(slot).slice(j * 64 * C.SK, 64 * C.SK, 1).permute((1, 0))
        more = warpgroup_mma(gl.convert_layout(a, gl.DotOperandLayout(0, MX, 2)), x2, more, is_async=True)
    return acc, more, a


@gluon.jit
def _free(empty, slot, ok, C: gl.constexpr):
    """the stage before `slot` has been read"""
    mbarrier.arrive(empty.index(gl.where(slot == 0, C.ST - 1, slot - 1)), count=1, pred=ok)


@gluon.jit
def _two_halves(wb, xs, xt, sb, full, empty, slot, ph, N: gl.constexpr, X: gl.constexpr, C: gl.constexpr):
    """[TT * 64, N] (and [TT * 64, X]) twice: halves in turns.  The words of a half are fetched from shared memory
    before the wait for the tensor cores, so that their latency is hidden, too."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C.W, 1], [16, N, 16])
    NX: gl.constexpr = X if X > 0 else N
    MX: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C.W, 1], [16, NX, 16])
    AL: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    PARTS: gl.constexpr = C.S // C.SK
    OTHERS: gl.constexpr = 2 if X > 0 else 1  # MMAs of the other half
    t0 = warpgroup_mma_init(gl.zeros([C.TT * 64, N], gl.float32, MMA))
    t1 = warpgroup_mma_init(gl.zeros([C.TT * 64, N], gl.float32, MMA))
    u0 = warpgroup_mma_init(gl.zeros([C.TT * 64, NX], gl.float32, MX))
    u1 = warpgroup_mma_init(gl.zeros([C.TT * 64, NX], gl.float32, MX))
    a1 = gl.zeros([C.TT * 64, 64 * C.SK], gl.bfloat16, AL)
    mbarrier.wait(full.index(slot), ph)
    fence_async_shared()
    q0, s0 = _load(wb, sb, slot, 0, 0, C)
    for i in range(C.iterations):
        last = i + 1 == C.iterations
        ns = gl.where(slot == C.ST - 1, 0, slot + 1)
        nph = gl.where(ns == 0, ph ^ 1, ph)
        for j in gl.static_range(PARTS):
            t0, u0, a0 = _multiply(t0, u0, q0, s0, xs, xt, slot, j, N, X, C, AL)
            q1, s1 = _load(wb, sb, slot, C.TT, j, C)
            if X > 0:
                t1, u1, a1 = warpgroup_mma_wait(OTHERS, deps=[t1, u1, a1])
                u1 = warpgroup_mma_init(u1)
            else:
                t1, a1 = warpgroup_mma_wait(OTHERS, deps=[t1, a1])
            if j == 0:  # every MMA of the stage before is done
                _free(empty, slot, i > 0, C)
            t1, u1, a1 = _multiply(warpgroup_mma_init(t1), u1, q1, s1, xs, xt, slot, j, N, X, C, AL)
            if j == PARTS - 1:  # the next stage; after the last one, this stage again, unused
                ls = gl.where(last, slot, ns)
                mbarrier.wait(full.index(ls), gl.where(last, ph, nph))
                fence_async_shared()
                q0, s0 = _load(wb, sb, ls, 0, 0, C)
            else:
                q0, s0 = _load(wb, sb, slot, 0, j + 1, C)
            if X > 0:
                t0, u0, a0 = warpgroup_mma_wait(OTHERS, deps=[t0, u0, a0])
                u0 = warpgroup_mma_init(u0)
            else:
                t0, a0 = warpgroup_mma_wait(OTHERS, deps=[t0, a0])
            t0 = warpgroup_mma_init(t0)
        slot = ns
        ph = nph
    if X > 0:
        c0, c1, u0, u1, a1 = warpgroup_mma_wait(0, deps=[t0, t1, u0, u1, a1])
    else:
        c0, c1, a1 = warpgroup_mma_wait(0, deps=[t0, t1, a1])
    _free(empty, slot, True, C)
    return c0, c1, u0, u1, slot, ph


@gluon.jit
def _four_quarters(wb, xs, sb, full, empty, slot, ph, N: gl.constexpr, C: gl.constexpr):
    """[64, N] four times, for one warpgroup that has four row tiles: half of the registers of two halves hold weights
    that are multiplied or unpacked.  The words of a tile are fetched before the wait for the tensor cores."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C.W, 1], [16, N, 16])
    AL: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    PARTS: gl.constexpr = C.S // C.SK
    t0 = warpgroup_mma_init(gl.zeros([64, N], gl.float32, MMA))
    t1 = warpgroup_mma_init(gl.zeros([64, N], gl.float32, MMA))
    t2 = warpgroup_mma_init(gl.zeros([64, N], gl.float32, MMA))
    t3 = warpgroup_mma_init(gl.zeros([64, N], gl.float32, MMA))
    a1 = gl.zeros([64, 64 * C.SK], gl.bfloat16, AL)
    mbarrier.wait(full.index(slot), ph)
    fence_async_shared()
    q, s = _load(wb, sb, slot, 0, 0, C)
    for i in range(C.iterations):
        last = i + 1 == C.iterations
        ns = gl.where(slot == C.ST - 1, 0, slot + 1)
        nph = gl.where(ns == 0, ph ^ 1, ph)
        for j in gl.static_range(PARTS):
            t0, _u, a0 = _multiply(t0, t0, q, s, xs, xs, slot, j, N, 0, C, AL)
            q, s = _load(wb, sb, slot, 1, j, C)
            t3, a1 = warpgroup_mma_wait(1, deps=[t3, a1])
            if j == 0:  # every MMA of the stage before is done
                _free(empty, slot, i > 0, C)
            t1, _u, a1 = _multiply(t1, t1, q, s, xs, xs, slot, j, N, 0, C, AL)
            q, s = _load(wb, sb, slot, 2, j, C)
            t0, a0 = warpgroup_mma_wait(1, deps=[t0, a0])
            t0 = warpgroup_mma_init(t0)
            t2, _u, a0 = _multiply(t2, t2, q, s, xs, xs, slot, j, N, 0, C, AL)
            q, s = _load(wb, sb, slot, 3, j, C)
            t1, a1 = warpgroup_mma_wait(1, deps=[t1, a1])
            t1 = warpgroup_mma_init(t1)
            t3, _u, a1 = _multiply(warpgroup_mma_init(t3), t3, q, s, xs, xs, slot, j, N, 0, C, AL)
            if j == PARTS - 1:  # the next stage; after the last one, this stage again, unused
                ls = gl.where(last, slot, ns)
                mbarrier.wait(full.index(ls), gl.where(last, ph, nph))
                fence_async_shared()
                q, s = _load(wb, sb, ls, 0, 0, C)
            else:
                q, s = _load(wb, sb, slot, 0, j + 1, C)
            t2, a0 = warpgroup_mma_wait(1, deps=[t2, a0])
            t2 = warpgroup_mma_init(t2)
        slot = ns
        ph = nph
    c0, c1, c2, c3, a1 = warpgroup_mma_wait(0, deps=[t0, t1, t2, t3, a1])
    _free(empty, slot, True, C)
    return c0, c1, c2, c3, slot, ph


@gluon.jit
def _results(acc, bias, lists, tw, out, unscale, row, base, n0: gl.constexpr, n, t, N: gl.constexpr, C: gl.constexpr):
    """columns n0 .. n0 + N of a block, row tiles t .. t + TT"""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C.W, 1], [16, N, 16])
    LN: gl.constexpr = gl.BlockedLayout([1], [32], [C.W], [0])
    r = routes(lists, base, n0, n, N, C, LN)
    w = route_weights(tw, r, unscale, C)
    epilogue(acc, r, w, load_bias(bias, row + t, C, MMA), out, unscale, t, C, N, MMA)


@gluon.jit
def _tile(
    bias,
    lists,
    tw,
    out,
    unscale,
    e,
    base,
    n,
    tile,
    wb,
    xs,
    xt,
    sb,
    full,
    empty,
    slot,
    ph,
    N: gl.constexpr,
    X: gl.constexpr,
    C: gl.constexpr,
):
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C.W, 1], [16, N, 16])
    LN: gl.constexpr = gl.BlockedLayout([1], [32], [C.W], [0])
    r = routes(lists, base, 0, n, N, C, LN)
    wt = route_weights(tw, r, unscale, C)
    row = e * C.gemm.rows
    t = tile * C.T
    if C.TT * 4 == C.T:
        c0, c1, c2, c3, slot, ph = _four_quarters(wb, xs, sb, full, empty, slot, ph, N, C)
        epilogue(c0, r, wt, load_bias(bias, row + t, C, MMA), out, unscale, t, C, N, MMA)
        epilogue(c1, r, wt, load_bias(bias, row + t + 1, C, MMA), out, unscale, t + 1, C, N, MMA)
        epilogue(c2, r, wt, load_bias(bias, row + t + 2, C, MMA), out, unscale, t + 2, C, N, MMA)
        epilogue(c3, r, wt, load_bias(bias, row + t + 3, C, MMA), out, unscale, t + 3, C, N, MMA)
        return slot, ph
    c0, c1, u0, u1, slot, ph = _two_halves(wb, xs, xt, sb, full, empty, slot, ph, N, X, C)
    epilogue(c0, r, wt, load_bias(bias, row + t, C, MMA), out, unscale, t, C, N, MMA)
    epilogue(c1, r, wt, load_bias(bias, row + t + C.TT, C, MMA), out, unscale, t + C.TT, C, N, MMA)
    if X > 0:
        _results(u0, bias, lists, tw, out, unscale, row, base, N, n, t, X, C)
        _results(u1, bias, lists, tw, out, unscale, row, base, N, n, t + C.TT, X, C)
    return slot, ph


@gluon.jit
def _consumer(bias, lists, tw, out, unscale, tiles, wb, xs, xt, sb, full, empty, C: gl.constexpr):
    slot = gl.to_tensor(0)
    ph = gl.to_tensor(0)
    B: gl.constexpr = C.BM
    X: gl.constexpr = C.X
    e, base, n, k = told(tiles, full, slot, ph, C.W)
    while n > 0:
        if C.V >= 2 and n <= B // 4:
            slot, ph = _tile(
                bias, lists, tw, out, unscale, e, base, n, k, wb, xs, xt, sb, full, empty, slot, ph, B // 4, 0, C
            )
        elif C.V >= 1 and n <= B // 2:
            slot, ph = _tile(
                bias, lists, tw, out, unscale, e, base, n, k, wb, xs, xt, sb, full, empty, slot, ph, B // 2, 0, C
            )
        elif X == 0 or n <= B:
            slot, ph = _tile(
                bias, lists, tw, out, unscale, e, base, n, k, wb, xs, xt, sb, full, empty, slot, ph, B, 0, C
            )
        else:
            slot, ph = _tile(
                bias, lists, tw, out, unscale, e, base, n, k, wb, xs, xt, sb, full, empty, slot, ph, B, X, C
            )
        e, base, n, k = told(tiles, full, slot, ph, C.W)


@gluon.jit(do_not_specialize=["routes_in_all"])
def ws(x, wd, sd, bias, counts, lists, tw, tickets, out, unscale, routes_in_all, C: gl.constexpr):
    """out[route] = act(w13 x[token]) or w2 h[route]; routes grouped by expert: counts [E]
    (C.tabled: the list of blocks), lists [routes].
    tickets [1] int32, zero at first: how many tiles were drawn beside the first one of each CTA."""
    if C.pdl:
        gdc_wait()
        gdc_launch_dependents()
    wb, xs, sb, full = stages(C, sd.dtype.element_ty, 129)  # 128 producer threads (cp.async) + 1 (TMA bytes)
    xt = gl.allocate_shared_memory(gl.bfloat16, [C.ST, C.X, 64 * C.S], C.SX) if C.X > 0 else xs
    tiles = gl.allocate_shared_memory(gl.int32, [4 * C.ST, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    empty = gl.allocate_shared_memory(gl.int64, [C.ST, 1], _BARRIER)
    ST: gl.constexpr = C.ST
    for i in gl.static_range(ST):
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    barrier()
    R: gl.constexpr = C.producer_registers
    gl.warp_specialize(
        [
            (_consumer, (bias, lists, tw, out, unscale, tiles, wb, xs, xt, sb, full, empty, C)),
            (_producer, (x, wd, sd, counts, lists, tickets, tiles, wb, xs, xt, sb, full, empty, C)),
        ],
        [4],
        [R],
    )


SECOND = gl.constexpr(1 << 30)
"""Added to what consumers are told of a tile: it is w2's.  Below: column tile + block * 4096."""


@gluon.jit
def _both_producer(
    x, wd, sd, h, wd2, sd2, counts, lists, tickets, tiles, wb, xs, xt, sb, full, empty,
    C: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """w13's tiles, then w2's, each of which begins when w13's tiles of its block have been counted.  The first tile is
    drawn, too: a tile that is waited for belongs to a CTA that runs."""
    ALMOST: gl.constexpr = C.iterations - EARLY if C.iterations > EARLY else 0
    ALMOST2: gl.constexpr = D.iterations - EARLY if D.iterations > EARLY else 0
    NX: gl.constexpr = C.X if C.X > 0 else C.BM
    t = gl.atomic_add(tickets, 1, sem="relaxed")
    order = order_of(counts, C, 4)
    slot = gl.to_tensor(0)
    ph = gl.to_tensor(1)
    e, base, n, col, block, second = find_of_both(order, t, C, D)
    while (n > 0) & (second == 0):
        f = input_rows(routes(lists, base, 0, n, C.BM, C, gl.SliceLayout(1, C.LX)), C)
        f2 = input_rows(routes(lists, base, C.BM, n, NX, C, gl.SliceLayout(1, C.LX)), C)
        row = e * C.gemm.rows + col * C.T
        mbarrier.wait(empty.index(slot), ph)
        tell(tiles, slot, e, base, n, col + block * 4096, 4)
        for i in range(ALMOST):
            slot, ph = _fill(x, wd, sd, row, n, f, f2, i, wb, xs, xt, sb, full, empty, slot, ph, C)
        t = gl.atomic_add(tickets, 1, sem="relaxed")
        e, base, next_n, col, block, second = find_of_both(order, t, C, D)
        for i in range(ALMOST, C.iterations):
            slot, ph = _fill(x, wd, sd, row, n, f, f2, i, wb, xs, xt, sb, full, empty, slot, ph, C)
        n = next_n
    while n > 0:
        f = input_rows(routes(lists, base, 0, n, D.BM, D, gl.SliceLayout(1, D.LX)), D)
        f2 = input_rows(routes(lists, base, D.BM, n, NX, D, gl.SliceLayout(1, D.LX)), D)
        row = e * D.gemm.rows + col * D.T
        await_block(tickets + 32 + block, C.column_tiles, 4)
        mbarrier.wait(empty.index(slot), ph)
        tell(tiles, slot, e, base, n, col + SECOND, 4)
        for i in range(ALMOST2):
            slot, ph = _fill(h, wd2, sd2, row, n, f, f2, i, wb, xs, xt, sb, full, empty, slot, ph, D)
        t = gl.atomic_add(tickets, 1, sem="relaxed")
        e, base, next_n, col, block, second = find_of_both(order, t, C, D)
        for i in range(ALMOST2, D.iterations):
            slot, ph = _fill(h, wd2, sd2, row, n, f, f2, i, wb, xs, xt, sb, full, empty, slot, ph, D)
        n = next_n
    async_copy.wait_group(0)
    mbarrier.wait(empty.index(slot), ph)
    tell(tiles, slot, 0, 0, 0, 0, 4)
    mbarrier.arrive(full.index(slot), count=129)


@gluon.jit
def _any_tile(
    bias, lists, tw, out, unscale, e, base, n, k, wb, xs, xt, sb, full, empty, slot, ph, C: gl.constexpr
):  # fmt: skip
    """the tile, as narrow as its routes allow"""
    B: gl.constexpr = C.BM
    if C.V >= 2 and n <= B // 4:
        slot, ph = _tile(
            bias, lists, tw, out, unscale, e, base, n, k, wb, xs, xt, sb, full, empty, slot, ph, B // 4, 0, C
        )
    elif C.V >= 1 and n <= B // 2:
        slot, ph = _tile(
            bias, lists, tw, out, unscale, e, base, n, k, wb, xs, xt, sb, full, empty, slot, ph, B // 2, 0, C
        )
    elif C.X == 0 or n <= B:
        slot, ph = _tile(bias, lists, tw, out, unscale, e, base, n, k, wb, xs, xt, sb, full, empty, slot, ph, B, 0, C)
    else:
        slot, ph = _tile(bias, lists, tw, out, unscale, e, base, n, k, wb, xs, xt, sb, full, empty, slot, ph, B, C.X, C)
    return slot, ph


@gluon.jit
def _both_consumer(
    bias, h, unscale, bias2, y, unscale2, lists, tw, tickets, tiles, wb, xs, xt, sb, full, empty,
    C: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    slot = gl.to_tensor(0)
    ph = gl.to_tensor(0)
    e, base, n, k = told(tiles, full, slot, ph, C.W)
    while (n > 0) & (k < SECOND):
        slot, ph = _any_tile(
            bias, lists, tw, h, unscale, e, base, n, k & 4095, wb, xs, xt, sb, full, empty, slot, ph, C
        )
        count_tile(tickets + 32 + (k >> 12))
        e, base, n, k = told(tiles, full, slot, ph, C.W)
    while n > 0:
        slot, ph = _any_tile(
            bias2, lists, tw, y, unscale2, e, base, n, k & 4095, wb, xs, xt, sb, full, empty, slot, ph, D
        )
        e, base, n, k = told(tiles, full, slot, ph, C.W)


@gluon.jit(do_not_specialize=["routes_in_all"])
def both(
    x, wd, sd, bias, h, wd2, sd2, bias2, counts, lists, tw, tickets, y, unscale, unscale2, routes_in_all,
    C: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """h[route] = act(w13 x[token]) and y[route] = w2 h[route] in one launch: as `ws`, the ring runs on from one into
    the other.  tickets [32 + blocks] int32, zero at first: tiles drawn, and from 32 on w13's finished tiles of each
    block.  C, D: w13's and w2's constants, alike but for the matrices."""
    if C.pdl:
        gdc_wait()
        gdc_launch_dependents()
    wb, xs, sb, full = stages(C, sd.dtype.element_ty, 129)  # 128 producer threads (cp.async) + 1 (TMA bytes)
    xt = gl.allocate_shared_memory(gl.bfloat16, [C.ST, C.X, 64 * C.S], C.SX) if C.X > 0 else xs
    tiles = gl.allocate_shared_memory(gl.int32, [4 * C.ST, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    empty = gl.allocate_shared_memory(gl.int64, [C.ST, 1], _BARRIER)
    ST: gl.constexpr = C.ST
    for i in gl.static_range(ST):
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    barrier()
    R: gl.constexpr = C.producer_registers
    gl.warp_specialize(
        [
            (
                _both_consumer,
                (bias, h, unscale, bias2, y, unscale2, lists, tw, tickets, tiles, wb, xs, xt, sb, full, empty, C, D),
            ),
            (
                _both_producer,
                (x, wd, sd, h, wd2, sd2, counts, lists, tickets, tiles, wb, xs, xt, sb, full, empty, C, D),
            ),
        ],
        [4],
        [R],
    )
