# mypy: ignore-errors
# (Gluon device code: its types are checked by Triton's compiler, not by mypy.)
"""Kernel `gemv`: a layer of one to four tokens in two launches, every route by itself.

Weights go from memory to registers, each lane its own elements of the tensor core's operand, `ahead` steps before they
are used; only the inputs lie in shared memory, so that no warp waits for another between the tile's begin and end.

A CTA makes `slices` times 16 rows; its warps share out K (w2: the experts of a token, and K).  The tensor core's eight
columns are those parts: column n holds the inputs of part n, so the sum of part p's rows is found in column p.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from expertd_kernels.backends.gluon.shared.triton_versions import barrier, copy_elements, keep_alive, reinterpret
from expertd_kernels.backends.gluon.weight_only.dequant import weights
from expertd_kernels.backends.gluon.weight_only.pieces import _act

EXPONENTS = gl.constexpr(
    "{\n.reg .b32 t, z;\nmov.b32 z, 0;\nprmt.b32 t, $4, z, 0x1404;\nshr.u32 t, t, 1;\nmov.b32 {$0, $1}, t;\n"
    "prmt.b32 t, $4, z, 0x3424;\nshr.u32 t, t, 1;\nmov.b32 {$2, $3}, t;\n}"
)
"""Four exponent bytes -> four bf16 powers of two (dequant.E8M0), each a number of its own."""
HOLD = gl.constexpr("bar.warp.sync 0xffffffff;\nmov.b32 $0, $1;")


@gluon.jit
def _hold(C: gl.constexpr):
    """ptxas moves no load across this; without it those of a whole round wait for the round's end"""
    i = gl.arange(0, 32 * C.W, gl.BlockedLayout([1], [32], [C.W], [0]))
    gl.inline_asm_elementwise(HOLD, "=r,r", [i], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _place(p, i, C: gl.constexpr):
    """part p, its step i -> (slot of the token, step of K, whether both exist)"""
    if C.gemm.first:
        slot = p * 0
        k = p * C.part_steps + i
        ok = k < C.steps
    else:
        slot = p // C.splits * C.slots + i // C.part_steps
        k = p % C.splits * C.part_steps + i % C.part_steps
        ok = (slot < C.gemm.top_k) & (k < C.steps)
    return gl.minimum(slot, C.gemm.top_k - 1), gl.minimum(k, C.steps - 1), ok & (i < C.iterations)


@gluon.jit
def _part_experts(ids, route, spare, i, C: gl.constexpr, L: gl.constexpr):
    slot, _, _ = _place(gl.arange(0, C.parts, gl.SliceLayout(1, L)), i, C)
    if C.gemm.first:
        e = slot + spare
    else:
        v = gl.load(ids + route + slot)
        e = gl.where((v >= 0) & (v < C.gemm.experts), v, spare)
    return e


@gluon.jit
def _experts(ids, route, spare, i, C: gl.constexpr):
    """each part's expert at step i, as its words and as its scales need it; `spare` stands in for an absent one, whose
    inputs count as zeros"""
    LQ: gl.constexpr = C.LQ
    LS: gl.constexpr = C.LS
    e1 = _part_experts(ids, route, spare, i, C, LQ)
    e2 = e1
    if C.codec.kind != "plain":
        e2 = _part_experts(ids, route, spare, i, C, LS)
    return e1, e2


@gluon.jit
def _fetch(codes, scales, tile, i, e1, e2, C: gl.constexpr):
    """step i of every part: (words, scales) in registers, as they are stored; beyond a part's last step that one again,
    which is at hand"""
    LQ: gl.constexpr = C.LQ
    G1: gl.constexpr = C.slices * C.slice_words
    _, k, _ = _place(gl.arange(0, C.parts, gl.SliceLayout(1, LQ)), i, C)
    row = (e1 * C.gemm.rows + tile * C.slices // 4).to(gl.int64)
    at = row * C.tile_words + (k.to(gl.int64) * C.step_words + tile * C.slices % 4 * C.slice_words)
    v = gl.expand_dims(gl.arange(0, C.step_words // 4 * C.slices, gl.SliceLayout(0, LQ)), 0)
    at = gl.expand_dims(at, 1) + (v // G1 * (4 * C.slice_words) + v % G1)
    q = gl.load(codes + at)
    s = q
    if C.codec.kind != "plain":
        LS: gl.constexpr = C.LS
        G2: gl.constexpr = C.slices * C.slice_scales
        PL: gl.constexpr = C.codec.planes
        _, k, _ = _place(gl.arange(0, C.parts, gl.SliceLayout(1, LS)), i, C)
        k = k.to(gl.int64)
        row = (e2 * C.gemm.rows + tile * C.slices // 4).to(gl.int64)
        at = row * (C.chunks * C.chunk_scales) + tile * C.slices % 4 * C.slice_scales
        v = gl.expand_dims(gl.arange(0, C.step_scales // C.scales_a_word, gl.SliceLayout(0, LS)), 0)
        chunk = gl.expand_dims(k * (64 * C.S) // C.codec.chunk, 1) + v // (PL * G2)
        at = gl.expand_dims(at, 1) + (chunk * C.chunk_scales + v // G2 % PL * (4 * C.slice_scales) + v % G2)
        s = gl.load(scales + at)
    return q, s


@gluon.jit
def _inputs(x, ids, route, xs, C: gl.constexpr):
    """x, the token's row (w13) or its routes' (w2), to shared memory: part n's columns of a step in row n, zeros where
    there are none"""
    LX: gl.constexpr = C.LX
    P: gl.constexpr = C.parts
    N: gl.constexpr = C.fill * C.ahead
    view = reinterpret(xs, gl.bfloat16, [C.padded_rounds // C.fill, P * N, 64 * C.S], C.SX)
    r = gl.arange(0, P * N, gl.SliceLayout(1, LX))
    c = gl.expand_dims(gl.arange(0, 64 * C.S, gl.SliceLayout(0, LX)), 0)
    if not C.gemm.first:
        slot, _, _ = _place(r % P, 0, C)
        e = gl.load(ids + route + slot)
    for o in range(C.padded_rounds // C.fill):
        slot, k, ok = _place(r % P, o * N + r // P, C)
        if C.slots > 1:
            e = gl.load(ids + route + slot)
        if not C.gemm.first:
            ok = ok & (e >= 0) & (e < C.gemm.experts)
        k = gl.expand_dims(k * (64 * C.S), 1) + c
        m = gl.expand_dims(ok, 1)
        if C.gemm.x_columns % (64 * C.S) != 0:
            m = m & (k < C.gemm.x_columns)
        copy_elements(view.index(o), x + (gl.expand_dims(slot * C.gemm.x_stride, 1) + k), mask=m)
    async_copy.commit_group()


@gluon.jit
def _exponents(s, C: gl.constexpr):
    """words of exponents -> bf16 [parts, step_scales].  Until here they are words: of bytes, each in a register, ptxas
    makes copies at the end of a round, for which a warp waits"""
    a, b, c, d = gl.inline_asm_elementwise(
        EXPONENTS, "=h,=h,=h,=h,r", [s.to(gl.int32)], dtype=(gl.int16,) * 4, is_pure=True, pack=1
    )
    s = gl.join(a, b)
    if C.scales_a_word == 4:
        s = gl.join(gl.join(a, c), gl.join(b, d))
    return s.to(gl.bfloat16, bitcast=True).reshape([C.parts, C.step_scales])


@gluon.jit
def _product(q, s, xb, acc, C: gl.constexpr):
    """acc + the product of a step's weights [16 * W, 64 * S] and inputs [64 * S, 8], part n % parts in column n"""
    MMA: gl.constexpr = C.MMA
    AL: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    BL: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    S: gl.constexpr = C.S
    if C.codec.kind == "plain":  # columns of both in the order in which a lane's 16 bytes hold them
        a = q.reshape([C.parts, S, C.slices, 2, 8, 2, 4, 2, 2, 2]).permute((0, 2, 3, 4, 1, 5, 7, 8, 6, 9))
        a = gl.convert_layout(a.reshape([16 * C.W, 64 * S]), AL)
    else:
        if C.codec.e8m0:
            s = _exponents(s, C)
        a = weights(q, s, C, AL)
    if C.codec.kind != "plain" and C.parts == 8:
        b = xb.permute((1, 0)).load(BL)
    else:
        LB: gl.constexpr = gl.SliceLayout(1, C.LB)
        b = gl.expand_dims(xb.permute((1, 0)).load(LB), 1).broadcast_to([64 * S, 8 // C.parts, C.parts])
        if C.codec.kind == "plain":
            b = b.reshape([S, 2, 4, 2, 2, 2, 8]).permute((0, 1, 3, 4, 2, 5, 6))
        b = gl.convert_layout(b.reshape([64 * S, 8]), BL)
    return mma_v2(a, b, acc)


@gluon.jit
def _sum_parts(acc, C: gl.constexpr):
    """acc [16 * W, 8] -> [16 * slices] f32: of part p's rows column p counts"""
    MMA: gl.constexpr = C.MMA
    part = gl.arange(0, 16 * C.W, gl.SliceLayout(1, MMA)) // (16 * C.slices)
    n = gl.arange(0, 8, gl.SliceLayout(0, MMA))
    v = gl.sum(gl.where(gl.expand_dims(n, 0) == gl.expand_dims(part, 1), acc, 0.0), 1)
    return gl.sum(v.reshape([C.parts, 16 * C.slices]), 0)


@gluon.jit
def _finish(v, bias, ids, tw, out, unscale, b, e, tile, C: gl.constexpr):
    """sums [16 * slices] -> h of route b, or the output of token b.  The router weight multiplies h, before it is
    rounded, so that w2 sums over a token's routes as over columns"""
    L: gl.constexpr = C.LV
    N: gl.constexpr = 16 * C.slices
    TOP_K: gl.constexpr = C.gemm.top_k
    v = gl.convert_layout(v, L) * unscale
    i = tile * N + gl.arange(0, N, L)
    if C.gemm.first:
        w = gl.load(tw + b)
        if C.gemm.weight:
            v = v * w
        if C.gemm.bias:
            v = v + gl.load(bias + e.to(gl.int64) * (C.gemm.rows * 64) + i)
        if C.gemm.gated:
            g, u = gl.split(v.reshape([C.slices, 2, 8]).permute((0, 2, 1)))
            v = _act(g, u, C).reshape([N // 2])
        else:  # relu2
            v = gl.maximum(v, 0.0)
            v = v * v
        if not C.gemm.weight:
            v = v * w
        M: gl.constexpr = N // 2 if C.gemm.gated else N
        i = tile * M + gl.arange(0, M, v.type.layout)
    elif C.gemm.bias:
        for j in gl.static_range(TOP_K):
            r = b * TOP_K + j
            ej = gl.load(ids + r)
            w = 1.0
            if C.gemm.weight:
                w = gl.load(tw + r)
            w = gl.where((ej >= 0) & (ej < C.gemm.experts), w, 0.0)
            ej = gl.where((ej >= 0) & (ej < C.gemm.experts), ej, 0).to(gl.int64)
            v = v + w * gl.load(bias + ej * (C.gemm.rows * 64) + i)
    gl.store(out + b.to(gl.int64) * C.gemm.out_columns + i, v.to(out.dtype.element_ty), mask=i < C.gemm.out_columns)


@gluon.jit
def gemv(x, codes, scales, bias, ids, tw, out, unscale, C: gl.constexpr):
    """w13: out[route] = w * act(w13 x[token]) [routes, I]; w2: out[token] = sum of w2 h[route] [tokens, H]; a CTA for
    each route or token and `slices` times 16 rows.  Of an absent route w13 writes nothing and w2 takes zeros."""
    D: gl.constexpr = C.ahead
    FIRST: gl.constexpr = min(C.ahead, C.iterations)
    LAST: gl.constexpr = C.iterations - (C.rounds - 1) * C.ahead
    TOP_K: gl.constexpr = C.gemm.top_k
    MMA: gl.constexpr = C.MMA
    if C.gemm.first:
        gdc_wait()
    gdc_launch_dependents()
    tile = gl.program_id(0) % C.tiles
    b = gl.program_id(0) // C.tiles
    e = -1
    if C.gemm.first:
        route = b
        v = gl.load(ids + b)
        e = gl.where((v >= 0) & (v < C.gemm.experts), v, -1)
        x += (b // TOP_K).to(gl.int64) * C.gemm.x_stride
    else:  # the ids are older than w13
        route = b * TOP_K
        for j in gl.static_range(TOP_K):
            v = gl.load(ids + route + j)
            e = gl.where((v >= 0) & (v < C.gemm.experts), v, e)
        x += route.to(gl.int64) * C.gemm.x_stride
    xs = gl.allocate_shared_memory(gl.bfloat16, [C.padded_rounds, C.parts * D, 64 * C.S], C.SX)
    spare = xs
    if C.input_rounds > C.padded_rounds:  # so that further CTAs go elsewhere
        spare = gl.allocate_shared_memory(gl.bfloat16, [C.input_rounds - C.padded_rounds, C.parts * D, 64 * C.S], C.SX)
    acc = gl.zeros([16 * C.W, 8], gl.float32, MMA)
    if e >= 0:
        e1, e2 = _experts(ids, route, e, 0, C)
        ring = (_fetch(codes, scales, tile, 0, e1, e2, C),)
        for d in gl.static_range(1, FIRST):
            if C.slots > 1:
                e1, e2 = _experts(ids, route, e, d, C)
            ring += (_fetch(codes, scales, tile, d, e1, e2, C),)
        _hold(C)
        if not C.gemm.first:
            gdc_wait()
        _inputs(x, ids, route, xs, C)
        async_copy.wait_group(0)
        barrier()
        for o in range(C.rounds - 1):
            for d in gl.static_range(D):
                q, s = ring[0]
                acc = _product(q, s, xs.index(o).slice(d * C.parts, C.parts, 0), acc, C)
                i = o * D + d + D
                if C.slots > 1:
                    e1, e2 = _experts(ids, route, e, i, C)
                ring = ring[1:]
                ring += (_fetch(codes, scales, tile, i, e1, e2, C),)
                _hold(C)
        for d in gl.static_range(LAST):
            q, s = ring[d]
            acc = _product(q, s, xs.index(C.rounds - 1).slice(d * C.parts, C.parts, 0), acc, C)
    elif not C.gemm.first:
        gdc_wait()
    if (e >= 0) | (not C.gemm.first):
        _finish(_sum_parts(acc, C), bias, ids, tw, out, unscale, b, e, tile, C)
    if C.input_rounds > C.padded_rounds:
        keep_alive(spare)
