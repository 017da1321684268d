# mypy: ignore-errors
# (Triton device code: its types are checked by Triton's compiler, not by mypy.)
# ruff: noqa: SIM108
# (Conditions on constexpr choose code while compiling: statements, and no `in`.)
"""The loops over K: gather x, unpack weights, multiply.  One function a kind of weights, called from gemm.expert_gemm.

Scales: constant along K -> in the epilogue; else on the accumulator of each group (exact, but one multiplication for
each accumulator and group), or WEIGHTED, on the operand (one rounding more; see unpack.FOLD_BF16 and FOLD_F32).
"""

from __future__ import annotations

import triton
import triton.language as tl

from expertd_kernels.backends.portable.unpack import (
    decode_scale,
    dot,
    plain_operand,
    ptx_operand,
    raw_codes,
    to_bf16,
)


@triton.jit
def load_x(
    x_rows_ptr, columns_ptr, k, m_mask, K: tl.constexpr, BC: tl.constexpr, EVEN: tl.constexpr, COLUMNS: tl.constexpr
):
    """[BM, BC] of the gathered rows, code columns k .. k + BC; zero outside."""
    offs = k + tl.arange(0, BC)
    mask = m_mask[:, None]
    if not EVEN:
        mask = mask & (offs < K)[None, :]
    if COLUMNS:
        offs = tl.load(columns_ptr + offs, mask=offs < K, other=0)
    return tl.load(x_rows_ptr[:, None] + offs[None, :], mask=mask, other=0.0)


@triton.jit
def float_loop(
    acc,
    acc_u,
    x_rows_ptr,
    columns_ptr,
    w_ptr,
    n,
    m_mask,
    N: tl.constexpr,
    K: tl.constexpr,
    SEGMENTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BC: tl.constexpr,
    SOFT: tl.constexpr,
):
    """Weights of a float type, row-major [SEGMENTS * N, K]."""
    EVEN: tl.constexpr = K % BC == 0
    offs_c = tl.arange(0, BC)
    w_ptrs = w_ptr + n.to(tl.int64)[:, None] * K + offs_c[None, :]
    for k in range(0, K, BC):
        xt = tl.trans(load_x(x_rows_ptr, columns_ptr, k, m_mask, K, BC, EVEN, COLUMNS))
        if EVEN:
            w = tl.load(w_ptrs + k)
        else:
            w = tl.load(w_ptrs + k, mask=(k + offs_c < K)[None, :], other=0.0)
        if w.dtype != tl.bfloat16:
            w = to_bf16(w.to(tl.float32), SOFT)
        acc = dot(w, xt, acc, SOFT)
        if SEGMENTS == 2:
            if EVEN:
                u = tl.load(w_ptrs + (N * K + k))
            else:
                u = tl.load(w_ptrs + (N * K + k), mask=(k + offs_c < K)[None, :], other=0.0)
            if u.dtype != tl.bfloat16:
                u = to_bf16(u.to(tl.float32), SOFT)
            acc_u = dot(u, xt, acc_u, SOFT)
    return acc, acc_u


