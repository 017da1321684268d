# mypy: ignore-errors
# (Gluon device code: its types are checked by Triton's compiler, not by mypy.)
"""Kernel `wide`: bf16 weights and many tokens, persistent and warp-specialised.  `C` is a Tile: BM = 128, T = 4, S = 1.

Nothing has to be unpacked, so both operands come from shared memory and tokens lie on the 64 side of wgmma: a tile is
128 tokens x 256 weight rows.  Each consumer warpgroup is a partition of its own with 64 tokens of the block: neither
waits for the other, and a block of up to 64 tokens costs half.  Where both GEMMs run like this (C.listed), h stands in
the order of the route lists, so that w2's inputs are boxes that the copy engine fetches.
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
    _act,
    barrier,
    block_list,
    copy_inputs,
    copy_tile,
    input_rows,
    routes,
)
from expertd_kernels.backends.gluon.tiles_of_tokens import find_tile, next_slot, skip_tile

SIDE_BY_SIDE = gl.constexpr(16)
"""Blocks of an expert that take a column tile together, before its next one: the weights are read from memory once."""


@gluon.jit
def _before(slot, C: gl.constexpr):
    """the slot of the stage before"""
    return gl.where(slot == 0, C.ST - 1, slot - 1)


@gluon.jit
def _producer(x, xd, wd, counts, lists, xs, wb, full, empty, C: gl.constexpr):
    GATHERED: gl.constexpr = C.gemm.first or not C.listed
    ie, cnt, nb, cum, blocks = block_list(counts, C, 4)
    slot = gl.to_tensor(0)
    ph = gl.to_tensor(1)
    issued = gl.to_tensor(0)
    for t in range(gl.program_id(0), blocks * C.column_tiles, gl.num_programs(0)):
        e, base, n, col = find_tile(ie, cnt, nb, cum, t, SIDE_BY_SIDE, False, C)
        if GATHERED:
            f = input_rows(routes(lists, base, 0, n, C.BM, C, gl.SliceLayout(1, C.LX)), C)
        row = e * C.gemm.rows + col * C.T
        for i in range(C.iterations):
            mbarrier.wait(empty.index(slot), ph)
            mbarrier.expect(full.index(slot), C.T * 8192 + (0 if GATHERED else C.BM * 128))
            copy_tile(wd, [row, i * 64, 0], full.index(slot), wb.index(slot))
            if GATHERED:  # these rows are declared to be there one stage after they were asked for
                copy_inputs(x, f, xs.index(slot), i, True, C)
                async_copy.commit_group()
                async_copy.wait_group(1)
                fence_async_shared()
                mbarrier.arrive(full.index(_before(slot, C)), count=1, pred=issued >= 1)
                issued += 1
            else:
                copy_tile(xd, [base, i * 64], full.index(slot), xs.index(slot))
            slot, ph = next_slot(slot, ph, C)
    if GATHERED:
        async_copy.wait_group(0)
        fence_async_shared()
        mbarrier.arrive(full.index(_before(slot, C)), count=1, pred=issued >= 1)


@gluon.jit
def _sum(xs, wb, full, empty, slot, ph, PART: gl.constexpr, C: gl.constexpr):
    """[64, 256] f32, the products of two stages in flight"""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    acc = warpgroup_mma_init(gl.zeros([64, 256], gl.float32, MMA))
    for i in range(C.iterations):
        mbarrier.wait(full.index(slot), ph)
        a = xs.index(slot).slice(64 * PART, 64, 0)
        b = wb.index(slot)._reinterpret(gl.bfloat16, [256, 64], C.SX)
        acc = warpgroup_mma(a, b.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        acc = warpgroup_mma_init(acc)
        mbarrier.arrive(empty.index(_before(slot, C)), count=1, pred=i > 0)
        slot, ph = next_slot(slot, ph, C)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(_before(slot, C)), count=1)
    return acc, slot, ph


@gluon.jit
def _store(v, out, row, ok, column, C: gl.constexpr):
    """v [64, 128] -> out[row, column ..], where ok"""
    L: gl.constexpr = C.LY
    v = gl.convert_layout(v.to(gl.bfloat16), L)
    row = gl.expand_dims(gl.convert_layout(row, gl.SliceLayout(1, L)), 1)
    ok = gl.expand_dims(gl.convert_layout(ok, gl.SliceLayout(1, L)), 1)
    c = gl.expand_dims(column + gl.arange(0, 128, gl.SliceLayout(0, L)), 0)
    if C.out_masked:
        ok = ok & (c < C.gemm.out_columns)
    gl.store(out + row.to(gl.int64) * C.gemm.out_columns + c, v, mask=ok)


@gluon.jit
def _epilogue(acc, bias, w, out, e, base, n, col, route, PART: gl.constexpr, C: gl.constexpr):
    """acc [64, 256] -> 128 columns of h, or 256 of the result, of the part's routes"""
    r = 64 * PART + gl.arange(0, 64, gl.SliceLayout(1, acc.type.layout))
    ok = r < n
    row = route
    if C.gemm.first and C.listed:
        row = base + r
    if C.gemm.first and C.gemm.weight:
        acc = acc * gl.expand_dims(w, 1)
    if C.gemm.bias:
        c = col * 256 + gl.arange(0, 256, gl.SliceLayout(0, acc.type.layout))
        b = gl.load(bias + e * (C.gemm.rows * 64) + c, mask=c < C.gemm.rows * 64, other=0.0)
        acc = acc + gl.expand_dims(b, 0)
    if not C.gemm.first and C.gemm.weight:
        acc = acc * gl.expand_dims(w, 1)
    if C.gemm.first and C.gemm.gated:
        g, u = gl.split(acc.reshape([64, 16, 2, 8]).permute((0, 1, 3, 2)))
        _store(_act(g, u, C).reshape([64, 128]), out, row, ok, col * 128, C)
    else:
        if C.gemm.first:  # relu2
            acc = gl.maximum(acc, 0.0)
            acc = acc * acc
        y0, y1 = gl.split(acc.reshape([64, 2, 128]).permute((0, 2, 1)))
        _store(y0, out, row, ok, col * 256, C)
        _store(y1, out, row, ok, col * 256 + 128, C)


