# mypy: ignore-errors
# (Triton device code: its types are checked by Triton's compiler, not by mypy.)
"""From routes to work: which rows belong to which expert, in a fixed order, without the host and without atomics.

Route r = token * k + j.  `slots` lists the routes expert by expert, in ascending order inside an expert (a stable
counting sort); a *block* is at most BM neighbouring entries of one expert.  The number of blocks is data, so grids use
`block_bound`, and blocks beyond the last hold expert -1.  Routes to -1 appear nowhere.

    few routes    place                     every program counts all routes itself
    many          count -> scan -> place    histogram of each chunk; sums over the chunks before; places

Each program of place takes a chunk of CHUNK routes, and a share of the block table.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from expertd_kernels.backends.portable.space import CHUNK, block_bound, expert_bins

__all__ = ["CHUNK", "FUSED_ROUTES", "block_bound", "expert_bins"]

FUSED_ROUTES = 1024
SCAN_EXPERTS = 16
SCAN_CHUNKS = 64


@triton.jit
def known(ids, E: tl.constexpr):
    """Ids as histogram bins: bin E takes those to nowhere."""
    return tl.where((ids >= 0) & (ids < E), ids, E)


@triton.jit(do_not_specialize=["n_routes"])
def count(ids_ptr, counts_ptr, n_routes, E: tl.constexpr, EP: tl.constexpr, C: tl.constexpr):
    """counts [chunks, EP] int32: routes of each chunk to each expert."""
    chunk = tl.program_id(0)
    r = chunk * C + tl.arange(0, C)
    ids = tl.load(ids_ptr + r, mask=r < n_routes, other=-1)
    tl.store(counts_ptr + chunk * EP + tl.arange(0, EP), tl.histogram(known(ids, E), EP))


@triton.jit(do_not_specialize=["n_chunks"])
def scan(counts_ptr, totals_ptr, n_chunks, EP: tl.constexpr, BE: tl.constexpr, BC: tl.constexpr):
    """counts [chunks, EP] -> sums over the chunks before, in place; totals [EP].  Program: BE experts."""
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    before = tl.zeros([BE], tl.int32)
    for c0 in range(0, n_chunks, BC):
        c = c0 + tl.arange(0, BC)
        ptrs = counts_ptr + c[:, None] * EP + e[None, :]
        mask = (c < n_chunks)[:, None]
        h = tl.load(ptrs, mask=mask, other=0)
        tl.store(ptrs, tl.cumsum(h, 0) - h + before[None, :], mask=mask)
        before += tl.sum(h, 0)
    tl.store(totals_ptr + e, before)


@triton.jit
def tally(
    ids_ptr, counts_ptr, totals_ptr, chunk, n_routes, E: tl.constexpr, EP: tl.constexpr, C: tl.constexpr,
    ALL: tl.constexpr,
):  # fmt: skip
    """[EP] twice: all routes to each expert, and those of the chunks before this one.  ALL > 0: counted here, from the
    ids; else what `count` and `scan` left."""
    experts = tl.arange(0, EP)
    if ALL > 0:
        every = tl.arange(0, ALL)
        bins = known(tl.load(ids_ptr + every, mask=every < n_routes, other=-1), E)
        total = tl.histogram(bins, EP)
        before = tl.histogram(tl.where(every < chunk * C, bins, E), EP)
    else:
        total = tl.load(totals_ptr + experts)
        before = tl.load(counts_ptr + chunk * EP + experts)
    return tl.where(experts < E, total, 0), before


@triton.jit
def ranks(ids_ptr, ids, r, n_routes):
    """For each route of the chunk `r`, whose ids are `ids`, how many of its routes before go to the same expert."""
    others = tl.load(ids_ptr + r, mask=r < n_routes, other=-1)  # the same ids along the other axis
    earlier = (others[None, :] == ids[:, None]) & (r[None, :] < r[:, None])
    return tl.sum(earlier.to(tl.int32), 1)


@triton.jit
def write_blocks(blocks_ptr, experts, total, start, n_blocks, BM: tl.constexpr, C: tl.constexpr):
    """This program's share of the block table: block i of every expert at once, and the blocks beyond the last."""
    program, n_programs = tl.program_id(0), tl.num_programs(0)
    blocks = (total + BM - 1) // BM
    end = tl.cumsum(blocks, 0)
    for i in range(program, tl.max(blocks, 0), n_programs):
        at = blocks_ptr + (end - blocks + i) * 4
        mask = i < blocks
        tl.store(at, experts, mask=mask)
        tl.store(at + 1, start + i * BM, mask=mask)
        tl.store(at + 2, tl.minimum(total - i * BM, BM), mask=mask)
    share = (n_blocks + n_programs - 1) // n_programs
    n_used = tl.sum(blocks, 0)
    for i in range(0, share, C):
        b = program * share + i + tl.arange(0, C)
        beyond = (i + tl.arange(0, C) < share) & (b < n_blocks) & (b >= n_used)
        tl.store(blocks_ptr + b * 4, tl.full([C], -1, tl.int32), mask=beyond)


@triton.jit(do_not_specialize=["n_routes", "n_blocks"])
def place(
    ids_ptr, counts_ptr, totals_ptr, base_ptr, slots_ptr, blocks_ptr, n_routes, n_blocks,
    E: tl.constexpr, EP: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, ALL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """slots [routes] int32; blocks [n_blocks, 4] int32 (expert, first, rows, -); base [chunks, EP] int32 is scratch.
    ALL > 0: no counts and totals yet, ALL is a power of two of at least n_routes."""
    if PDL:
        gdc_launch_dependents()
    chunk = tl.program_id(0)
    experts = tl.arange(0, EP)
    r = chunk * C + tl.arange(0, C)
    ids = tl.load(ids_ptr + r, mask=r < n_routes, other=-1)
    total, before = tally(ids_ptr, counts_ptr, totals_ptr, chunk, n_routes, E, EP, C, ALL)
    start = tl.cumsum(total, 0) - total
    tl.store(base_ptr + chunk * EP + experts, start + before)
    write_blocks(blocks_ptr, experts, total, start, n_blocks, BM, C)
    rank = ranks(ids_ptr, ids, r, n_routes)
    here = (ids >= 0) & (ids < E)
    tl.debug_barrier()  # base is read back by other lanes
    to = tl.load(base_ptr + chunk * EP + ids, mask=here, other=0) + rank
    tl.store(slots_ptr + to, r, mask=here)
