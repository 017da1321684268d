# mypy: ignore-errors
# (Triton device code: its types are checked by Triton's compiler, not by mypy.)
"""Activations rounded to e4m3 or int8, and the GEMM of weights with them.

The packed bytes are those of the weight-only GEMM; only int8 codes keep their sign here.  There are two loops:

    whole    8-bit codes of the activations' type.  Rows are rounded into the weights' column order (layout.py: two
             columns SW apart share a container), so that a K block is one operand as it lies in memory
    sliced   4-bit codes, which e4m3 and int8 hold exactly, and groups of 32: each slice of a K block is turned into an
             operand.  Zero points of int4 are taken from the codes there (at most 15 on either side, exact too), where
             otherwise 8 is: nothing has to be corrected afterwards by sums of activations

Scales of a row: absolute maximum / 448 (int8: / 127), one a row or for each 128 columns; for each 32 columns the
smallest power of two under which nothing exceeds 448 (mxfp8); or a static one for all rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from expertd_kernels.backends.portable.gemm import (
    find_block,
    finish_segments,
    rows_of_block,
    scale_row,
    tile_of,
    write_rows,
)
from expertd_kernels.backends.portable.loops import group_word
from expertd_kernels.backends.portable.unpack import E2M1, E4M3, INT4, decode_scale, exact_codes

__all__ = ["expert_gemm_rounded", "round_rows"]

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
    PLAIN: tl.constexpr, G: tl.constexpr, STATIC: tl.constexpr, INT8: tl.constexpr, BK: tl.constexpr,
    SOFT: tl.constexpr,
):  # fmt: skip
    """x [rows, K] -> q [rows, KP] e4m3 or int8, in container order or as it is (PLAIN), scale [rows, KP / G] or [rows]
    f32.

    Program (row, BK columns); G: columns a scale, 128 or 32 (powers of two), of which BK is a multiple, or 0: a whole
    row, BK >= KP.  A row of zeros gets scale 1.  STATIC: every row's scale is static[0], and what lies beyond the
    type's largest number becomes that.
    """
    LARGEST: tl.constexpr = LARGEST_INT8 if INT8 else LARGEST_E4M3
    row = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * BK + tl.arange(0, BK)
    k = p if PLAIN else p // (2 * SW) * (2 * SW) + p % 2 * SW + p % (2 * SW) // 2
    x = tl.load(x_ptr + row * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
    if G > 0:
        NG: tl.constexpr = BK // G
        x = tl.reshape(x, [NG, G])
        top = tl.max(tl.abs(x), 1)
        scale = tl.where(top > 0.0, top / LARGEST, 1.0)
        if G == 32:  # to the next power of two: the exponent, one more where there is a mantissa
            scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        g = tl.program_id(1) * NG + tl.arange(0, NG)
        GROUPS: tl.constexpr = (KP + G - 1) // G
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
def operand(w, zero, j: tl.constexpr, ELEM: tl.constexpr, ZEROS: tl.constexpr, EIGHT: tl.constexpr, SOFT: tl.constexpr):
    """Slice j of [BN, SW] int16 containers as e4m3 (EIGHT: as int8), exactly.  zero [BN, 1] f32, read where ZEROS."""
    if ELEM == E4M3:
        v = ((w >> (8 * j)) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    elif ELEM == E2M1:
        q = exact_codes(w, j, E2M1).to(tl.int32, bitcast=True)  # f32: sign, exponent, one bit of mantissa
        low = (q >> 20) & 0x7FF  # exponent and three bits: e4m3's of 0.5 and more, plus 120 << 3
        v = (((q >> 24) & 128) | tl.where(low == 0, 0, low - 960)).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    elif EIGHT:
        q = ((w >> (4 * j)) & 15).to(tl.int16)
        v = (q - (zero.to(tl.int16) if ZEROS else 8)).to(tl.int8)
    elif SOFT:
        v = to_e4m3(exact_codes(w, j, INT4) - (zero if ZEROS else 8.0), SOFT)
    else:  # the f16 of bits 0x6400 + q is 1024 + q
        q = (((w >> (4 * j)) & 15) | 0x6400).to(tl.int16)
        v = (q.to(tl.float16, bitcast=True) - ((zero + 1024.0).to(tl.float16) if ZEROS else 1032.0)).to(tl.float8e4nv)
    return v


@triton.jit
def slice_zero(
    z_ptr, row_zero, n_scale, kb, j: tl.constexpr, KB: tl.constexpr, SW: tl.constexpr, G: tl.constexpr,
    ZSPW: tl.constexpr, NS: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """[BN, 1] f32: the zero points of slice j of K block kb; row_zero [BN] where they are constant along K."""
    zero = row_zero
    if ZEROS and G > 0:
        ZSUB: tl.constexpr = (j * SW // G) % ZSPW
        zero = decode_scale(group_word(z_ptr, n_scale, kb, j, KB, SW, G, ZSPW, NS), ZSUB, 16, 0)
    return zero[:, None]


@triton.jit
def slice_scale(
    s_ptr, n_scale, kb, j: tl.constexpr, KB: tl.constexpr, SW: tl.constexpr, G: tl.constexpr, SPW: tl.constexpr,
    NS: tl.constexpr, SBITS: tl.constexpr, SKIND: tl.constexpr,
):  # fmt: skip
    """[BN, 1] f32: the scales of slice j of K block kb."""
    SUB: tl.constexpr = (j * SW // G) % SPW
    return decode_scale(group_word(s_ptr, n_scale, kb, j, KB, SW, G, SPW, NS), SUB, SBITS, SKIND)[:, None]


@triton.jit
def sliced_loop(
    acc, acc_u, x_rows_ptr, xs_rows_ptr, w_ptr, s_ptr, z_ptr, n, n_scale, m_mask,
    K: tl.constexpr, SEGMENTS: tl.constexpr, W_SEG: tl.constexpr, S_SEG: tl.constexpr, Z_SEG: tl.constexpr,
    SW: tl.constexpr, NS: tl.constexpr, SBITS: tl.constexpr, SKIND: tl.constexpr,
    ELEM: tl.constexpr, P: tl.constexpr, G: tl.constexpr, SPW: tl.constexpr, ZSPW: tl.constexpr,
    ZEROS: tl.constexpr, GX: tl.constexpr, EIGHT: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """One slice of SW columns a product, in a fresh accumulator.  G, GX: columns a scale of w and of x, 0 = all.
    EIGHT: x and the operands are int8, products int32, exact; so is acc, where the scales of w are constant along K."""
    KB: tl.constexpr = P * SW
    NKB: tl.constexpr = (K + KB - 1) // KB
    PRODUCT: tl.constexpr = tl.int32 if EIGHT else tl.float32
    zero = tl.zeros([n.shape[0]], tl.float32)
    zero_u = zero
    if ZEROS and G == 0:
        zero = decode_scale(tl.load(z_ptr + n_scale), 0, 16, 0)
        if SEGMENTS == 2:
            zero_u = decode_scale(tl.load(z_ptr + Z_SEG + n_scale), 0, 16, 0)
    offs = tl.arange(0, SW)
    x_ptrs = x_rows_ptr[:, None] + offs[None, :]
    w_ptrs = w_ptr + (n // 16 * (NKB * 16 * SW) + n % 16 * SW)[:, None] + offs[None, :]
    for kb in range(NKB):
        w = tl.load(w_ptrs + kb * (16 * SW))
        if SEGMENTS == 2:
            u = tl.load(w_ptrs + (W_SEG + kb * (16 * SW)))
        for j in tl.static_range(P):
            k = kb * KB + j * SW
            xt = tl.trans(tl.load(x_ptrs + k, mask=m_mask[:, None], other=0.0))
            z = slice_zero(z_ptr, zero, n_scale, kb, j, KB, SW, G, ZSPW, NS, ZEROS)
            part = tl.dot(operand(w, z, j, ELEM, ZEROS, EIGHT, SOFT), xt, out_dtype=PRODUCT)
            if SEGMENTS == 2:
                z_u = slice_zero(z_ptr + Z_SEG, zero_u, n_scale, kb, j, KB, SW, G, ZSPW, NS, ZEROS)
                part_u = tl.dot(operand(u, z_u, j, ELEM, ZEROS, EIGHT, SOFT), xt, out_dtype=PRODUCT)
            if GX > 0:
                xs = tl.load(xs_rows_ptr + k // GX, mask=m_mask, other=0.0)[None, :]
                part *= xs
                if SEGMENTS == 2:
                    part_u *= xs
            if G > 0:
                part = part * slice_scale(s_ptr, n_scale, kb, j, KB, SW, G, SPW, NS, SBITS, SKIND)
                if SEGMENTS == 2:
                    part_u = part_u * slice_scale(s_ptr + S_SEG, n_scale, kb, j, KB, SW, G, SPW, NS, SBITS, SKIND)
            acc += part
            if SEGMENTS == 2:
                acc_u += part_u
    return acc, acc_u


@triton.jit
def whole_loop(
    acc, acc_u, x_rows_ptr, xs_rows_ptr, w_ptr, s_ptr, n, s_row, m_mask,
    K: tl.constexpr, SEGMENTS: tl.constexpr, W_SEG: tl.constexpr, S_SEG: tl.constexpr, SW: tl.constexpr,
    NS: tl.constexpr, GX: tl.constexpr, SBITS: tl.constexpr, SKIND: tl.constexpr,
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
        if GX > 0:
            g = kb * KB // GX
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
    x_ptr, x_scale_ptr, w_ptr, s_ptr, z_ptr, row_scale_ptr, global_ptr, bias_ptr,
    router_ptr, slots_ptr, blocks_ptr, ids_ptr, out_ptr,
    n_blocks, n_experts, out_stride, alpha, beta, limit,
    N: tl.constexpr, K: tl.constexpr, NP: tl.constexpr, SEGMENTS: tl.constexpr, TOP_K: tl.constexpr,
    GATHER_X: tl.constexpr, SCATTER_OUT: tl.constexpr, DIRECT: tl.constexpr,
    ELEM: tl.constexpr, P: tl.constexpr, SW: tl.constexpr, ROWS: tl.constexpr, G: tl.constexpr, SPW: tl.constexpr,
    ZSPW: tl.constexpr, ZEROS: tl.constexpr,
    SBITS: tl.constexpr, SKIND: tl.constexpr, GX: tl.constexpr, SLICED: tl.constexpr, INT8: tl.constexpr,
    ROW_SCALE: tl.constexpr, GLOBAL: tl.constexpr, BIAS: tl.constexpr,
    ROUTER: tl.constexpr, ACTIVATION: tl.constexpr, LIMITED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, GROUP_M: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """As gemm.expert_gemm; x [*, KP] and x_scale from round_rows (GX columns a scale); w the packed containers, seen as
    numbers of x's type where SLICED is not.  s [E, SEGMENTS, words, NS] int32, or row_scale [E, SEGMENTS, NS] f32; z
    [E, SEGMENTS, words, NS] int32, read where ZEROS (SLICED alone)."""
    b, tile = tile_of(tl.program_id(0), n_blocks, (N + BN - 1) // BN, GROUP_M)
    e, start, rows = find_block(blocks_ptr, ids_ptr, b, n_experts, DIRECT)
    if e < 0:
        return
    e = e.to(tl.int64)
    KB: tl.constexpr = P * SW
    KP: tl.constexpr = (K + KB - 1) // KB * KB
    NS: tl.constexpr = N if ROWS == 1 else (1 if ROWS == 0 else (N + ROWS - 1) // ROWS)
    X_GROUPS: tl.constexpr = (KP + GX - 1) // GX if GX > 0 else 1
    W_SEG: tl.constexpr = NP * KP // P if SLICED else NP * KP
    S_SEG: tl.constexpr = (1 if G == 0 else (KP + G * SPW - 1) // (G * SPW)) * NS
    Z_SEG: tl.constexpr = (1 if G == 0 else (KP + G * ZSPW - 1) // (G * ZSPW)) * NS
    mask, slots, x_rows, out_rows = rows_of_block(slots_ptr, start, rows, BM, TOP_K, GATHER_X, SCATTER_OUT, DIRECT)
    offs_n = tile * BN + tl.arange(0, BN)
    n = tl.minimum(offs_n, N - 1)
    n_scale = scale_row(n, ROWS)
    acc = tl.zeros([BN, BM], tl.int32 if INT8 and (G == 0 or not SLICED) else tl.float32)
    x_ptr += x_rows * KP
    xs_ptr = x_scale_ptr + x_rows * X_GROUPS
    w_ptr += e * (SEGMENTS * W_SEG)
    s_ptr += e * (SEGMENTS * S_SEG)
    if SLICED:
        acc, acc_u = sliced_loop(
            acc, acc, x_ptr, xs_ptr, w_ptr, s_ptr, z_ptr + e * (SEGMENTS * Z_SEG), n, n_scale, mask,
            K, SEGMENTS, W_SEG, S_SEG, Z_SEG, SW, NS, SBITS, SKIND, ELEM, P, G, SPW, ZSPW, ZEROS, GX, INT8, SOFT,
        )  # fmt: skip
    else:
        s_row = n_scale[:, None]
        if GX > 0 and ROWS % BN == 0:
            s_row = tile * BN // ROWS  # one scale for the whole tile
        acc, acc_u = whole_loop(
            acc, acc, x_ptr, xs_ptr, w_ptr, s_ptr, n, s_row, mask,
            K, SEGMENTS, W_SEG, S_SEG, SW, NS, GX, SBITS, SKIND,
        )  # fmt: skip
    acc, acc_u = acc.to(tl.float32), acc_u.to(tl.float32)
    # what multiplies a row of x: the router weight on the input, the scale of a whole row
    factor = mask.to(tl.float32)
    if ROUTER:
        factor = tl.load(router_ptr + slots, mask=mask, other=0.0)
    if GX == 0:
        factor = factor * tl.load(xs_ptr, mask=mask, other=0.0)
    acc = finish_segments(
        acc, acc_u, row_scale_ptr + e * (SEGMENTS * NS), global_ptr + e * SEGMENTS, bias_ptr + e * (SEGMENTS * N),
        factor, n, n_scale, alpha, beta, limit,
        NS, N, SEGMENTS, 1.0, ROW_SCALE, GLOBAL, BIAS, ROUTER or GX == 0, ACTIVATION, LIMITED,
    )  # fmt: skip
    write_rows(out_ptr, out_rows, out_stride, offs_n, acc, mask, N, SOFT)