@gluon.jit
def _consumer(bias, counts, lists, tw, out, xs, wb, full, empty, PART: gl.constexpr, C: gl.constexpr):
    """64 tokens of each block, from 64 * PART on"""
    ie, cnt, nb, cum, blocks = block_list(counts, C, 4)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    slot = gl.to_tensor(0)
    ph = gl.to_tensor(0)
    r = 64 * PART + gl.arange(0, 64, gl.SliceLayout(1, MMA))
    for t in range(gl.program_id(0), blocks * C.column_tiles, gl.num_programs(0)):
        e, base, n, col = find_tile(ie, cnt, nb, cum, t, SIDE_BY_SIDE, False, C)
        if n > 64 * PART:
            route = gl.load(lists + base + r, mask=r < n, other=0)
            w = gl.load(tw + route, mask=r < n, other=0.0)
            acc, slot, ph = _sum(xs, wb, full, empty, slot, ph, PART, C)
            _epilogue(acc, bias, w, out, e, base, n, col, route, PART, C)
        else:
            slot, ph = skip_tile(full, empty, slot, ph, C)


@gluon.jit
def wide(x, xd, wd, bias, counts, lists, tw, out, C: gl.constexpr):
    """out[route] = act(w13 x[token]) or w2 h[route]; routes grouped by expert: counts [E], lists [routes].  C.listed: h
    has instead of `route` the place of the route in the lists, and w2 reads it by its descriptor xd."""
    if C.pdl:
        gdc_wait()
        gdc_launch_dependents()
    xs = gl.allocate_shared_memory(gl.bfloat16, [C.ST, C.BM, 64], C.SX)
    wb = gl.allocate_shared_memory(gl.int32, [C.ST, C.T, 64, 32], C.SW)
    full = gl.allocate_shared_memory(gl.int64, [C.ST, 1], _BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [C.ST, 1], _BARRIER)
    ST: gl.constexpr = C.ST
    for i in gl.static_range(ST):
        mbarrier.init(full.index(i), count=2 if C.gemm.first or not C.listed else 1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (_consumer, (bias, counts, lists, tw, out, xs, wb, full, empty, 0, C)),
            (_consumer, (bias, counts, lists, tw, out, xs, wb, full, empty, 1, C)),
            (_producer, (x, xd, wd, counts, lists, xs, wb, full, empty, C)),
        ],
        [4, 4],
        [232, 40],
    )
