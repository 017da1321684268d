# mypy: ignore-errors
# (Gluon device code: its types are checked by Triton's compiler, not by mypy.)
"""Kernel `block`: one tile a CTA, several CTAs an SM, a ring of stages; for up to about 80 tokens an expert.

Blocks have BM tokens; in mode "lists" the last one of an expert may have up to X more, in an accumulator of its own."""

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

from expertd_kernels.backends.gluon.shared.triton_versions import barrier, keep_alive, reinterpret, warpgroup_mma_wait
from expertd_kernels.backends.gluon.weight_only.dequant import load, unpack
from expertd_kernels.backends.gluon.weight_only.pieces import (
    await_tiles,
    block_list,
    copy_inputs,
    copy_weights,
    count_tile,
    epilogue,
    find_block,
    input_rows,
    listed_block,
    load_bias,
    own_block,
    route_weights,
    routes,
    stages,
)


@gluon.jit
def _more(xs, xt, slot, N1: gl.constexpr, N2: gl.constexpr, C: gl.constexpr):
    """inputs of the second accumulator: routes N1 .. N1 + N2 of the block; with X > 0 in a buffer of their own"""
    return xt.index(slot) if C.X > 0 else xs.index(slot).slice(N1, N2, 0)


@gluon.jit
def _tile(
    x,
    wd,
    ws,
    bias,
    lists,
    tw,
    out,
    done,
    unscale,
    e,
    base,
    n,
    tile,
    k0,
    ring,
    N1: gl.constexpr,
    N2: gl.constexpr,
    C: gl.constexpr,
):
    """N1 (+ N2) routes x T row tiles.  The slot freed D stages ago is refilled.  SK = 1: one MMA in flight; SK > 1
    (needs D = 1): those of a whole stage, as for bf16 weights.  k0: the first stage of this CTA's part of K."""
    wb, xs, xt, sb, full = ring
    P: gl.constexpr = C.ST - C.D
    S: gl.constexpr = C.S
    PARTS: gl.constexpr = 0 if C.codec.kind == "plain" else C.S // C.SK
    NN: gl.constexpr = N2 if N2 > 0 else N1
    M1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C.W, 1], [16, N1, 16])
    M2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C.W, 1], [16, NN, 16])
    AL: gl.constexpr = gl.DotOperandLayout(0, M1, 2)
    XL: gl.constexpr = gl.SliceLayout(1, C.LX)
    L1: gl.constexpr = gl.BlockedLayout([1], [32], [C.W], [0])
    row = e * C.gemm.rows + tile * C.T
    if C.early:
        for i0 in gl.static_range(P):
            copy_weights(wd, ws, row, wb, sb, full, k0 + i0, i0, (n > 0) & (i0 < C.iterations), C)
    if C.counted > 0 and not C.gemm.first:
        await_tiles(done, C)
    elif C.early:
        gdc_wait()
    f1 = input_rows(routes(lists, base, 0, n, N1, C, XL), C)
    f2 = input_rows(routes(lists, base, N1, n, NN, C, XL), C)
    r1 = routes(lists, base, 0, n, N1, C, L1)
    r2 = routes(lists, base, N1, n, NN, C, L1)
    w1 = route_weights(tw, r1, unscale, C)
    w2 = route_weights(tw, r2, unscale, C)
    b = load_bias(bias, row, C, M1)
    if C.Z > 1:  # once, not once a part
        b = gl.where(k0 == 0, b, 0.0)
    for i1 in gl.static_range(P):
        ok = (n > 0) & (i1 < C.iterations)
        if not C.early:
            copy_weights(wd, ws, row, wb, sb, full, k0 + i1, i1, ok, C)
        copy_inputs(x, f1, xs.index(i1).slice(0, N1, 0), k0 + i1, ok, C)
        if N2 > 0:
            copy_inputs(x, f2, _more(xs, xt, i1, N1, N2, C), k0 + i1, ok, C)
        async_copy.commit_group()
    t1 = warpgroup_mma_init(gl.zeros([C.T * 64, N1], gl.float32, M1))
    t2 = warpgroup_mma_init(gl.zeros([C.T * 64, NN], gl.float32, M2))
    slot = 0
    ns = P
    ph = 0
    for i in range(C.iterations):
        async_copy.wait_group(P - 1)
        fence_async_shared()
        mbarrier.wait(full.index(slot), ph)
        if C.D == 1:
            t1, t2 = warpgroup_mma_wait(0, deps=[t1, t2])
            t1 = warpgroup_mma_init(t1)
            t2 = warpgroup_mma_init(t2)
        barrier()
        more = i + P < C.iterations
        copy_weights(wd, ws, row, wb, sb, full, k0 + i + P, ns, more, C)
        copy_inputs(x, f1, xs.index(ns).slice(0, N1, 0), k0 + i + P, more, C)
        if N2 > 0:
            copy_inputs(x, f2, _more(xs, xt, ns, N1, N2, C), k0 + i + P, more, C)
        async_copy.commit_group()
        if C.codec.kind == "plain":  # as they are stored; T or S is 1
            w = reinterpret(wb.index(slot), gl.bfloat16, [C.S, C.T * 64, 64], C.SX)
            for j in gl.static_range(S):
                xj = xs.index(slot).slice(j * 64, 64, 1)
                t1 = warpgroup_mma(w.index(j), xj.slice(0, N1, 0).permute((1, 0)), t1, is_async=True)
                if N2 > 0:
                    t2 = warpgroup_mma(w.index(j), xj.slice(N1, N2, 0).permute((1, 0)), t2, is_async=True)
        for j in gl.static_range(PARTS):
            q, s = load(wb.index(slot), sb.index(slot), j, C)
            a = unpack(q, s, C, AL)
            if C.SK == 1:
                t1, t2 = warpgroup_mma_wait(0, deps=[t1, t2])
                t1 = warpgroup_mma_init(t1)
                t2 = warpgroup_mma_init(t2)
            xj = xs.index(slot).slice(j * 64 * C.SK, 64 * C.SK, 1)
            t1 = warpgroup_mma(a, xj.slice(0, N1, 0).permute((1, 0)), t1, is_async=True)
            if N2 > 0:  # the same A registers: the layouts of the two operands agree
                a2 = gl.convert_layout(a, gl.DotOperandLayout(0, M2, 2))
                x2 = _more(xs, xt, slot, N1, N2, C).slice(j * 64 * C.SK, 64 * C.SK, 1)
                t2 = warpgroup_mma(a2, x2.permute((1, 0)), t2, is_async=True)
        slot = gl.where(slot == C.ST - 1, 0, slot + 1)
        ns = gl.where(ns == C.ST - 1, 0, ns + 1)
        ph = gl.where(slot == 0, ph ^ 1, ph)
    a1, a2 = warpgroup_mma_wait(0, deps=[t1, t2])
    epilogue(a1, r1, w1, b, out, unscale, tile * C.T, C, N1, M1)
    if N2 > 0:
        epilogue(a2, r2, w2, gl.convert_layout(b, gl.SliceLayout(1, M2)), out, unscale, tile * C.T, C, NN, M2)


