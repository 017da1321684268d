# mypy: ignore-errors
# (Gluon device code: its types are checked by Triton's compiler, not by mypy.)
"""Kernel `w8a8_few`: e4m3 weights times e4m3 activations where few tokens go to an expert.  `C` is a TileFew.

Bound by reading weights, so they fill the 64 side of wgmma and tokens its N side, 8 and more.  A CTA has two runs of
128 weight rows of one expert (the gate and up rows of 128 columns of h) or one run of w2, and all routes of the expert,
N at a time; several CTAs share an SM.  Which expert it is follows from the ids alone, so weights are on their way
before the kernel in front of it has ended.
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

from expertd_kernels.backends.gluon.shared.triton_versions import (
    barrier,
    copy_elements,
    copy_tile,
    keep_alive,
    warpgroup_mma_wait,
)
from expertd_kernels.backends.gluon.w8a8.epilogue import LARGEST, LEAST, activate
from expertd_kernels.backends.gluon.weight_only.pieces import _BARRIER


@gluon.jit
def _find(ids, place, n_routes, C: gl.constexpr):
    """(expert, its routes, routes of the experts before it).  No routes: another CTA has them, or nobody."""
    L: gl.constexpr = gl.BlockedLayout([C.routes // 32], [32], [4], [0])
    i = gl.arange(0, C.routes, L)
    v = gl.load(ids + i, mask=i < n_routes, other=-1)
    e = place
    if C.by_route:
        e = gl.load(ids + place)
    n = gl.sum((v == e).to(gl.int32), 0)
    before = gl.sum(((v >= 0) & (v < e)).to(gl.int32), 0)
    if C.by_route:
        earlier = gl.sum(((v == e) & (i < place)).to(gl.int32), 0)
        n = gl.where((e >= 0) & (e < C.gemm.experts) & (earlier == 0), n, 0)
    return e, n, before


@gluon.jit
def _weights(wd, run0, run1, i, w_s, full, slot, ok, C: gl.constexpr):
    """Stage i of the two runs, or two stages in a row of one: blocks of 128 x 128."""
    mbarrier.expect(full.index(slot), 2 * 128 * 128, pred=ok)
    if C.gemm.first:
        copy_tile(wd, [(run0 + i) * 128, 0], full.index(slot), w_s.index(2 * slot), pred=ok)
        copy_tile(wd, [(run1 + i) * 128, 0], full.index(slot), w_s.index(2 * slot + 1), pred=ok)
    else:
        copy_tile(wd, [(run0 + 2 * i) * 128, 0], full.index(slot), w_s.index(2 * slot), pred=ok)
        copy_tile(wd, [(run0 + 2 * i + 1) * 128, 0], full.index(slot), w_s.index(2 * slot + 1), pred=ok)


@gluon.jit
def _inputs(x, rows, have, i, x_s, slot, ok, N: gl.constexpr, C: gl.constexpr):
    """Stage i of the inputs: rows [N] where `have`."""
    c = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, C.LX)), 0)
    p = x + gl.expand_dims(rows.to(gl.int64) * C.gemm.K, 1) + c
    m = gl.expand_dims(have, 1) & ok
    U: gl.constexpr = C.units
    for j in gl.static_range(U):
        copy_elements(x_s.index(slot * C.units + j).slice(0, N, 0), p + (i * C.units + j) * 128, mask=m)
    async_copy.commit_group()


@gluon.jit
def _scales(xs, ws, rows, have, run0, run1, i, ok, N: gl.constexpr, C: gl.constexpr):
    """Scales of the inputs of stage i's two products and of their weights, [N] each: loads that nothing waits for."""
    G: gl.constexpr = C.gemm.K // 128
    m = have & ok
    none = rows * 0
    if C.gemm.first:
        x0 = gl.load(xs + rows * G + i, mask=m, other=0.0)
        x1 = x0
        w0 = gl.load(ws + run0 + i + none, mask=m, other=0.0)
        w1 = gl.load(ws + run1 + i + none, mask=m, other=0.0)
    else:
        x0 = gl.load(xs + rows * G + 2 * i, mask=m, other=0.0)
        x1 = gl.load(xs + rows * G + 2 * i + 1, mask=m, other=0.0)
        w0 = gl.load(ws + run0 + 2 * i + none, mask=m, other=0.0)
        w1 = gl.load(ws + run0 + 2 * i + 1 + none, mask=m, other=0.0)
    return x0, x1, w0, w1