@triton.jit
def group_word(
    ptrs, n_scale, kb, j: tl.constexpr, KB: tl.constexpr, SW: tl.constexpr, G: tl.constexpr, SPW: tl.constexpr,
    NS: tl.constexpr,
):  # fmt: skip
    """[BN] int32: the words that hold the field of slice j of K block kb."""
    if G == 0:
        at = 0
    elif KB % G == 0:
        at = kb * (KB // G // SPW) + (j * SW // G) // SPW
    else:
        at = (kb * KB + j * SW) // G
    return tl.load(ptrs + (at * NS + n_scale))


@triton.jit
def odd_word(ptrs, n_scale, k, K: tl.constexpr, G: tl.constexpr, NS: tl.constexpr, BC: tl.constexpr):
    """[BN, BC] int32: one word for each weight, for groups that no slice width divides."""
    group = tl.minimum(k + tl.arange(0, BC), K - 1) // G
    return tl.load(ptrs + (group * NS)[None, :] + n_scale[:, None])


@triton.jit
def slice_of(
    w, raws, s_ptrs, z_ptrs, row_zero, n_scale, kb, k, j: tl.constexpr,
    K: tl.constexpr, ELEM: tl.constexpr, P: tl.constexpr, SW: tl.constexpr, BC: tl.constexpr,
    G: tl.constexpr, SPW: tl.constexpr, SBITS: tl.constexpr, SKIND: tl.constexpr, ZSPW: tl.constexpr,
    NS: tl.constexpr, ZEROS: tl.constexpr, WEIGHTED: tl.constexpr, PTX: tl.constexpr, ODD: tl.constexpr,
    SOFT: tl.constexpr,
):  # fmt: skip
    """Slice j of a tile of one segment: the operand [BN, BC] bf16 and its scale [BN] f32 (1.0 where K has none)."""
    zero = row_zero
    SUB: tl.constexpr = 0 if G == 0 or ODD else (j * SW // G) % SPW
    ZSUB: tl.constexpr = 0 if G == 0 or ODD else (j * SW // G) % ZSPW
    if ODD:
        s = decode_scale(odd_word(s_ptrs, n_scale, k, K, G, NS, BC), 0, SBITS, SKIND)
        if ZEROS:
            zero = decode_scale(odd_word(z_ptrs, n_scale, k, K, G, NS, BC), 0, 16, 0)
        v = plain_operand(w, j, s, zero, ELEM, True, ZEROS, SOFT)
    else:
        word = n_scale
        s = row_zero
        if G != 0:
            word = group_word(s_ptrs, n_scale, kb, j, P * SW, SW, G, SPW, NS)
            s = decode_scale(word, SUB, SBITS, SKIND)
            if ZEROS:
                zero = decode_scale(group_word(z_ptrs, n_scale, kb, j, P * SW, SW, G, ZSPW, NS), ZSUB, 16, 0)
        if PTX:
            v = ptx_operand(raws[j], j, word, s, zero, SUB, ELEM, SKIND, WEIGHTED, ZEROS)
        else:
            v = plain_operand(w, j, s[:, None], zero[:, None], ELEM, WEIGHTED, ZEROS, SOFT)
    return v, s


@triton.jit
def k_block(
    acc, acc_u, x_rows_ptr, columns_ptr, w_ptrs, s_ptr, z_ptr, zero, zero_u, n_scale, m_mask, kb, kb_w, sub,
    K: tl.constexpr, SEGMENTS: tl.constexpr, W_SEG: tl.constexpr, S_SEG: tl.constexpr, Z_SEG: tl.constexpr,
    ELEM: tl.constexpr, P: tl.constexpr, SW: tl.constexpr, BC: tl.constexpr,
    G: tl.constexpr, SPW: tl.constexpr, SBITS: tl.constexpr, SKIND: tl.constexpr, ZSPW: tl.constexpr,
    NS: tl.constexpr, ZEROS: tl.constexpr, WEIGHTED: tl.constexpr, PTX: tl.constexpr, ODD: tl.constexpr,
    COLUMNS: tl.constexpr, SOFT: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Containers sub .. sub + BC of K block kb (kb_w: the same, inside the weights): P slices of each segment."""
    KB: tl.constexpr = P * SW
    ON_ACC: tl.constexpr = G != 0 and not (WEIGHTED or ODD)
    # groups that lie across K blocks: any slice may be the first or the last of one
    ACROSS: tl.constexpr = G != 0 and KB % G != 0 and G % KB != 0
    w = tl.load(w_ptrs + (kb_w * (16 * SW) + sub))
    raws = raw_codes(w, ELEM) if PTX else (w,)
    if SEGMENTS == 2:
        u = tl.load(w_ptrs + (W_SEG + kb_w * (16 * SW) + sub))
        raws_u = raw_codes(u, ELEM) if PTX else (u,)
    for j in tl.static_range(P):
        k = kb * KB + j * SW + sub
        xt = tl.trans(load_x(x_rows_ptr, columns_ptr, k, m_mask, K, BC, EVEN, COLUMNS))
        v, s = slice_of(
            w, raws, s_ptr, z_ptr, zero, n_scale, kb_w, k, j,
            K, ELEM, P, SW, BC, G, SPW, SBITS, SKIND, ZSPW, NS, ZEROS, WEIGHTED, PTX, ODD, SOFT,
        )  # fmt: skip
        if SEGMENTS == 2:
            v_u, s_u = slice_of(
                u, raws_u, s_ptr + S_SEG, z_ptr + Z_SEG, zero_u, n_scale, kb_w, k, j,
                K, ELEM, P, SW, BC, G, SPW, SBITS, SKIND, ZSPW, NS, ZEROS, WEIGHTED, PTX, ODD, SOFT,
            )  # fmt: skip
        if not ON_ACC:
            acc = dot(v, xt, acc, SOFT)
            if SEGMENTS == 2:
                acc_u = dot(v_u, xt, acc_u, SOFT)
        else:
            if j == 0 or ACROSS or j * SW % G == 0:
                part = dot(v, xt, None, SOFT)
                if SEGMENTS == 2:
                    part_u = dot(v_u, xt, None, SOFT)
            else:
                part = dot(v, xt, part, SOFT)
                if SEGMENTS == 2:
                    part_u = dot(v_u, xt, part_u, SOFT)
            if j + 1 == P or ACROSS or (j + 1) * SW % G == 0:
                acc += part * s[:, None]
                if SEGMENTS == 2:
                    acc_u += part_u * s_u[:, None]
    return acc, acc_u


@triton.jit
def packed_loop(
    acc, acc_u, x_rows_ptr, columns_ptr, w_ptr, s_ptr, z_ptr, n, n_scale, m_mask,
    K: tl.constexpr, SEGMENTS: tl.constexpr, W_SEG: tl.constexpr, S_SEG: tl.constexpr, Z_SEG: tl.constexpr,
    ELEM: tl.constexpr, P: tl.constexpr, SW: tl.constexpr, BC: tl.constexpr, KPB: tl.constexpr,
    G: tl.constexpr, SPW: tl.constexpr, SBITS: tl.constexpr, SKIND: tl.constexpr, ZSPW: tl.constexpr,
    NS: tl.constexpr, ZEROS: tl.constexpr, WEIGHTED: tl.constexpr, PTX: tl.constexpr, ODD: tl.constexpr,
    COLUMNS: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """Packed codes in tiles of 16 rows and one K block, [N / 16, K / KB, 16, SW] int16 for each segment.  A step takes
    BC containers of one K block, or KPB whole K blocks."""
    KB: tl.constexpr = P * SW
    NKB: tl.constexpr = (K + KB - 1) // KB
    SUBS: tl.constexpr = SW // BC
    EVEN: tl.constexpr = K % KB == 0 and NKB % KPB == 0
    w_ptrs = w_ptr + (n // 16 * (NKB * 16 * SW) + n % 16 * SW)[:, None] + tl.arange(0, BC)[None, :]
    zero = tl.zeros([n.shape[0]], tl.float32)
    zero_u = zero
    if ZEROS and G == 0:
        zero = decode_scale(tl.load(z_ptr + n_scale), 0, 16, 0)
        zero_u = decode_scale(tl.load(z_ptr + Z_SEG + n_scale), 0, 16, 0)
    for step in range((NKB + KPB - 1) // KPB * SUBS):
        for i in tl.static_range(KPB):
            kb = step // SUBS * KPB + i
            kb_w = kb
            if NKB % KPB != 0:
                kb_w = tl.minimum(kb, NKB - 1)
            acc, acc_u = k_block(
                acc, acc_u, x_rows_ptr, columns_ptr, w_ptrs, s_ptr, z_ptr, zero, zero_u, n_scale, m_mask,
                kb, kb_w, step % SUBS * BC, K, SEGMENTS, W_SEG, S_SEG, Z_SEG,
                ELEM, P, SW, BC, G, SPW, SBITS, SKIND, ZSPW, NS, ZEROS, WEIGHTED, PTX, ODD, COLUMNS, SOFT, EVEN,
            )  # fmt: skip
    return acc, acc_u