@gluon.jit(do_not_specialize=["routes_in_all"])
def block(x, wd, ws, bias, table, lists, tw, out, done, unscale, routes_in_all, C: gl.constexpr):
    """out[route] = act(w13 x[token]) or w2 h[route], for one block of routes x T row tiles a CTA.

    table: by mode, the ids [routes_in_all], the table of blocks, or the counts [E] of
    `lists` (C.tabled: the list of blocks).  Mode "ids": a CTA a
    route; with words = 0 each route is a block, else the first of an expert's stands for all.

    counted: w13 counts the finished tiles of each block in done [blocks], and a tile of w2 waits for its own block
    only.  That wait ends: w2's CTAs start when all of w13's have started (they ask for the launch at their beginning),
    and those never wait for w2.  The counters are 0 before and, by `combine`, after a layer."""
    if C.pdl:
        if not C.early and (C.gemm.first or C.counted == 0):
            gdc_wait()
        gdc_launch_dependents()
    tile = gl.program_id(0) % C.column_tiles
    blk = gl.program_id(0) // C.column_tiles
    k0 = 0
    if C.Z > 1:  # the results of the parts stand one after another; `combine` adds them
        k0 = blk % C.Z * C.iterations
        out += (blk % C.Z * routes_in_all).to(gl.int64) * C.gemm.out_columns
        blk = blk // C.Z
    done += blk
    if C.mode == "ids" and C.words == 0:
        e = gl.load(table + blk)
        base = blk
        n = (e >= 0).to(gl.int32)
        e = gl.where(e < 0, C.gemm.experts, e)
    elif C.mode == "ids":
        e, n, base = own_block(table, blk, routes_in_all, C)
    elif C.mode == "table":
        v = gl.load(table + blk)
        e = v & 0xFFFF
        base = blk * C.BM
        n = v >> 16
    elif C.tabled:
        e, base, n = listed_block(table, blk, True)
    else:
        ie, cnt, nb, cum = block_list(table, C, C.W, C.X)
        e, base, n = find_block(ie, cnt, nb, cum, blk, C)
    if e < C.gemm.experts:
        wb, xs, sb, full = stages(C, ws.dtype.element_ty, 1)
        xt = gl.allocate_shared_memory(gl.bfloat16, [C.ST, C.X, 64 * C.S], C.SX) if C.X > 0 else xs
        ring = (wb, xs, xt, sb, full)
        B: gl.constexpr = C.BM
        if C.V >= 1 and n <= B // 2:
            if C.V >= 2 and n <= B // 4:
                _tile(x, wd, ws, bias, lists, tw, out, done, unscale, e, base, n, tile, k0, ring, B // 4, 0, C)
            else:
                _tile(x, wd, ws, bias, lists, tw, out, done, unscale, e, base, n, tile, k0, ring, B // 2, 0, C)
        elif C.X > 0 and n > B:
            _tile(x, wd, ws, bias, lists, tw, out, done, unscale, e, base, n, tile, k0, ring, B, C.X, C)
        elif C.V >= 3 and n <= B // 4 * 3:
            _tile(x, wd, ws, bias, lists, tw, out, done, unscale, e, base, n, tile, k0, ring, B // 2, B // 4, C)
        else:
            _tile(x, wd, ws, bias, lists, tw, out, done, unscale, e, base, n, tile, k0, ring, B, 0, C)
        if C.counted > 0 and C.gemm.first:
            count_tile(done)
        keep_alive(full)
    if (C.early or (C.counted > 0 and not C.gemm.first)) and gl.program_id(0) == gl.num_programs(0) - 1:
        gdc_wait()  # this kernel ends after w13's, also where no CTA has a route
