# mypy: ignore-errors
# (Triton device code: its types are checked by Triton's compiler, not by mypy.)
# (Conditions on constexpr choose code while compiling: statements, and no `in`.)
"""Weight-only GEMM of one layer's experts:  out[row] = W[expert(row)] @ x[row].

The product is computed transposed, acc[n, token] = W[n, :] . x[token, :]: weight rows fill the tall side of the tensor
core's tile and a few tokens its narrow side, and unpacked weights are the register operand, so they never pass through
shared memory.  One program computes BN rows of each segment (gate and up, or one) for one block of at most BM rows of
one expert, over all of K (loops.py), then the epilogue: scales that are constant along K, router weight on the input,
bias, activation.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from expertd_kernels.backends.portable.loops import float_loop, packed_loop
from expertd_kernels.backends.portable.unpack import FLOAT, to_bf16

SILU = tl.constexpr(0)
GELU = tl.constexpr(1)
GELU_TANH = tl.constexpr(2)
SWIGLUOAI = tl.constexpr(3)
RELU2 = tl.constexpr(4)


@triton.jit
def activate(g, u, KIND: tl.constexpr, LIMITED: tl.constexpr, alpha, beta, limit):
    """gate, up -> activation, f32.  RELU2: of g alone."""
    if KIND == RELU2:
        y = tl.maximum(g, 0.0)
        y = y * y
    else:
        if LIMITED:
            g = tl.minimum(g, limit)
            u = tl.minimum(tl.maximum(u, -limit), limit)
        if KIND == SILU:
            y = g * tl.sigmoid(g) * u
        elif KIND == GELU:
            y = 0.5 * g * (1.0 + tl.erf(g * 0.7071067811865476)) * u
        elif KIND == GELU_TANH:
            # (1 + tanh z) / 2 = sigmoid(2z), z = sqrt(2 / pi) * (g + 0.044715 g^3)
            y = g * tl.sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g)) * u
        else:
            y = (u + beta) * g * tl.sigmoid(alpha * g)
    return y


@triton.jit
def find_block(blocks_ptr, ids_ptr, b, n_experts, DIRECT: tl.constexpr):
    """(expert or -1, first row, rows) of block b.  DIRECT: block b is route b."""
    if DIRECT:
        e = tl.load(ids_ptr + b)
        e = tl.where(e < n_experts, e, -1)
        start = b
        rows = 1
    else:
        e = tl.load(blocks_ptr + 4 * b)
        start = tl.load(blocks_ptr + 4 * b + 1)
        rows = tl.load(blocks_ptr + 4 * b + 2)
    return e, start, rows


@triton.jit
def tile_of(pid, n_blocks, N_TILES: tl.constexpr, GROUP_M: tl.constexpr):
    """Program -> (block, row tile): GROUP_M blocks in turn use a row tile's weights, then the next row tile."""
    first = (pid // (GROUP_M * N_TILES)) * GROUP_M
    inside = pid % (GROUP_M * N_TILES)
    size = tl.minimum(n_blocks - first, GROUP_M)
    return first + inside % size, inside // size


@triton.jit
def rows_of_block(
    slots_ptr, start, rows, BM: tl.constexpr, TOP_K: tl.constexpr, GATHER_X: tl.constexpr, SCATTER_OUT: tl.constexpr,
    DIRECT: tl.constexpr,
):  # fmt: skip
    """(which of BM rows exist, their routes, rows of x, rows of out); the last two as int64."""
    offs = start + tl.arange(0, BM)
    mask = tl.arange(0, BM) < rows
    slots = offs
    if not DIRECT:
        slots = tl.load(slots_ptr + offs, mask=mask, other=0)
    x_rows = slots // TOP_K if GATHER_X else offs
    out_rows = slots if SCATTER_OUT else offs
    return mask, slots, x_rows.to(tl.int64), out_rows.to(tl.int64)


@triton.jit
def scale_row(n, ROWS: tl.constexpr):
    """Scale row of weight rows n of a segment (ROWS weight rows share one; 0 = all)."""
    if ROWS == 1:
        row = n
    elif ROWS == 0:
        row = n * 0
    else:
        row = n // ROWS
    return row


@triton.jit
def finish(
    acc, row_scale_ptr, global_ptr, bias_ptr, router, n, n_scale, NS: tl.constexpr, N: tl.constexpr, SEG: tl.constexpr,
    LEFT: tl.constexpr, ROW_SCALE: tl.constexpr, GLOBAL: tl.constexpr, BIAS: tl.constexpr, ROUTER: tl.constexpr,
):  # fmt: skip
    """Accumulator [BN, BM] of segment SEG -> products: leftover power, scales, router weight on the input, bias."""
    if ROW_SCALE:
        acc = acc * (tl.load(row_scale_ptr + (SEG * NS + n_scale)) * LEFT)[:, None]
    elif LEFT != 1.0:
        acc = acc * LEFT
    if GLOBAL:
        acc = acc * tl.load(global_ptr + SEG)
    if ROUTER:
        acc = acc * router[None, :]
    if BIAS:
        acc = acc + tl.load(bias_ptr + (SEG * N + n))[:, None]
    return acc


@triton.jit
def finish_segments(
    acc, acc_u, row_scale_ptr, global_ptr, bias_ptr, router, n, n_scale, alpha, beta, limit,
    NS: tl.constexpr, N: tl.constexpr, SEGMENTS: tl.constexpr, LEFT: tl.constexpr, ROW_SCALE: tl.constexpr,
    GLOBAL: tl.constexpr, BIAS: tl.constexpr, ROUTER: tl.constexpr, ACTIVATION: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """The epilogue: both segments' products, then the activation (ACTIVATION < 0: none)."""
    acc = finish(
        acc, row_scale_ptr, global_ptr, bias_ptr, router, n, n_scale, NS, N, 0, LEFT, ROW_SCALE, GLOBAL, BIAS, ROUTER
    )
    if SEGMENTS == 2:
        acc_u = finish(
            acc_u, row_scale_ptr, global_ptr, bias_ptr, router, n, n_scale, NS, N, 1, LEFT, ROW_SCALE, GLOBAL, BIAS,
            ROUTER,
        )  # fmt: skip
    if ACTIVATION >= 0:
        acc = activate(acc, acc_u, ACTIVATION, LIMITED, alpha, beta, limit)
    return acc


@triton.jit
def write_rows(out_ptr, out_rows, out_stride, offs_n, acc, mask, N: tl.constexpr, SOFT: tl.constexpr):
    """acc [BN, BM] to columns offs_n < N of the rows that exist."""
    ptrs = out_ptr + out_rows[None, :] * out_stride + offs_n[:, None]
    tl.store(ptrs, to_bf16(acc, SOFT), mask=mask[None, :] & (offs_n < N)[:, None])


@triton.jit(do_not_specialize=["n_blocks", "n_experts"])
def expert_gemm(
    x_ptr, w_ptr, s_ptr, z_ptr, row_scale_ptr, global_ptr, bias_ptr, columns_ptr,
    router_ptr, slots_ptr, blocks_ptr, ids_ptr, out_ptr,
    n_blocks, n_experts, x_stride, out_stride, alpha, beta, limit,
    N: tl.constexpr, K: tl.constexpr, NP: tl.constexpr, SEGMENTS: tl.constexpr, TOP_K: tl.constexpr,
    GATHER_X: tl.constexpr, SCATTER_OUT: tl.constexpr, DIRECT: tl.constexpr,
    ELEM: tl.constexpr, P: tl.constexpr, SW: tl.constexpr, G: tl.constexpr, SPW: tl.constexpr, SBITS: tl.constexpr,
    SKIND: tl.constexpr, ZSPW: tl.constexpr, ROWS: tl.constexpr, ZEROS: tl.constexpr, WEIGHTED: tl.constexpr,
    PTX: tl.constexpr, ODD: tl.constexpr, LEFT: tl.constexpr,
    ROW_SCALE: tl.constexpr, GLOBAL: tl.constexpr, BIAS: tl.constexpr, COLUMNS: tl.constexpr, ROUTER: tl.constexpr,
    ACTIVATION: tl.constexpr, LIMITED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, KPB: tl.constexpr, GROUP_M: tl.constexpr, PDL: tl.constexpr,
    SOFT: tl.constexpr,
):  # fmt: skip
    """See the module's text.  Pointers that a constexpr switches off are never read.

    x          [*, K] bf16, row stride x_stride; GATHER_X: row = route // TOP_K, else the block's rows in order
    w          [E, ...] see float_loop and packed_loop;  s, z [E, SEGMENTS, words, NS] int32, NS = scale rows a segment
    row_scale  [E, SEGMENTS, NS] f32;  global [E, SEGMENTS] f32;  bias [E, SEGMENTS * N] f32;  columns [E, K] int32
    router     [routes] f32, multiplies the input (ROUTER)
    slots      [routes] int32 routes in order of expert;  blocks [n_blocks, 4] int32 (expert, first, rows, -)
    ids        [routes] int32 expert of each route (DIRECT: one block a route, no table)
    out        [*, N], row stride out_stride; SCATTER_OUT: row = route, else the block's rows in order
    ACTIVATION < 0: none
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    b, tile = tile_of(tl.program_id(0), n_blocks, (N + BN - 1) // BN, GROUP_M)
    e, start, rows = find_block(blocks_ptr, ids_ptr, b, n_experts, DIRECT)
    if e < 0:
        return
    e = e.to(tl.int64)
    mask, slots, x_rows, out_rows = rows_of_block(slots_ptr, start, rows, BM, TOP_K, GATHER_X, SCATTER_OUT, DIRECT)
    x_rows_ptr = x_ptr + x_rows * x_stride
    columns_ptr += e * K
    offs_n = tile * BN + tl.arange(0, BN)
    n = tl.minimum(offs_n, N - 1)
    n_scale = scale_row(n, ROWS)
    NS: tl.constexpr = N if ROWS == 1 else (1 if ROWS == 0 else (N + ROWS - 1) // ROWS)
    acc = tl.zeros([BN, BM], tl.float32)
    acc_u = acc
    if ELEM == FLOAT:
        acc, acc_u = float_loop(
            acc, acc_u, x_rows_ptr, columns_ptr, w_ptr + e * (SEGMENTS * N * K), n, mask,
            N, K, SEGMENTS, COLUMNS, BC, SOFT,
        )  # fmt: skip
    else:
        NKB: tl.constexpr = (K + P * SW - 1) // (P * SW)
        W_SEG: tl.constexpr = NP * NKB * SW
        S_SEG: tl.constexpr = (1 if G == 0 else (NKB * P * SW + G * SPW - 1) // (G * SPW)) * NS
        Z_SEG: tl.constexpr = (1 if G == 0 else (NKB * P * SW + G * ZSPW - 1) // (G * ZSPW)) * NS
        acc, acc_u = packed_loop(
            acc, acc_u, x_rows_ptr, columns_ptr, w_ptr + e * (SEGMENTS * W_SEG),
            s_ptr + e * (SEGMENTS * S_SEG), z_ptr + e * (SEGMENTS * Z_SEG), n, n_scale, mask,
            K, SEGMENTS, W_SEG, S_SEG, Z_SEG,
            ELEM, P, SW, BC, KPB, G, SPW, SBITS, SKIND, ZSPW, NS, ZEROS, WEIGHTED, PTX, ODD, COLUMNS, SOFT,
        )  # fmt: skip
    router = mask.to(tl.float32)
    if ROUTER:
        router = tl.load(router_ptr + slots, mask=mask, other=0.0)
    acc = finish_segments(
        acc, acc_u, row_scale_ptr + e * (SEGMENTS * NS), global_ptr + e * SEGMENTS, bias_ptr + e * (SEGMENTS * N),
        router, n, n_scale, alpha, beta, limit,
        NS, N, SEGMENTS, LEFT, ROW_SCALE, GLOBAL, BIAS, ROUTER, ACTIVATION, LIMITED,
    )  # fmt: skip
    write_rows(out_ptr, out_rows, out_stride, offs_n, acc, mask, N, SOFT)