@gluon.jit
def _store(v, out, rows, have, column, stride: gl.constexpr, C: gl.constexpr):
    """v [128, N] -> out[row, column ..], where the row is there."""
    L: gl.constexpr = C.LO
    v = gl.convert_layout(v, L)
    r = gl.expand_dims(gl.convert_layout(rows, gl.SliceLayout(0, L)), 0)
    m = gl.expand_dims(gl.convert_layout(have.to(gl.int32), gl.SliceLayout(0, L)), 0) > 0
    c = gl.expand_dims(column + gl.arange(0, 128, gl.SliceLayout(1, L)), 1)
    gl.store(out + r.to(gl.int64) * stride + c, v, mask=m)


@gluon.jit
def _column(p, MMA: gl.constexpr):
    """128 numbers [128, 1], one for each row of an accumulator"""
    return gl.expand_dims(gl.load(p + gl.arange(0, 128, gl.SliceLayout(1, MMA))), 1)


@gluon.jit
def _finish(acc0, acc1, bias, tw, out, out_scale, e, base, route, have, tile, part, N: gl.constexpr, C: gl.constexpr,
            MMA: gl.constexpr):  # fmt: skip
    """Bias, router weight, activation and rounding; h in the order of the list, w2's results by route."""
    b = bias + e * C.rows + tile * 128
    if C.gemm.weight:
        w = gl.expand_dims(gl.load(tw + route, mask=have, other=0.0), 0)
    if C.gemm.first:
        if C.gemm.weight:
            acc0 = acc0 * w
            acc1 = acc1 * w
        if C.gemm.bias:
            acc0 += _column(b, MMA)
            acc1 += _column(b + C.gemm.segment, MMA)
        h = activate(acc0, acc1, C)
        row = base + gl.arange(0, N, gl.SliceLayout(0, MMA))
        if C.gemm.grouped:
            s = gl.maximum(gl.max(gl.abs(h), 0), LEAST) / LARGEST
            gl.store(out_scale + row * (C.gemm.segment // 128) + tile, s, mask=have)
            h = gl.minimum(gl.maximum(h * gl.expand_dims(1.0 / s, 0), -LARGEST), LARGEST).to(gl.float8e4nv)
        elif C.gemm.static:
            h = gl.minimum(gl.maximum(h / gl.load(out_scale), -LARGEST), LARGEST).to(gl.float8e4nv)
        else:
            h = h.to(gl.bfloat16)
        _store(h, out, row, have, tile * 128, C.gemm.segment, C)
    else:
        y = acc0 + acc1 if C.gemm.grouped else acc0
        if C.gemm.bias:
            y += _column(b, MMA) * (part == 0).to(gl.float32)
        if C.gemm.weight:
            y = y * w
        _store(y.to(out.dtype.element_ty), out, route, have, tile * 128, C.gemm.segment, C)


@gluon.jit
def _pass(x, xs, wd, ws, bias, lists, tw, out, out_scale, e, base, n, tile, part, run0, run1, x_s, w_s, full, slot, ph,
          asked, N: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """Up to N routes from lists[base] on.  asked: the first stages of the weights are on their way."""
    P: gl.constexpr = C.ST - 1
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 32])
    LC: gl.constexpr = gl.SliceLayout(0, MMA)
    k0 = part * C.iterations
    r = gl.arange(0, N, gl.SliceLayout(1, C.LX))
    rc = gl.arange(0, N, LC)
    have_x = r < n
    have = rc < n
    route = gl.load(lists + base + rc, mask=have, other=0)
    if C.gemm.first:
        rows_x = gl.load(lists + base + r, mask=have_x, other=0) // C.gemm.top_k
        rows = route // C.gemm.top_k
    else:
        rows_x = base + r
        rows = base + rc
    ns = slot
    for i in gl.static_range(P):
        ok = i < C.iterations
        _weights(wd, run0, run1, k0 + i, w_s, full, ns, ok & (asked == 0), C)
        _inputs(x, rows_x, have_x, k0 + i, x_s, ns, ok, N, C)
        ns = gl.where(ns == C.ST - 1, 0, ns + 1)
    none = gl.zeros([128, N], gl.float32, MMA)
    acc0 = none
    acc1 = none
    if C.gemm.grouped:
        s = _scales(xs, ws, rows, have, run0, run1, k0, True, N, C)
    for i in range(C.iterations):
        if C.gemm.grouped:
            after = _scales(xs, ws, rows, have, run0, run1, k0 + i + 1, i + 1 < C.iterations, N, C)
        async_copy.wait_group(P - 1)
        fence_async_shared()
        mbarrier.wait(full.index(slot), ph)
        barrier()
        more = i + P < C.iterations
        _weights(wd, run0, run1, k0 + i + P, w_s, full, ns, more, C)
        _inputs(x, rows_x, have_x, k0 + i + P, x_s, ns, more, N, C)
        x0 = x_s.index(slot * C.units).slice(0, N, 0).permute((1, 0))
        x1 = x_s.index(slot * C.units + C.units - 1).slice(0, N, 0).permute((1, 0))
        if C.gemm.grouped:
            t0 = warpgroup_mma(w_s.index(2 * slot), x0, warpgroup_mma_init(none), use_acc=False, is_async=True)
            t1 = warpgroup_mma(w_s.index(2 * slot + 1), x1, warpgroup_mma_init(none), use_acc=False, is_async=True)
            p0, p1 = warpgroup_mma_wait(0, deps=[t0, t1])
            acc0 += p0 * gl.expand_dims(s[0] * s[2], 0)
            acc1 += p1 * gl.expand_dims(s[1] * s[3], 0)
            s = after
        elif C.gemm.first:
            t0 = warpgroup_mma(w_s.index(2 * slot), x0, warpgroup_mma_init(acc0), is_async=True)
            t1 = warpgroup_mma(w_s.index(2 * slot + 1), x1, warpgroup_mma_init(acc1), is_async=True)
            acc0, acc1 = warpgroup_mma_wait(0, deps=[t0, t1])
        else:
            t0 = warpgroup_mma(w_s.index(2 * slot), x0, warpgroup_mma_init(acc0), is_async=True)
            t0 = warpgroup_mma(w_s.index(2 * slot + 1), x1, t0, is_async=True)
            (acc0,) = (warpgroup_mma_wait(0, deps=[t0]),)
        slot = gl.where(slot == C.ST - 1, 0, slot + 1)
        ns = gl.where(ns == C.ST - 1, 0, ns + 1)
        ph = gl.where(slot == 0, ph ^ 1, ph)
    async_copy.wait_group(0)
    if not C.gemm.grouped:
        a = gl.full([N], 0.0, gl.float32, LC)
        if C.gemm.static:
            a += gl.load(xs)
        else:
            a = gl.load(xs + rows, mask=have, other=0.0)
        a = gl.expand_dims(a, 0)
        w = ws + e * C.rows + tile * 128
        acc0 = acc0 * a * _column(w, MMA)
        if C.gemm.first:
            acc1 = acc1 * a * _column(w + C.gemm.segment, MMA)
    _finish(acc0, acc1, bias, tw, out, out_scale, e, base, route, have, tile, part, N, C, MMA)
    return slot, ph


@gluon.jit(do_not_specialize=["n_routes"])
def w8a8_few(x, xs, wd, ws, bias, ids, lists, tw, out, out_scale, n_routes, C: gl.constexpr):
    """As w8a8.w8a8, for n_routes <= C.routes routes.  Grid: places x tiles of 128 columns x C.Z parts of w2's K; a
    place is an expert, or by_route a route that stands for all of its expert.  With parts, out [Z, n_routes, H] f32."""
    tile = gl.program_id(0) % C.column_tiles
    place = gl.program_id(0) // C.column_tiles
    part = place * 0
    if C.Z > 1:
        part = place % C.Z
        place = place // C.Z
        out += (part * n_routes).to(gl.int64) * C.gemm.segment
    e, n, base = _find(ids, place, n_routes, C)
    if n > 0:
        w_s = gl.allocate_shared_memory(gl.float8e4nv, [2 * C.ST, 128, 128], C.SB)
        x_s = gl.allocate_shared_memory(gl.float8e4nv, [C.units * C.ST, C.N2, 128], C.SB)
        full = gl.allocate_shared_memory(gl.int64, [C.ST, 1], _BARRIER)
        ST: gl.constexpr = C.ST
        P: gl.constexpr = C.ST - 1
        for i in gl.static_range(ST):
            mbarrier.init(full.index(i), count=1)
        fence_async_shared()
        barrier()
        G: gl.constexpr = C.gemm.K // 128
        run0 = (e * (C.rows // 128) + tile) * G
        run1 = run0
        if C.gemm.first:
            run1 = run0 + (C.gemm.segment // 128) * G
        for i in gl.static_range(P):
            _weights(wd, run0, run1, part * C.iterations + i, w_s, full, i, i < C.iterations, C)
        gdc_wait()
        gdc_launch_dependents()
        slot = gl.to_tensor(0)
        ph = gl.to_tensor(0)
        if n <= C.N1:
            _pass(x, xs, wd, ws, bias, lists, tw, out, out_scale, e, base, n, tile, part, run0, run1, x_s, w_s, full,
                  slot, ph, 1, C.N1, C)  # fmt: skip
        else:
            for at in range(0, n, C.N2):
                asked = (at == 0).to(gl.int32)
                slot, ph = _pass(x, xs, wd, ws, bias, lists, tw, out, out_scale, e, base + at, n - at, tile, part, run0,
                                 run1, x_s, w_s, full, slot, ph, asked, C.N2, C)  # fmt: skip
                barrier()
        keep_alive(full)
    elif gl.program_id(0) == 0:  # the launch ends after the one before it, even where no CTA has work
        gdc_wait()
