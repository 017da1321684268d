# mypy: ignore-errors
# (Gluon device code: its types are checked by Triton's compiler, not by mypy.)
"""Device code that the GEMM kernels share: finding work, copying stages, epilogue.  `C` is a Tile."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from expertd_kernels.backends.gluon.shared.triton_versions import barrier, copy_elements, copy_tile

_ROW_MAJOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_BARRIER = gl.constexpr(mbarrier.MBarrierLayout())


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _stretched(cnt, C: gl.constexpr):
    """blocks of an expert's routes, the last one of up to BM + X"""
    return gl.where(cnt > C.X, (cnt - C.X + (C.BM - 1)) // C.BM, gl.minimum(cnt, 1))


@gluon.jit
def block_list(counts, C: gl.constexpr, W: gl.constexpr, X: gl.constexpr = 0):
    """routes grouped by expert: (expert, its routes, its blocks, running sum of blocks), in each warp.  An expert's
    last block has up to BM + X routes"""
    L: gl.constexpr = gl.BlockedLayout([C.padded_experts // 32], [32], [W], [0])
    ie = gl.arange(0, C.padded_experts, L)
    cnt = gl.load(counts + ie, mask=ie < C.gemm.experts, other=0)
    nb = (cnt + (C.BM - 1)) // C.BM
    if X > 0:
        nb = _stretched(cnt, C)
    return ie, cnt, nb, gl.associative_scan(nb, 0, _add)


@gluon.jit
def find_block(ie, cnt, nb, cum, blk, C: gl.constexpr):
    """block number -> (expert, first route of the block in the list, its routes: where X = 0, all from there to the
    expert's end)"""
    before = (cum <= blk).to(gl.int32)
    e = gl.sum(before, 0)
    b = blk - gl.sum(nb * before, 0)
    n = gl.sum(gl.where(ie == e, cnt, 0), 0) - b * C.BM
    if C.X > 0:
        n = gl.where(n > C.BM + C.X, C.BM, n)
    return e, gl.sum(cnt * before, 0) + b * C.BM, n


@gluon.jit
def block_order(counts, C: gl.constexpr, W: gl.constexpr):
    """For kernel `ws`: what find_ordered needs.  An expert's last block has up to BM + X routes; the long blocks of all
    experts come first, so that the short ones (up to BM / 2) fill the end"""
    L: gl.constexpr = gl.BlockedLayout([C.padded_experts // 32], [32], [W], [0])
    ie = gl.arange(0, C.padded_experts, L)
    cnt = gl.load(counts + ie, mask=ie < C.gemm.experts, other=0)
    blocks = _stretched(cnt, C)
    short = ((cnt > 0) & (cnt - (blocks - 1) * C.BM <= C.BM // 2)).to(gl.int32)
    long = blocks - short
    return ie, cnt, long, gl.associative_scan(long, 0, _add), gl.associative_scan(short, 0, _add), gl.sum(long, 0)


@gluon.jit
def order_of(counts, C: gl.constexpr, W: gl.constexpr):
    """what find_ordered needs: block_order; or, where blocks are listed, the list and how many they are"""
    return (counts, gl.load(counts)) if C.tabled else block_order(counts, C, W)


@gluon.jit
def listed_block(blocks, block, here):
    """(expert, first route in the list, routes), none where not `here`"""
    v = gl.load(blocks + 2 + 2 * block, mask=here, other=0)
    base = gl.load(blocks + 3 + 2 * block, mask=here, other=0)
    return v & 0xFFFF, base, v >> 16


@gluon.jit
def find_ordered(order, t, C: gl.constexpr):
    """tile number -> (expert, first route of the block in the list, its routes, column tile); no routes where there is
    no such tile"""
    block = t // C.column_tiles
    if C.tabled:
        e, base, n = listed_block(order[0], block, block < order[1])
    else:
        e, base, n, _col = _find_counted(order, t, C)
    return e, base, n, t % C.column_tiles


@gluon.jit
def _find_counted(order, t, C: gl.constexpr):
    """tile number -> (expert, first route of the block in the list, its routes, column tile); no routes where there is
    no such tile.  All sums are taken whatever the block is: under a branch, ptxas 12.8 gives REDUX another predicate
    than the branch's (seen in its machine code)"""
    ie, cnt, long, cum, cum_short, all_long = order
    blk = t // C.column_tiles
    e = gl.sum(gl.where(blk < all_long, cum <= blk, cum_short <= blk - all_long).to(gl.int32), 0)
    mine = gl.sum(gl.where(ie == e, long, 0), 0)
    before = gl.sum(gl.where(ie < e, long, 0), 0)
    b = gl.where(blk < all_long, blk - before, mine)
    n = gl.sum(gl.where(ie == e, cnt, 0), 0) - b * C.BM
    base = gl.sum(gl.where(ie < e, cnt, 0), 0) + b * C.BM
    return e, base, gl.where(n > C.BM + C.X, C.BM, n), t % C.column_tiles


@gluon.jit
def find_of_both(order, t, C: gl.constexpr, D: gl.constexpr):
    """Tile number among those of w13 (C) and then those of w2 (D), in the same order of blocks -> (expert, first route
    of the block in the list, its routes, column tile, block, whether it is w2's); no routes where there is no such
    tile"""
    if C.tabled:
        first = order[1] * C.column_tiles
    else:
        _ie, _cnt, _long, _cum, cum_short, all_long = order
        first = (all_long + gl.max(cum_short, 0)) * C.column_tiles
    second = t >= first
    u = gl.where(second, t - first, t)
    block = gl.where(second, u // D.column_tiles, u // C.column_tiles)
    col = gl.where(second, u % D.column_tiles, u % C.column_tiles)
    e, base, n, _col = find_ordered(order, block * C.column_tiles, C)
    return e, base, n, col, block, second.to(gl.int32)


def _nth_bit(words):
    """PTX: $0 = position of the $1-th set bit (from 0) of the words $2, $3, ... (words * 32 bits)."""
    t = "{\n.reg .pred p;\n.reg .b32 t, m, c;\nmov.b32 t, $1;\nmov.b32 m, $2;\nmov.b32 $0, 0;\n"
    for k in range(1, words):  # once the word is found, t < popc(m) stays true
        t += "popc.b32 c, m;\nsetp.ge.s32 p, t, c;\n@p sub.s32 t, t, c;\n"
        t += f"@p mov.b32 m, ${2 + k};\n@p mov.b32 $0, {32 * k};\n"
    for w in (16, 8, 4, 2, 1):
        t += f"and.b32 c, m, {(1 << w) - 1};\npopc.b32 c, c;\nsetp.ge.s32 p, t, c;\n"
        t += f"@p sub.s32 t, t, c;\n@p shr.u32 m, m, {w};\n@p add.s32 $0, $0, {w};\n"
    return t + "}", "=&r,r," + ",".join(["r"] * words)


NTH_BIT1, NTH_BIT1_ARGS = (gl.constexpr(v) for v in _nth_bit(1))
NTH_BIT2, NTH_BIT2_ARGS = (gl.constexpr(v) for v in _nth_bit(2))
NTH_BIT4, NTH_BIT4_ARGS = (gl.constexpr(v) for v in _nth_bit(4))


@gluon.jit
def own_block(ids, route, n, C: gl.constexpr):
    """No list of blocks: the block of `route` is its expert's routes from `route` on, if it is the first, or the
    BM-th, ... of them, else empty.  (expert or E, routes, number of routes of the expert before it, one bit a route
    of the expert in four words)"""
    i = gl.arange(0, C.words * 32, C.LI)
    e = gl.load(ids + route)
    same = (gl.load(ids + i, mask=i < n, other=-1) == e).to(gl.int32)
    both = gl.sum(same + gl.where(i < route, same << 16, 0), 0)
    before = both >> 16
    bit = same << (i % 32)
    m0 = gl.sum(gl.where(i // 32 == 0, bit, 0), 0)
    m1 = m0
    m2 = m0
    m3 = m0
    if C.words >= 2:
        m1 = gl.sum(gl.where(i // 32 == 1, bit, 0), 0)
    if C.words >= 4:
        m2 = gl.sum(gl.where(i // 32 == 2, bit, 0), 0)
        m3 = gl.sum(gl.where(i // 32 == 3, bit, 0), 0)
    first = (before % C.BM == 0) & (e >= 0)
    return gl.where(first, e, C.gemm.experts), gl.minimum((both & 0xFFFF) - before, C.BM), (before, m0, m1, m2, m3)


AWAIT = gl.constexpr(
    "{\n.reg .pred p;\nmov.b32 $0, $2;\nsetp.lt.s32 p, $2, 1;\n@p bra DONE;\n"
    "AGAIN:\nld.acquire.gpu.global.b32 $0, [$1];\nsetp.lt.s32 p, $0, $2;\n@p bra AGAIN;\nDONE:\n}"
)
"""PTX: waits until the number at $1 is at least $2; does not look where $2 is 0."""


@gluon.jit
def await_tiles(done, C: gl.constexpr):
    """waits until w13's tiles of this block have all been counted; what they stored is then visible here.  One warp
    asks (all of them together slow the counting down by more than the wait costs), the others stand at the barrier"""
    i = gl.arange(0, 32 * C.W, gl.BlockedLayout([1], [32], [C.W], [0]))
    at = done.to(gl.int64, bitcast=True) + i * 0
    gl.inline_asm_elementwise(
        AWAIT, "=&r,l,r", [at, gl.where(i < 32, C.counted, 0)], dtype=gl.int32, is_pure=False, pack=1
    )
    barrier()


@gluon.jit
def await_block(done, many: gl.constexpr, W: gl.constexpr):
    """as await_tiles, for a partition of W warps"""
    i = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    at = done.to(gl.int64, bitcast=True) + i * 0
    gl.inline_asm_elementwise(AWAIT, "=&r,l,r", [at, gl.where(i < 32, many, 0)], dtype=gl.int32, is_pure=False, pack=1)
    barrier()


@gluon.jit
def count_tile(done):
    """counts this tile of w13, whose results all threads have stored"""
    barrier()
    gl.atomic_add(done, 1, sem="release", scope="gpu")


@gluon.jit
def routes(lists, base, n0: gl.constexpr, n, N: gl.constexpr, C: gl.constexpr, L: gl.constexpr):
    """routes (token * top_k + slot) n0 .. n0 + N of the block that starts at lists[base] and has n; -1 beyond.
    Mode "ids": base is what own_block found, or the only route of the block"""
    i = n0 + gl.arange(0, N, L)
    if C.mode == "ids" and C.words == 0:
        r = gl.where(i < n, base, -1)
    elif C.mode == "ids":
        before, m0, m1, m2, m3 = base
        t = i + before
        if C.words == 1:
            r = gl.inline_asm_elementwise(NTH_BIT1, NTH_BIT1_ARGS, [t, m0], dtype=gl.int32, is_pure=True, pack=1)
        elif C.words == 2:
            r = gl.inline_asm_elementwise(NTH_BIT2, NTH_BIT2_ARGS, [t, m0, m1], dtype=gl.int32, is_pure=True, pack=1)
        else:
            r = gl.inline_asm_elementwise(
                NTH_BIT4, NTH_BIT4_ARGS, [t, m0, m1, m2, m3], dtype=gl.int32, is_pure=True, pack=1
            )
        r = gl.where(i < n, r, -1)
    elif C.mode == "table":  # the list is long enough: the load need not wait for n
        r = gl.where(i < n, gl.load(lists + base + i), -1)
    else:
        r = gl.load(lists + base + i, mask=i < n, other=-1)
    return r


@gluon.jit
def input_rows(r, C: gl.constexpr):
    """route -> row of the GEMM's input: its token for w13, itself for w2"""
    if C.gemm.first:
        r = gl.where(r >= 0, r // C.gemm.top_k, -1)
    return r


@gluon.jit
def route_weights(tw, r, unscale, C: gl.constexpr):
    """what multiplies the columns of the result: 2**shift, times the router weight where this GEMM has it"""
    if C.gemm.weight and not C.gemm.bias:
        w = gl.load(tw + r, mask=r >= 0, other=0.0) * unscale
    elif C.gemm.weight:
        w = gl.load(tw + r, mask=r >= 0, other=0.0)
    else:
        w = gl.full([r.shape[0]], 1.0, gl.float32, r.type.layout)
    return w


@gluon.jit
def copy_weights(wd, ws, row, wb, sb, full, i, slot, ok, C: gl.constexpr):
    """stage i of row tiles row .. row + T into a slot; the part beyond K arrives as zeros"""
    mbarrier.expect(full.index(slot), C.T * 2048 * C.stage_units, pred=ok)
    copy_tile(wd, [row, i * (16 * C.stage_units), 0], full.index(slot), wb.index(slot), pred=ok)
    if C.codec.kind != "plain":
        t = gl.expand_dims(gl.arange(0, C.T, gl.SliceLayout(1, C.LC)), 1)
        k = gl.expand_dims(gl.arange(0, C.stage_scales, gl.SliceLayout(0, C.LC)), 0)
        p = ws + row.to(gl.int64) * C.expert_scales + i * C.stage_scales + (t * C.expert_scales + k)
        m = ok
        if C.expert_scales % C.stage_scales != 0:
            m = m & (k < C.expert_scales - i * C.stage_scales)
        if C.rows_masked:
            m = m & (t < C.gemm.experts * C.gemm.rows - row)
        copy_elements(sb.index(slot), p, mask=m)


@gluon.jit
def copy_inputs(x, f, xb, i, ok, C: gl.constexpr):
    """gather: stage i of rows f of x, zeros where f < 0 or beyond the last column"""
    k = i * (64 * C.S) + gl.expand_dims(gl.arange(0, 64 * C.S, gl.SliceLayout(0, C.LX)), 0)
    p = gl.expand_dims(gl.maximum(f, 0) * C.gemm.x_stride, 1) + k
    m = gl.expand_dims(f >= 0, 1) & ok
    if C.x_masked:
        m = m & (k < C.gemm.x_columns)
    copy_elements(xb, x + p, mask=m)


@gluon.jit
def load_bias(bias, row, C: gl.constexpr, MMA: gl.constexpr):
    """[TT * 64] f32 of row tiles row .. (a constant where there is no bias)"""
    L: gl.constexpr = gl.SliceLayout(1, MMA)
    n = gl.arange(0, C.TT * 64, L)
    if C.gemm.bias:
        b = gl.load(bias + row * 64 + n, mask=row * 64 + n < C.gemm.experts * C.gemm.rows * 64, other=0.0)
    else:
        b = gl.full([C.TT * 64], 0.0, gl.float32, L)
    return b


SIGMOID = gl.constexpr(
    "{\n.reg .f32 t;\nmul.ftz.f32 t, $1, 0fBFB8AA3B;\nex2.approx.ftz.f32 t, t;\n"
    "add.ftz.f32 t, t, 0f3F800000;\nrcp.approx.ftz.f32 $0, t;\n}"
)
"""PTX: 1 / (1 + exp(-v)) in five instructions, right to a few 2**-23; the compiler's division alone takes nine."""


@gluon.jit
def sigmoid(v):
    return gl.inline_asm_elementwise(SIGMOID, "=f,f", [v], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _act(g, u, C: gl.constexpr):
    """act(gate) * up; the same formulas as expertd_kernels.weights.float32.apply_activation"""
    A: gl.constexpr = C.gemm.act
    if C.gemm.limited:
        g = gl.minimum(g, C.gemm.limit)
        u = gl.maximum(gl.minimum(u, C.gemm.limit), -C.gemm.limit)
    if A == "silu_and_mul":
        y = g * sigmoid(g) * u
    elif A == "swigluoai":
        y = (u + C.gemm.beta) * g * sigmoid(C.gemm.alpha * g)
    elif A == "gelu_tanh_and_mul":  # 0.5 * (1 + tanh(v)) = sigmoid(2 v)
        y = g * sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g)) * u
    else:
        gl.static_assert(A == "gelu_and_mul")
        y = 0.5 * g * (1.0 + gl.erf(g * 0.7071067811865476)) * u
    return y


@gluon.jit
def _store(y, r, out, row, C: gl.constexpr, R: gl.constexpr, L: gl.constexpr):
    """y [R, N] of row tiles row .., in layout L -> out[r, column]"""
    f = gl.expand_dims(gl.convert_layout(r, gl.SliceLayout(0, L)), 0)
    n = gl.expand_dims(row * C.out_rows + gl.arange(0, R, gl.SliceLayout(1, L)), 1)
    m = f >= 0
    if C.out_masked:
        m = m & (n < C.gemm.out_columns)
    gl.store(out + gl.maximum(f, 0).to(gl.int64) * C.gemm.out_columns + n, y, mask=m)


@gluon.jit
def epilogue(acc, r, wt, b, out, unscale, row, C: gl.constexpr, N: gl.constexpr, MMA: gl.constexpr):
    """acc [TT * 64, N] of row tiles row .. -> out[route, column], bias, activation and router weight applied.

    r, wt [N], b [TT * 64] were loaded before the main loop, so that their latency is hidden."""
    R: gl.constexpr = C.TT * C.out_rows
    if C.gemm.bias:
        acc = acc * unscale
        if C.gemm.first and C.gemm.weight:
            acc = acc * gl.expand_dims(gl.convert_layout(wt, gl.SliceLayout(0, MMA)), 0)
        acc = acc + gl.expand_dims(b, 1)
        if not C.gemm.first and C.gemm.weight:
            acc = acc * gl.expand_dims(gl.convert_layout(wt, gl.SliceLayout(0, MMA)), 0)
    elif C.gemm.weight:
        acc = acc * gl.expand_dims(gl.convert_layout(wt, gl.SliceLayout(0, MMA)), 0)
    else:
        acc = acc * unscale
    if C.gemm.first and C.gemm.gated:
        g, u = gl.split(acc.reshape([C.TT * 4, 2, 8, N]).permute((0, 2, 3, 1)))
        acc = _act(g, u, C).reshape([R, N])
    elif C.gemm.first:  # relu2
        acc = gl.maximum(acc, 0.0)
        acc = acc * acc
    if N <= 16 and out.dtype.element_ty == gl.float32:  # eight lanes hold 32 bytes of a row: whole sectors as they are
        _store(acc, r, out, row, C, R, MMA)
    else:
        V: gl.constexpr = 8 if N >= 32 else 2
        LN: gl.constexpr = min(R // V, 16)
        LO: gl.constexpr = gl.BlockedLayout([V, 1], [LN, 32 // LN], [1, C.W], [0, 1])
        _store(gl.convert_layout(acc.to(out.dtype.element_ty), LO), r, out, row, C, R, LO)


@gluon.jit
def stages(C: gl.constexpr, scale_type: gl.constexpr, arrivals: gl.constexpr):
    """shared memory of the ring: words, inputs, scales, barriers that fill"""
    wb = gl.allocate_shared_memory(gl.int32, [C.ST, C.T, 16 * C.stage_units, 32], C.SW)
    xs = gl.allocate_shared_memory(gl.bfloat16, [C.ST, C.BM, 64 * C.S], C.SX)
    if C.codec.kind != "plain":
        sb = gl.allocate_shared_memory(scale_type, [C.ST, C.T, C.stage_scales], _ROW_MAJOR)
    else:
        sb = wb
    full = gl.allocate_shared_memory(gl.int64, [C.ST, 1], _BARRIER)
    ST: gl.constexpr = C.ST
    for i in gl.static_range(ST):
        mbarrier.init(full.index(i), count=arrivals)
    fence_async_shared()
    return wb, xs, sb, full
