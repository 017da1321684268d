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

from expertd_kernels.backends.gluon.pieces import _BARRIER, _act, _add, barrier, copy_elements, copy_tile

LARGEST = gl.constexpr(448.0)
LEAST = gl.constexpr(1e-30)


@gluon.jit
def _experts(counts, C: gl.constexpr, W: gl.constexpr):
    """(expert, its routes, its blocks, running sum of blocks, blocks in all), in each warp"""
    L: gl.constexpr = gl.BlockedLayout([C.padded_experts // 32], [32], [W], [0])
    ie = gl.arange(0, C.padded_experts, L)
    cnt = gl.load(counts + ie, mask=ie < C.gemm.experts, other=0)
    nb = (cnt + 127) // 128
    return ie, cnt, nb, gl.associative_scan(nb, 0, _add), gl.sum(nb, 0)


@gluon.jit
def _find_tile(ie, cnt, nb, cum, t, C: gl.constexpr):
    """tile number -> (expert, first route of the block in the list, routes from there to the expert's end, column
    tile).  Up to GM blocks of an expert share a column tile before the next one: their weights are read once."""
    CT: gl.constexpr = C.column_tiles
    before = (cum * CT <= t).to(gl.int32)
    e = gl.sum(before, 0)
    mine = ie == e
    start = gl.sum(cnt * before, 0)
    n = gl.sum(gl.where(mine, cnt, 0), 0)
    blocks = gl.sum(gl.where(mine, nb, 0), 0)
    r = t - gl.sum(nb * before, 0) * CT
    first = r // (C.GM * CT) * C.GM
    r -= first * CT
    size = gl.minimum(blocks - first, C.GM)
    b = (first + r % size) * 128
    return e, start + b, n - b, r // size


@gluon.jit
def _next(slot, ph, C: gl.constexpr):
    slot = gl.where(slot == C.ST - 1, 0, slot + 1)
    return slot, gl.where(slot == 0, ph ^ 1, ph)


@gluon.jit
def _back(slot, k: gl.constexpr, C: gl.constexpr):
    """the slot k stages before"""
    return gl.where(slot < k, slot + (C.ST - k), slot - k)


@gluon.jit
def _producer(x, xd, wd, counts, lists, a_s, b_s, full, empty, C: gl.constexpr):
    ie, cnt, nb, cum, blocks = _experts(counts, C, 4)
    slot = gl.to_tensor(0)
    ph = gl.to_tensor(1)
    issued = gl.to_tensor(0)
    D: gl.constexpr = C.depth  # gathered inputs are declared to be there D stages after they were asked for
    L: gl.constexpr = gl.SliceLayout(1, C.LX)
    r = gl.arange(0, 128, L)
    for t in range(gl.program_id(0), blocks * C.column_tiles, gl.num_programs(0)):
        e, base, n, col = _find_tile(ie, cnt, nb, cum, t, C)
        if C.gemm.first:
            run0 = e * (C.rows // 128) + col
            run1 = run0 + C.gemm.segment // 128
        else:
            run0 = e * (C.rows // 128) + 2 * col
            run1 = run0 + 1
        if not C.listed:
            f = gl.load(lists + base + r, mask=r < n, other=0) // C.gemm.top_k
            p = gl.expand_dims(f.to(gl.int64) * C.gemm.K, 1)
            p = x + p + gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, C.LX)), 0)
            m = gl.expand_dims(r < n, 1)
        run0 *= C.iterations * 128
        run1 *= C.iterations * 128
        for i in range(C.iterations):
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
            slot, ph = _next(slot, ph, C)
    if not C.listed:
        async_copy.wait_group(0)
        fence_async_shared()
        for k in gl.static_range(D):
            mbarrier.arrive(full.index(_back(slot, D - k, C)), count=1, pred=issued >= D - k)


@gluon.jit
def _multiply(pointers, first, ok, a_s, b_s, full, empty, go, slot, ph, begins, PART: gl.constexpr, C: gl.constexpr):
    """acc0, acc1 [64, 128] f32: the part's rows times the tile's two runs of 128 weight rows.  pointers: as _pointers
    gives them; first: what they point to.  Scales are fetched one stage ahead."""
    xs, ws0, ws1 = pointers
    x, w0, w1 = first
    M: gl.constexpr = 64
    MMA: gl.constexpr = C.MMA
    acc0 = gl.zeros([M, 128], gl.float32, MMA)
    acc1 = gl.zeros([M, 128], gl.float32, MMA)
    none = gl.zeros([M, 128], gl.float32, MMA)
    for i in range(C.iterations):
        more = ok & (i + 1 < C.iterations)
        nx = gl.load(xs + (i + 1), mask=more, other=0.0)
        n0 = gl.load(ws0 + (i + 1), mask=more, other=0.0)
        n1 = gl.load(ws1 + (i + 1), mask=more, other=0.0)
        mbarrier.wait(full.index(slot), ph)
        a = a_s.index(slot).slice(64 * PART, 64, 0)
        p = warpgroup_mma(a, b_s.index(2 * slot).permute((1, 0)), none, use_acc=False)
        acc0 += p * gl.expand_dims(x * w0, 1)
        p = warpgroup_mma(a, b_s.index(2 * slot + 1).permute((1, 0)), none, use_acc=False)
        mbarrier.arrive(empty.index(slot), count=1)
        if PART == 0 and C.lag > 0:
            mbarrier.arrive(go.index(0), count=1, pred=begins & (i == C.lag - 1))
        acc1 += p * gl.expand_dims(x * w1, 1)
        x = nx
        w0 = n0
        w1 = n1
        slot, ph = _next(slot, ph, C)
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
        slot, ph = _next(slot, ph, C)
    acc0, acc1 = warpgroup_mma_wait(0, deps=[t0, t1])
    mbarrier.arrive(empty.index(_back(slot, 1, C)), count=1)
    return acc0, acc1, slot, ph


@gluon.jit
def _row(p, C: gl.constexpr):
    """128 numbers [1, 128], one for each column of an accumulator"""
    return gl.expand_dims(gl.load(p + gl.arange(0, 128, gl.SliceLayout(0, C.MMA))), 0)


@gluon.jit
def _store(v, out, row, ok, column, C: gl.constexpr):
    """v [64, 128] in the accumulator's layout -> out[row, column ..], where ok"""
    L: gl.constexpr = C.LH if v.dtype == gl.float8e4nv else C.LY
    v = gl.convert_layout(v, L)
    row = gl.expand_dims(gl.convert_layout(row, gl.SliceLayout(1, L)), 1)
    ok = gl.expand_dims(gl.convert_layout(ok, gl.SliceLayout(1, L)), 1)
    c = gl.expand_dims(column + gl.arange(0, 128, gl.SliceLayout(0, L)), 0)
    gl.store(out + row.to(gl.int64) * C.gemm.segment + c, v, mask=ok)


@gluon.jit
def _store_h(acc0, acc1, bias, w, out, out_scale, base, ok, col, C: gl.constexpr):
    """activation; rounded to e4m3 unless a scale needs the whole row; rows in the order of the list"""
    if C.gemm.weight:
        acc0 = acc0 * gl.expand_dims(w, 1)
        acc1 = acc1 * gl.expand_dims(w, 1)
    if C.gemm.bias:
        acc0 += _row(bias + col * 128, C)
        acc1 += _row(bias + (C.gemm.segment + col * 128), C)
    h = _act(acc0, acc1, C)
    row = base + gl.arange(0, 64, gl.SliceLayout(1, C.MMA))
    if C.gemm.grouped:
        s = gl.maximum(gl.max(gl.abs(h), 1), LEAST) / LARGEST
        gl.store(out_scale + row * (C.gemm.segment // 128) + col, s, mask=ok)
        h = gl.minimum(gl.maximum(h * gl.expand_dims(1.0 / s, 1), -LARGEST), LARGEST)
        _store(h.to(gl.float8e4nv), out, row, ok, col * 128, C)
    elif C.gemm.static:
        h = gl.minimum(gl.maximum(h / gl.load(out_scale), -LARGEST), LARGEST)
        _store(h.to(gl.float8e4nv), out, row, ok, col * 128, C)
    else:
        _store(h.to(gl.bfloat16), out, row, ok, col * 128, C)


@gluon.jit
def _store_y(acc, bias, w, out, route, ok, column, C: gl.constexpr):
    """128 columns of out[route] from `column` on"""
    if C.gemm.bias:
        acc += _row(bias + column, C)
    if C.gemm.weight:
        acc = acc * gl.expand_dims(w, 1)
    _store(acc.to(gl.bfloat16), out, route, ok, column, C)


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
def _sums(
    xs, ws, a_s, b_s, full, empty, go, e, base, n, col, route, first, slot, ph, begins,
    PART: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """acc0, acc1 [64, 128] f32, all scales applied"""
    ok = 64 * PART + gl.arange(0, 64, gl.SliceLayout(1, C.MMA)) < n
    p = _pointers(xs, ws, e, base, col, route, PART, C)
    if C.gemm.grouped:
        acc0, acc1, slot, ph = _multiply(p, first, ok, a_s, b_s, full, empty, go, slot, ph, begins, PART, C)
    else:
        acc0, acc1, slot, ph = _sum(a_s, b_s, full, empty, slot, ph, PART, C)
        x = gl.expand_dims(first[0], 1)
        acc0 = acc0 * x * _row(p[1], C)
        acc1 = acc1 * x * _row(p[2], C)
    return acc0, acc1, slot, ph


@gluon.jit
def _epilogue(acc0, acc1, bias, out, out_scale, e, base, n, col, route, w, PART: gl.constexpr, C: gl.constexpr):
    ok = 64 * PART + gl.arange(0, 64, gl.SliceLayout(1, C.MMA)) < n
    b = bias + e * C.rows
    if C.gemm.first:
        _store_h(acc0, acc1, b, w, out, out_scale, base + 64 * PART, ok, col, C)
    else:
        _store_y(acc0, b, w, out, route, ok, col * 256, C)
        if C.half_tiles:
            if 2 * col + 1 < C.rows // 128:
                _store_y(acc1, b, w, out, route, ok, col * 256 + 128, C)
        else:
            _store_y(acc1, b, w, out, route, ok, col * 256 + 128, C)


@gluon.jit
def _pass(full, empty, slot, ph, C: gl.constexpr):
    """the stages of a tile of which no token is ours"""
    for _i in range(C.iterations):
        mbarrier.wait(full.index(slot), ph)
        mbarrier.arrive(empty.index(slot), count=1)
        slot, ph = _next(slot, ph, C)
    return slot, ph


@gluon.jit
def _consumer(
    xs, ws, bias, counts, lists, tw, out, out_scale, a_s, b_s, full, empty, go, PART: gl.constexpr, C: gl.constexpr
):
    """64 tokens of each block, from 64 * PART on.  The routes of the next tile are fetched while this one is
    multiplied, its first scales while this one is stored."""
    ie, cnt, nb, cum, blocks = _experts(counts, C, 4)
    slot = gl.to_tensor(0)
    ph = gl.to_tensor(0)
    last = blocks * C.column_tiles - 1
    begin = gl.program_id(0)
    step = gl.num_programs(0)
    e, base, n, col = _find_tile(ie, cnt, nb, cum, gl.minimum(begin, last), C)
    route = _routes(lists, base, n, PART, C)
    first = _first(xs, ws, e, base, n, col, route, PART, C)
    r = 64 * PART + gl.arange(0, 64, gl.SliceLayout(1, C.MMA))
    if PART == 1 and C.lag > 0:
        mbarrier.wait(go.index(0), 0, pred=begin <= last)
    for t in range(begin, last + 1, step):
        w = gl.load(tw + route, mask=r < n, other=0.0)
        e2, base2, n2, col2 = _find_tile(ie, cnt, nb, cum, gl.minimum(t + step, last), C)
        route2 = _routes(lists, base2, n2, PART, C)
        if n > 64 * PART:
            acc0, acc1, slot, ph = _sums(
                xs, ws, a_s, b_s, full, empty, go, e, base, n, col, route, first, slot, ph, t == begin, PART, C
            )
            first2 = _first(xs, ws, e2, base2, n2, col2, route2, PART, C)
            _epilogue(acc0, acc1, bias, out, out_scale, e, base, n, col, route, w, PART, C)
        else:
            slot, ph = _pass(full, empty, slot, ph, C)
            first2 = _first(xs, ws, e2, base2, n2, col2, route2, PART, C)
        e = e2
        base = base2
        n = n2
        col = col2
        route = route2
        first = first2


@gluon.jit
def w8a8(x, xd, xs, wd, ws, bias, counts, lists, tw, out, out_scale, C: gl.constexpr):
    """First: out[i] = act(w13 x[token of lists[i]]); else out[lists[i]] bf16 = w2 x[i].

    x e4m3 [rows, K] (gathered for w13; by its descriptor xd for w2), weights by descriptor wd e4m3 (blocks of
    128 x 128 that follow each other as [E, rows / 128, K / 128, 128, 128], seen as rows of 128).
    Scales f32 by Gemm8:  grouped  xs [rows, K / 128], ws [E, rows / 128, K / 128]; out e4m3, out_scale like xs, written
                          static   xs [1], ws [E, rows]; out e4m3, out_scale [1], read
                          neither  xs [rows], ws [E, rows]; out bf16
    Routes grouped by expert: counts [E], lists [routes]; tw [routes] f32 the router's weights, bias [E, rows] f32."""
    if C.pdl:
        gdc_wait()
        gdc_launch_dependents()
    a_s = gl.allocate_shared_memory(gl.float8e4nv, [C.ST, 128, 128], C.SA)
    b_s = gl.allocate_shared_memory(gl.float8e4nv, [2 * C.ST, 128, 128], C.SB)
    full = gl.allocate_shared_memory(gl.int64, [C.ST, 1], _BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [C.ST, 1], _BARRIER)
    go = gl.allocate_shared_memory(gl.int64, [1, 1], _BARRIER)
    mbarrier.init(go.index(0), count=1)
    ST: gl.constexpr = C.ST
    for i in gl.static_range(ST):
        mbarrier.init(full.index(i), count=1 if C.listed else 2)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (_consumer, (xs, ws, bias, counts, lists, tw, out, out_scale, a_s, b_s, full, empty, go, 0, C)),
            (_consumer, (xs, ws, bias, counts, lists, tw, out, out_scale, a_s, b_s, full, empty, go, 1, C)),
            (_producer, (x, xd, wd, counts, lists, a_s, b_s, full, empty, C)),
        ],
        [4, 4],
        [C.consumer_registers, C.producer_registers],
    )
