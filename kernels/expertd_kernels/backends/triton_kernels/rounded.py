# mypy: ignore-errors
# (Triton device code: its types are checked by Triton's compiler, not by mypy.)
"""Activations rounded to e4m3 or int8, and the GEMM of weights of that type with them.

Rows are rounded into the weights' column order (layout.py: two columns SW apart share a container), so the same packed
bytes serve this GEMM and the weight-only one; only int8 codes are stored with their sign here.  Scales: absolute
maximum / 448 (int8: / 127), one a row, or one for each 128 columns; or a static one for all rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from expertd_kernels.backends.triton_kernels.gemm import (
    find_block,
    finish_segments,
    rows_of_block,
    scale_row,
    tile_of,
    write_rows,
)
from expertd_kernels.backends.triton_kernels.unpack import decode_scale

__all__ = ["GROUP", "expert_gemm_rounded", "round_rows"]

GROUP = 128
LARGEST_E4M3 = tl.constexpr(448.0)
LARGEST_INT8 = tl.constexpr(127.0)
HALF_EVEN = tl.constexpr(12582912.0)
"""1.5 * 2**23: added to an f32 below 2**22 and taken away again, it rounds to the nearest integer, ties to even."""


@triton.jit
def to_e4m3(v, SOFT: tl.constexpr):
    """f32 in -448 .. 448 -> e4m3, to nearest even.  SOFT: rounded before, since Triton's interpreter loses carries."""
    if SOFT:
        bits = v.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        v = tl.where(tl.abs(v) < 2.0**-6, tl.floor(v * 512.0 + 0.5) / 512.0, normal)
    return v.to(tl.float8e4nv)


