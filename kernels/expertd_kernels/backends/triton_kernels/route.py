# mypy: ignore-errors
# (Triton device code: its types are checked by Triton's compiler, not by mypy.)
"""From routes to work: which rows belong to which expert, in a fixed order, without the host and without atomics.

Route r = token * k + j.  `slots` lists the routes expert by expert, in ascending order inside an expert (a stable
counting sort); a *block* is at most BM neighbouring entries of one expert.  The number of blocks is data, so grids use
`block_bound`, and blocks beyond the last hold expert -1.  Routes to -1 appear nowhere.

Two launches, or one where few chunks of routes let every program count them all itself:
    count   chunk of routes  -> histogram over experts
    place   chunk of routes  -> its routes' places in `slots`; and a share of the block table
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

__all__ = ["block_bound", "chunk_routes", "expert_bins"]

FUSED_CHUNKS = 8


@triton.jit
def chunk_histogram(ids_ptr, chunk, n_routes, E: tl.constexpr, EP: tl.constexpr, C: tl.constexpr):
    """[EP] int32 routes of the chunk to each expert; bin E takes those to nowhere and beyond the end."""
    r = chunk * C + tl.arange(0, C)
    ids = tl.load(ids_ptr + r, mask=r < n_routes, other=-1)
    return tl.histogram(tl.where((ids >= 0) & (ids < E), ids, E), EP)


@triton.jit(do_not_specialize=["n_routes"])
def count(ids_ptr, counts_ptr, n_routes, E: tl.constexpr, EP: tl.constexpr, C: tl.constexpr):
    """counts [chunks, EP] int32."""
    chunk = tl.program_id(0)
    tl.store(counts_ptr + chunk * EP + tl.arange(0, EP), chunk_histogram(ids_ptr, chunk, n_routes, E, EP, C))


@triton.jit
def sum_chunks(ids_ptr, counts_ptr, chunk, n_chunks, n_routes, E: tl.constexpr, EP: tl.constexpr, C: tl.constexpr,
               FUSED: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """([EP] routes of all chunks, [EP] routes of the chunks before `chunk`)."""
    total = tl.zeros([EP], tl.int32)
    before = tl.zeros([EP], tl.int32)
    if FUSED:
        for c in range(n_chunks):
            h = chunk_histogram(ids_ptr, c, n_routes, E, EP, C)
            total += h
            before += tl.where(c < chunk, h, 0)
    else:
        for c0 in range(0, n_chunks, TILE):
            c = c0 + tl.arange(0, TILE)
            ptrs = counts_ptr + c[:, None] * EP + tl.arange(0, EP)[None, :]
            h = tl.load(ptrs, mask=(c < n_chunks)[:, None], other=0)
            total += tl.sum(h, 0)
            before += tl.sum(tl.where((c < chunk)[:, None], h, 0), 0)
    return total, before


@triton.jit(do_not_specialize=["n_routes", "n_chunks", "n_blocks"])
def place(
    ids_ptr, counts_ptr, base_ptr, slots_ptr, blocks_ptr, n_routes, n_chunks, n_blocks,
    E: tl.constexpr, EP: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, FUSED: tl.constexpr, TILE: tl.constexpr,
    SUB: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """base [programs, EP] int32 scratch; slots [routes] int32; blocks [n_blocks, 4] int32 (expert, first, rows, -)."""
    if PDL:
        gdc_launch_dependents()
    chunk = tl.program_id(0)
    n_programs = tl.num_programs(0)
    experts = tl.arange(0, EP)
    total, before = sum_chunks(ids_ptr, counts_ptr, chunk, n_chunks, n_routes, E, EP, C, FUSED, TILE)
    total = tl.where(experts < E, total, 0)
    start = tl.cumsum(total, 0) - total
    blocks = (total + BM - 1) // BM
    first_block = tl.cumsum(blocks, 0) - blocks
    tl.store(base_ptr + chunk * EP + experts, start + before)

    # block i of every expert at once; programs take turns
    for i in range(chunk, tl.max(blocks, 0), n_programs):
        at = blocks_ptr + (first_block + i) * 4
        mask = i < blocks
        tl.store(at, experts, mask=mask)
        tl.store(at + 1, start + i * BM, mask=mask)
        tl.store(at + 2, tl.minimum(total - i * BM, BM), mask=mask)
    share = (n_blocks + n_programs - 1) // n_programs
    n_used = tl.sum(blocks, 0)
    for i in range(0, share, C):
        b = chunk * share + i + tl.arange(0, C)
        inside = (i + tl.arange(0, C) < share) & (b < n_blocks)
        tl.store(blocks_ptr + b * 4, tl.full([C], -1, tl.int32), mask=inside & (b >= n_used))

    tl.debug_barrier()  # base is read back by other lanes
    for i in range(0, C, SUB):
        r = chunk * C + i + tl.arange(0, SUB)
        ids = tl.load(ids_ptr + r, mask=r < n_routes, other=-1)
        rank = tl.zeros([SUB], tl.int32)
        for k in range(0, i + SUB, SUB):
            o = chunk * C + k + tl.arange(0, SUB)
            others = tl.load(ids_ptr + o, mask=o < n_routes, other=-1)
            earlier = (others[None, :] == ids[:, None]) & (o[None, :] < r[:, None])
            rank += tl.sum(earlier.to(tl.int32), 1)
        here = (ids >= 0) & (ids < E)
        to = tl.load(base_ptr + chunk * EP + ids, mask=here, other=0) + rank
        tl.store(slots_ptr + to, r, mask=here)


def block_bound(routes: int, experts: int, bm: int) -> int:
    """Most blocks that any routing makes: sum of ceil(rows / bm) over the experts hit."""
    hit = min(routes, experts)
    return hit + (routes - hit) // bm


def chunk_routes(routes: int) -> int:
    """Routes a program places."""
    if routes <= 128 * FUSED_CHUNKS:
        return 128
    return 256 if routes <= 8192 else 512


def expert_bins(experts: int) -> int:
    """Histogram bins: a power of two with room for the bin of routes to nowhere."""
    return max(128, 1 << experts.bit_length())
