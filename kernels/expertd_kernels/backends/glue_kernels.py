# mypy: ignore-errors
# (Triton device code: its types are checked by Triton's compiler, not by mypy.)
"""What stands around the grouped GEMMs of other packages, in Triton: places of routes, gather, activation, combine.

Route r = token * k + j goes to row[r] of matrices whose rows are sorted by expert, each expert's first row at a
multiple of A; or, where a package finds its rows by itself, to row r.  Routes to -1 have no row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from expertd_kernels.backends.portable.gemm import activate
from expertd_kernels.backends.portable.rounded import LARGEST_E4M3, to_e4m3
from expertd_kernels.backends.portable.route import ranks, tally
from expertd_kernels.backends.portable.unpack import to_bf16

__all__ = ["activate_rows", "combine_rows", "gather_rows", "place_rows"]


@triton.jit
def rounded_groups(v, B: tl.constexpr, SOFT: tl.constexpr):
    """v [B] f32 -> e4m3 [B], scale [B / 128] f32: the absolute maximum of 128 columns / 448, 1 where all are zero."""
    v = tl.reshape(v, [B // 128, 128])
    top = tl.max(tl.abs(v), 1)
    scale = tl.where(top > 0.0, top / LARGEST_E4M3, 1.0)
    return to_e4m3(tl.reshape(v / scale[:, None], [B]), SOFT), scale


@triton.jit(do_not_specialize=["n_routes", "n_rows"])
def place_rows(
    ids_ptr, counts_ptr, totals_ptr, base_ptr, row_ptr, route_ptr, expert_ptr, block_ptr, start_ptr, n_routes, n_rows,
    E: tl.constexpr, EP: tl.constexpr, C: tl.constexpr, A: tl.constexpr, ALL: tl.constexpr, ROUTES: tl.constexpr,
    EXPERTS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """row [routes] int32, -1 for routes to nowhere; start [E + 1] int32: each expert's first row, last: the end of all.
    ROUTES: route [n_rows] int32, n_routes where a row is nobody's.  EXPERTS: expert [n_rows] int32, -1 there.  BLOCKS:
    block [n_rows / A] int32: the expert of each A rows before the end.  Program: C routes, and a share of the rest.
    ALL > 0: there are no counts and totals (route.count, route.scan), ALL is a power of two of at least n_routes."""
    program, n_programs = tl.program_id(0), tl.num_programs(0)
    experts = tl.arange(0, EP)
    r = program * C + tl.arange(0, C)
    ids = tl.load(ids_ptr + r, mask=r < n_routes, other=-1)
    total, before = tally(ids_ptr, counts_ptr, totals_ptr, program, n_routes, E, EP, C, ALL)
    blocks = (total + A - 1) // A
    start = (tl.cumsum(blocks, 0) - blocks) * A
    tl.store(base_ptr + program * EP + experts, start + before)
    if program == 0:
        tl.store(start_ptr + experts, start, mask=experts <= E)
    if BLOCKS:
        for i in range(program, tl.max(blocks, 0), n_programs):
            tl.store(block_ptr + start // A + i, experts, mask=i < blocks)
    if ROUTES or EXPERTS:
        for i in range(program, A, n_programs):
            nobody = total + i < blocks * A
            if ROUTES:
                tl.store(route_ptr + start + total + i, tl.zeros([EP], tl.int32) + n_routes, mask=nobody)
            if EXPERTS:
                tl.store(expert_ptr + start + total + i, tl.full([EP], -1, tl.int32), mask=nobody)
    if EXPERTS:
        for i in range(tl.sum(blocks, 0) * A + program * C, n_rows, n_programs * C):
            beyond = i + tl.arange(0, C)
            tl.store(expert_ptr + beyond, tl.full([C], -1, tl.int32), mask=beyond < n_rows)
    rank = ranks(ids_ptr, ids, r, n_routes)
    here = (ids >= 0) & (ids < E)
    tl.debug_barrier()  # base is read back by other lanes
    at = tl.load(base_ptr + program * EP + ids, mask=here, other=0) + rank
    tl.store(row_ptr + r, tl.where(here, at, -1), mask=r < n_routes)
    if ROUTES:
        tl.store(route_ptr + at, r, mask=here)
    if EXPERTS:
        tl.store(expert_ptr + at, ids, mask=here)


@triton.jit
def gather_rows(
    x_ptr, row_ptr, out_ptr, scale_ptr, x_stride, n_rows, H: tl.constexpr, TOP_K: tl.constexpr, ROUNDED: tl.constexpr,
    BH: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """x [M, H] bf16 -> out [n_rows, H]: each token's row copied to the rows of its routes; program (token, columns).
    ROUNDED: to e4m3, scale [H / 128, n_rows] f32 for each 128 columns; BH is a multiple of 128 then."""
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    inside = h < H
    x = tl.load(x_ptr + t * x_stride + h, mask=inside, other=0.0)
    if ROUNDED:
        G: tl.constexpr = BH // 128
        x, scale = rounded_groups(x.to(tl.float32), BH, SOFT)
        g = tl.program_id(1) * G + tl.arange(0, G)
    for j in tl.static_range(TOP_K):
        at = tl.load(row_ptr + t * TOP_K + j).to(tl.int64)
        here = at >= 0
        tl.store(out_ptr + at * H + h, x, mask=inside & here)
        if ROUNDED:
            tl.store(scale_ptr + g.to(tl.int64) * n_rows + at, scale, mask=(g * 128 < H) & here)


@triton.jit
def activate_rows(
    h_ptr, ids_ptr, row_ptr, bias_ptr, out_ptr, scale_ptr, n_rows, h_stride, alpha, beta, limit,
    N: tl.constexpr, SEGMENTS: tl.constexpr, E: tl.constexpr, KIND: tl.constexpr, LIMITED: tl.constexpr,
    MAPPED: tl.constexpr, BIASED: tl.constexpr, ROUNDED: tl.constexpr, BN: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """h [rows, SEGMENTS * N] bf16, rows h_stride apart, gate then up -> out [rows, N] bf16.  Program (route, columns).
    MAPPED: of row[route], else of row `route`.  BIASED: bias [E, SEGMENTS * N] f32 first.  ROUNDED: see gather_rows."""
    route = tl.program_id(0).to(tl.int64)
    e = tl.load(ids_ptr + route)
    here = (e >= 0) & (e < E)
    row = tl.load(row_ptr + route).to(tl.int64) if MAPPED else route
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = (n < N) & here
    at = h_ptr + row * h_stride + n
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = gate
    if SEGMENTS == 2:
        up = tl.load(at + N, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        bias = bias_ptr + e.to(tl.int64) * (SEGMENTS * N) + n
        gate += tl.load(bias, mask=inside, other=0.0)
        if SEGMENTS == 2:
            up += tl.load(bias + N, mask=inside, other=0.0)
    y = activate(gate, up, KIND, LIMITED, alpha, beta, limit)
    if ROUNDED:
        G: tl.constexpr = BN // 128
        y, scale = rounded_groups(y, BN, SOFT)
        g = tl.program_id(1) * G + tl.arange(0, G)
        tl.store(scale_ptr + g.to(tl.int64) * n_rows + row, scale, mask=(g * 128 < N) & here)
        tl.store(out_ptr + row * N + n, y, mask=inside)
    else:
        tl.store(out_ptr + row * N + n, to_bf16(y, SOFT), mask=inside)


@triton.jit
def combine_rows(
    y_ptr, ids_ptr, row_ptr, weights_ptr, bias_ptr, out_ptr, y_stride, out_stride,
    H: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, MAPPED: tl.constexpr, WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr, BH: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over j of weight[t, j] * (y[its row] + bias[e]), in f32 and in the order of j, without routes to -1.
    y [rows, H] bf16, rows y_stride apart; ids, weights [M, TOP_K]; bias [E, H] f32; out [M, H].  Program (token,
    columns)."""
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    acc = tl.zeros([BH], tl.float32)
    for j in tl.static_range(TOP_K):
        route = t * TOP_K + j
        e = tl.load(ids_ptr + route)
        here = (e >= 0) & (e < E)
        inside = (h < H) & here
        row = tl.load(row_ptr + route).to(tl.int64) if MAPPED else route
        y = tl.load(y_ptr + row * y_stride + h, mask=inside, other=0.0).to(tl.float32)
        if BIASED:
            y += tl.load(bias_ptr + e.to(tl.int64) * H + h, mask=inside, other=0.0)
        if WEIGHTED:
            y = y * tl.load(weights_ptr + route, mask=here, other=0.0)
        acc += y
    if out_ptr.dtype.element_ty == tl.bfloat16:
        acc = to_bf16(acc, SOFT)
    tl.store(out_ptr + t * out_stride + h, acc, mask=h < H)