@triton.jit
def round_rows(
    x_ptr, q_ptr, scale_ptr, static_ptr, x_stride, K: tl.constexpr, KP: tl.constexpr, SW: tl.constexpr,
    GROUPED: tl.constexpr, STATIC: tl.constexpr, INT8: tl.constexpr, BK: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """x [rows, K] -> q [rows, KP] e4m3 or int8 in container order, scale [rows, KP / 128] or [rows] f32.

    Program (row, BK columns); GROUPED: BK is a multiple of 128, else BK >= KP.  A row of zeros gets scale 1.
    STATIC: every row's scale is static[0], and what lies beyond the type's largest number becomes that.
    """
    LARGEST: tl.constexpr = LARGEST_INT8 if INT8 else LARGEST_E4M3
    row = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * BK + tl.arange(0, BK)
    k = p // (2 * SW) * (2 * SW) + p % 2 * SW + p % (2 * SW) // 2
    x = tl.load(x_ptr + row * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
    if GROUPED:
        NG: tl.constexpr = BK // 128
        x = tl.reshape(x, [NG, 128])
        top = tl.max(tl.abs(x), 1)
        scale = tl.where(top > 0.0, top / LARGEST, 1.0)
        g = tl.program_id(1) * NG + tl.arange(0, NG)
        GROUPS: tl.constexpr = (KP + 127) // 128
        tl.store(scale_ptr + row * GROUPS + g, scale, mask=g < GROUPS)
        q = tl.reshape(x / scale[:, None], [BK])
    else:
        if STATIC:
            scale = tl.load(static_ptr)
        else:
            top = tl.max(tl.abs(x), 0)
            scale = tl.where(top > 0.0, top / LARGEST, 1.0)
        tl.store(scale_ptr + row, scale)
        q = x / scale
    q = tl.minimum(tl.maximum(q, -LARGEST), LARGEST)
    q = (q + HALF_EVEN - HALF_EVEN).to(tl.int8) if INT8 else to_e4m3(q, SOFT)
    tl.store(q_ptr + row * KP + p, q, mask=p < KP)


@triton.jit
def rounded_loop(
    acc, acc_u, x_rows_ptr, xs_rows_ptr, w_ptr, s_ptr, n, s_row, m_mask,
    K: tl.constexpr, SEGMENTS: tl.constexpr, W_SEG: tl.constexpr, S_SEG: tl.constexpr, SW: tl.constexpr,
    NS: tl.constexpr, GROUPED: tl.constexpr, SBITS: tl.constexpr, SKIND: tl.constexpr,
):  # fmt: skip
    """One K block a step.  Products of e4m3 go to a fresh accumulator each: the tensor core's own sums have few bits;
    those of int8 are exact in int32 (acc is int32 then).  s_row: scale row of each weight row [BN, 1], or of all."""
    KB: tl.constexpr = 2 * SW
    NKB: tl.constexpr = (K + KB - 1) // KB
    offs = tl.arange(0, KB)
    x_ptrs = x_rows_ptr[:, None] + offs[None, :]
    w_ptrs = w_ptr + (n // 16 * (NKB * 16 * KB) + n % 16 * KB)[:, None] + offs[None, :]
    for kb in range(NKB):
        xt = tl.trans(tl.load(x_ptrs + kb * KB, mask=m_mask[:, None], other=0.0))
        part = tl.dot(tl.load(w_ptrs + kb * (16 * KB)), xt, out_dtype=acc.dtype)
        if SEGMENTS == 2:
            part_u = tl.dot(tl.load(w_ptrs + (W_SEG + kb * (16 * KB))), xt, out_dtype=acc.dtype)
        if GROUPED:
            g = kb * KB // 128
            xs = tl.load(xs_rows_ptr + g, mask=m_mask, other=0.0)[None, :]
            acc += part * (decode_scale(tl.load(s_ptr + (g * NS + s_row)), 0, SBITS, SKIND) * xs)
            if SEGMENTS == 2:
                acc_u += part_u * (decode_scale(tl.load(s_ptr + (S_SEG + g * NS + s_row)), 0, SBITS, SKIND) * xs)
        else:
            acc += part
            if SEGMENTS == 2:
                acc_u += part_u
    return acc, acc_u


@triton.jit(do_not_specialize=["n_blocks", "n_experts"])
def expert_gemm_rounded(
    x_ptr, x_scale_ptr, w_ptr, s_ptr, row_scale_ptr, global_ptr, bias_ptr,
    router_ptr, slots_ptr, blocks_ptr, ids_ptr, out_ptr,
    n_blocks, n_experts, out_stride, alpha, beta, limit,
    N: tl.constexpr, K: tl.constexpr, NP: tl.constexpr, SEGMENTS: tl.constexpr, TOP_K: tl.constexpr,
    GATHER_X: tl.constexpr, SCATTER_OUT: tl.constexpr, DIRECT: tl.constexpr,
    SW: tl.constexpr, ROWS: tl.constexpr, SBITS: tl.constexpr, SKIND: tl.constexpr, GROUPED: tl.constexpr,
    INT8: tl.constexpr, GLOBAL: tl.constexpr, BIAS: tl.constexpr,
    ROUTER: tl.constexpr, ACTIVATION: tl.constexpr, LIMITED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, GROUP_M: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """As gemm.expert_gemm; x [*, KP] and x_scale from round_rows, w the packed containers seen as numbers of x's type.
    GROUPED: s [E, SEGMENTS, ceil(KP / 128), NS] int32 words; else row_scale [E, SEGMENTS, NS] f32."""
    b, tile = tile_of(tl.program_id(0), n_blocks, (N + BN - 1) // BN, GROUP_M)
    e, start, rows = find_block(blocks_ptr, ids_ptr, b, n_experts, DIRECT)
    if e < 0:
        return
    e = e.to(tl.int64)
    KB: tl.constexpr = 2 * SW
    KP: tl.constexpr = (K + KB - 1) // KB * KB
    NS: tl.constexpr = N if ROWS == 1 else (1 if ROWS == 0 else (N + ROWS - 1) // ROWS)
    X_GROUPS: tl.constexpr = (KP + 127) // 128 if GROUPED else 1
    S_SEG: tl.constexpr = ((KP + 127) // 128) * NS
    mask, slots, x_rows, out_rows = rows_of_block(slots_ptr, start, rows, BM, TOP_K, GATHER_X, SCATTER_OUT, DIRECT)
    offs_n = tile * BN + tl.arange(0, BN)
    n = tl.minimum(offs_n, N - 1)
    n_scale = scale_row(n, ROWS)
    s_row = n_scale[:, None]
    if GROUPED and ROWS % BN == 0:
        s_row = tile * BN // ROWS  # one scale for the whole tile
    acc = tl.zeros([BN, BM], tl.int32 if INT8 else tl.float32)
    acc, acc_u = rounded_loop(
        acc, acc, x_ptr + x_rows * KP, x_scale_ptr + x_rows * X_GROUPS, w_ptr + e * (SEGMENTS * NP * KP),
        s_ptr + e * (SEGMENTS * S_SEG), n, s_row, mask, K, SEGMENTS, NP * KP, S_SEG, SW, NS, GROUPED, SBITS, SKIND,
    )  # fmt: skip
    acc, acc_u = acc.to(tl.float32), acc_u.to(tl.float32)
    # what multiplies a row of x: the router weight on the input, the scale of a whole row
    factor = mask.to(tl.float32)
    if ROUTER:
        factor = tl.load(router_ptr + slots, mask=mask, other=0.0)
    if not GROUPED:
        factor = factor * tl.load(x_scale_ptr + x_rows, mask=mask, other=0.0)
    acc = finish_segments(
        acc, acc_u, row_scale_ptr + e * (SEGMENTS * NS), global_ptr + e * SEGMENTS, bias_ptr + e * (SEGMENTS * N),
        factor, n, n_scale, alpha, beta, limit,
        NS, N, SEGMENTS, 1.0, not GROUPED, GLOBAL, BIAS, ROUTER or not GROUPED, ACTIVATION, LIMITED,
    )  # fmt: skip
    write_rows(out_ptr, out_rows, out_stride, offs_n, acc, mask, N, SOFT)
