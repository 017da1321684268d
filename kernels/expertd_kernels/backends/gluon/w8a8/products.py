# mypy: ignore-errors
# (Gluon device code: its types are checked by Triton's compiler, not by mypy.)
"""Sums of a tile of kernel `w8a8`: which scales it needs, and its products.  `C` is a Tile8."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
)

from expertd_kernels.backends.gluon.shared.tickets import next_slot
from expertd_kernels.backends.gluon.shared.triton_versions import warpgroup_mma_wait
from expertd_kernels.backends.gluon.w8a8.epilogue import row_of


@gluon.jit
def back(slot, k: gl.constexpr, C: gl.constexpr):
    """the slot k stages before"""
    return gl.where(slot < k, slot + (C.ST - k), slot - k)


@gluon.jit
def _add_scaled(acc, p, s):
    """acc + p * s by row, at this place: left to itself, the compiler moves it behind the next product, and two
    products are more than the registers hold."""
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [p, gl.expand_dims(s, 1), acc], dtype=gl.float32, is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def multiply(
    pointers, first, ok, a_s, b_s, full, empty, slot, ph, PART: gl.constexpr, HALF: gl.constexpr, C: gl.constexpr
):
    """acc0, acc1 [64, 128] f32: the part's rows times the tile's two runs of 128 weight rows.  pointers: as pointers_to
    gives them; first: what they point to.

    HALF: for a block's first 64 rows, of which both parts have all.  This one takes half of the weight rows: 64 of each
    run for w13 (acc0, acc1 [64, 64]), one of the runs for w2 (acc0 [64, 128], acc1 is nothing).

    Nothing stands between the end of a product and the issue of the next but the addition of its result: the barriers,
    and the scales of the next stage, are waited for while a product runs."""
    ONE: gl.constexpr = HALF and not C.gemm.first
    N: gl.constexpr = 64 if HALF and C.gemm.first else 128
    FROM: gl.constexpr = 64 * PART if N == 64 else 0
    MMA: gl.constexpr = C.MMA64 if N == 64 else C.MMA
    L: gl.constexpr = gl.SliceLayout(1, MMA)
    xs, ws0, ws1 = pointers
    x, w0, w1 = first
    if ONE and PART == 1:
        ws0 = ws1
        w0 = w1
    acc0 = gl.zeros([64, N], gl.float32, MMA)
    acc1 = gl.zeros([64, N], gl.float32, MMA)
    none = gl.zeros([64, N], gl.float32, MMA)
    mbarrier.wait(full.index(slot), ph)
    for i in range(C.iterations):
        a = a_s.index(slot).slice(0 if HALF else 64 * PART, 64, 0)
        b0 = b_s.index(2 * slot + (PART if ONE else 0)).slice(FROM, N, 0).permute((1, 0))
        b1 = b_s.index(2 * slot + 1).slice(FROM, N, 0).permute((1, 0))
        t = warpgroup_mma(a, b0, warpgroup_mma_init(none), use_acc=False, is_async=True)
        mbarrier.arrive(empty.index(back(slot, 1, C)), count=1, pred=i > 0)
        more = ok & (i + 1 < C.iterations)
        nx = gl.load(xs + (i + 1), mask=more, other=0.0)
        n0 = gl.load(ws0 + (i + 1), mask=more, other=0.0)
        n1 = n0
        if not ONE:
            n1 = gl.load(ws1 + (i + 1), mask=more, other=0.0)
        s0 = gl.convert_layout(x * w0, L)
        s1 = gl.convert_layout(x * w1, L)
        slot, ph = next_slot(slot, ph, C)
        if not ONE:
            p = warpgroup_mma_wait(0, deps=[t])
            acc0 = _add_scaled(acc0, p, s0)
            t = warpgroup_mma(a, b1, warpgroup_mma_init(none), use_acc=False, is_async=True)
        mbarrier.wait(full.index(slot), ph, pred=i + 1 < C.iterations)
        p = warpgroup_mma_wait(0, deps=[t])
        if ONE:
            acc0 = _add_scaled(acc0, p, s0)
        else:
            acc1 = _add_scaled(acc1, p, s1)
        x = nx
        w0 = n0
        w1 = n1
    mbarrier.arrive(empty.index(back(slot, 1, C)), count=1)
    return acc0, acc1, slot, ph


@gluon.jit
def _sum(a_s, b_s, full, empty, slot, ph, PART: gl.constexpr, C: gl.constexpr):
    """as multiply, before any scale: the tensor core sums all of K, the products of two stages in flight"""
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
        mbarrier.arrive(empty.index(back(slot, 1, C)), count=1, pred=i > 0)
        slot, ph = next_slot(slot, ph, C)
    acc0, acc1 = warpgroup_mma_wait(0, deps=[t0, t1])
    mbarrier.arrive(empty.index(back(slot, 1, C)), count=1)
    return acc0, acc1, slot, ph


@gluon.jit
def rows_of(n, PART: gl.constexpr, C: gl.constexpr):
    """the block's rows that are the part's [64]; the first ones where the parts share them"""
    r = gl.arange(0, 64, gl.SliceLayout(1, C.MMA))
    if C.split:
        r += gl.where(n > 64, 64 * PART, 0)
    else:
        r += 64 * PART
    return r


@gluon.jit
def pointers_to(xs, ws, e, base, n, col, route, PART: gl.constexpr, C: gl.constexpr):
    """to the first scale of each row of the part and of the tile's two runs of weight rows, [64] each"""
    G: gl.constexpr = C.iterations if C.gemm.grouped else 1
    L: gl.constexpr = gl.SliceLayout(1, C.MMA)
    if C.gemm.static:
        x = gl.zeros([64], gl.int32, L)
    elif not C.listed:
        x = route // C.gemm.top_k
    else:
        x = base + rows_of(n, PART, C)
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
def routes_of(lists, base, n, PART: gl.constexpr, C: gl.constexpr):
    """the part's routes [64]"""
    r = rows_of(n, PART, C)
    return gl.load(lists + base + r, mask=r < n, other=0)


@gluon.jit
def first_scales(xs, ws, e, base, n, col, route, PART: gl.constexpr, C: gl.constexpr):
    """the first scales of the part's rows and of the tile's runs, [64] each"""
    ok = rows_of(n, PART, C) < n
    px, p0, p1 = pointers_to(xs, ws, e, base, n, col, route, PART, C)
    x = gl.load(px, mask=ok, other=0.0)
    first = (x, x, x)
    if C.gemm.grouped:
        first = (x, gl.load(p0, mask=ok, other=0.0), gl.load(p1, mask=ok, other=0.0))
    return first


@gluon.jit
def sums(xs, ws, a_s, b_s, full, empty, e, base, n, col, route, first, slot, ph, PART: gl.constexpr, C: gl.constexpr):
    """acc0, acc1 [64, 128] f32, all scales applied"""
    ok = 64 * PART + gl.arange(0, 64, gl.SliceLayout(1, C.MMA)) < n
    p = pointers_to(xs, ws, e, base, n, col, route, PART, C)
    if C.gemm.grouped:
        acc0, acc1, slot, ph = multiply(p, first, ok, a_s, b_s, full, empty, slot, ph, PART, False, C)
    else:
        acc0, acc1, slot, ph = _sum(a_s, b_s, full, empty, slot, ph, PART, C)
        x = gl.expand_dims(first[0], 1)
        acc0 = acc0 * x * row_of(p[1], acc0)
        acc1 = acc1 * x * row_of(p[2], acc1)
    return acc0, acc1, slot, ph
