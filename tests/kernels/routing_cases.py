"""Cases of the kernels around gluon_sm90's and gluon_w8a8's GEMMs: routes grouped by expert, blocks listed, results
added up, each compared with torch.  On a CPU backends/gluon/shared/test_routing.py runs this file as a program of its
own, in Triton's interpreter: case names from stdin, one a line; each is answered with one line of JSON."""

from __future__ import annotations

from functools import partial

import torch
from interpreted import answer_cases

from expertd_kernels.backends.gluon.shared.grouping import Chunks
from expertd_kernels.backends.gluon.shared.routing import combine, count_routes, group_few, place_routes, table_routes

ROUTINGS = ("spread", "one expert", "nowhere")
GROUPED = {f"{E} experts, {n} routes": (E, n) for E, n in ((8, 1300), (60, 600), (1, 515), (128, 257), (512, 300))}
FEW = {f"few: {E} experts, {n} routes": (E, n) for E, n in ((8, 1), (70, 700), (3, 64))}
BLOCKS = ((60, 300, 8), (1, 100, 16), (8, 7, 64))
TABLES = {f"blocks of {BM}: {E} experts, {n} routes": (E, n, BM) for E, n, BM in BLOCKS}
SUMS = {"sums": (1, False, False), "sums of parts": (3, True, False), "weighted sums": (1, True, True)}
NOTHING = -9
"""What stands in memory before."""


def routes(E: int, n: int, how: str) -> torch.Tensor:
    """ids [n] int32; "spread": some of them outside 0..E-1."""
    if how == "spread":
        return torch.randint(-2, E + 2, (n,), generator=torch.Generator().manual_seed(n)).int()
    return torch.full((n,), E - 1 if how == "one expert" else -1, dtype=torch.int32)


def sorted_routes(ids: torch.Tensor, E: int) -> tuple[torch.Tensor, torch.Tensor]:
    """counts [E], and the routes expert by expert, each in order."""
    here = ((ids >= 0) & (ids < E)).nonzero()[:, 0]
    order = here[torch.sort(ids[here].long(), stable=True).indices]
    return torch.bincount(ids[here].long(), minlength=E).int(), order.int()


def unwritten(size: int) -> torch.Tensor:
    return torch.full((size,), NOTHING, dtype=torch.int32)


def same_lists(ids: torch.Tensor, E: int, counts: torch.Tensor, lists: torch.Tensor) -> torch.Tensor:
    """Raises where counts or lists are wrong or entries beyond the last route are written; else the routes in order."""
    want_counts, order = sorted_routes(ids, E)
    assert torch.equal(counts, want_counts), "counts"
    assert torch.equal(lists[: len(order)], order), "lists"
    assert bool((lists[len(order) :] == NOTHING).all()), "entries beyond the last route are written"
    return order


def grouped(E: int, n: int) -> None:
    c = Chunks.of(n, E)
    for how in ROUTINGS:
        ids, counts, lists, places = routes(E, n, how), unwritten(E), unwritten(n), unwritten(n)
        table = torch.full((c.number, c.padded), NOTHING, dtype=torch.int16)
        count_routes[(c.number,)](ids, table, n, E, c.padded, c.size, False)
        sizes = (n, c.number, E, c.padded, c.size, c.rows, False)
        place_routes[(c.number,)](ids, table, counts, lists, places, *sizes)
        order = same_lists(ids, E, counts, lists)
        inverse = torch.full((n,), -1, dtype=torch.int32)
        inverse[order.long()] = torch.arange(len(order), dtype=torch.int32)
        assert torch.equal(places, inverse), f"places, {how}"
        again = unwritten(n)
        place_routes[(c.number,)](ids, table, counts, again, None, *sizes)
        assert torch.equal(again, lists), f"without places, {how}"


def listed(E: int, n: int, BM: int, X: int) -> None:
    """The list of blocks: every route once, in the order of the list; blocks of more than half before all shorter."""
    c = Chunks.of(n, E)
    counted, room = torch.empty(Chunks.table(n, E), dtype=torch.int16), 1 << (n // BM + min(E, n)).bit_length()
    for how in ("spread", "one expert", "nowhere"):
        ids = routes(E, n, how)
        count_routes[(c.number,)](ids, counted, n, E, c.padded, c.size, False)
        counts, lists, blocks = unwritten(E), unwritten(n), unwritten(2 + 2 * room)
        sizes = n, c.number, E, c.padded, c.size, c.rows, False
        place_routes[(c.number + 1,)](ids, counted, counts, lists, None, *sizes, blocks, BM, X, room)
        same_lists(ids, E, counts, lists)
        number = int(blocks[0])
        word, base = blocks[2::2], blocks[3::2]
        e, rows = word & 0xFFFF, word >> 16
        assert (e[number:] == E).all(), "an entry beyond the last block has an expert"
        assert (rows[number:] == 0).all(), "an entry beyond the last block has routes"
        starts = counts.cumsum(0) - counts
        seen = torch.zeros(int(counts.sum()), dtype=torch.int32)
        for i in range(number):
            at, r = int(base[i]), int(rows[i])
            expert = int(e[i])
            assert 0 < r <= BM + X, "a block's routes"
            assert starts[expert] <= at, "a block begins before its expert"
            assert at + r <= starts[expert] + counts[expert], "a block ends behind its expert"
            seen[at : at + r] += 1
        assert (seen == 1).all(), "a route that is in no block, or in two"
        short = (rows[:number] <= BM // 2).int()
        assert (short[1:] >= short[:-1]).all(), "a long block behind a short one"


def few(E: int, n: int) -> None:
    for how in ROUTINGS:
        ids, counts, lists = routes(E, n, how), unwritten(E), unwritten(n)
        group_few[(E,)](ids, counts, lists, n, 64, 16, False)
        same_lists(ids, E, counts, lists)


def table(E: int, n: int, BM: int) -> None:
    most = min(n, n // BM + min(E, n))
    padded, B = 1 << (most - 1).bit_length(), 1 << (n - 1).bit_length()
    for how in ROUTINGS:
        ids, blocks, lists = routes(E, n, how), unwritten(padded), unwritten(most * BM)
        table_routes[(E,)](ids, blocks, lists, n, E, 1 << (E - 1).bit_length(), padded, BM, B, False)
        counts, order = sorted_routes(ids, E)
        want, want_lists, first = torch.full((padded,), -1, dtype=torch.int32), unwritten(most * BM), 0
        number = 0
        for e, count in enumerate(counts.tolist()):
            for at in range(0, count, BM):
                size = min(BM, count - at)
                want[number] = e | size << 16
                want_lists[number * BM : number * BM + size] = order[first + at : first + at + size]
                number += 1
            first += count
        assert torch.equal(blocks, want), f"blocks, {how}"
        assert torch.equal(lists, want_lists), f"lists, {how}"


def summed(parts: int, counters: bool, weighted: bool) -> None:
    tokens, top_k, E, H = 5, 3, 4, 200
    y = torch.randn(parts, tokens * top_k, H, generator=torch.Generator().manual_seed(1)).bfloat16()
    ids = routes(E, tokens * top_k, "spread").view(tokens, top_k)
    there = ((ids >= 0) & (ids < E)).flatten()
    assert 0 < int(there.sum()) < len(there)
    y[:, ~there] = torch.nan  # never written by w2
    out = torch.full((tokens, H), torch.nan).bfloat16()
    done = torch.arange(1024, dtype=torch.int32) if counters else None
    weights = torch.linspace(0.1, 1.0, tokens * top_k).view(tokens, top_k) if weighted else None
    if weights is not None:
        weights.view(-1)[~there] = torch.nan  # of no meaning where nothing was computed
    combine[(tokens, 2)](y, ids, out, H, E, top_k, 128, False, parts, done, 1024 if counters else 0, weights)
    results = torch.where(there[None, :, None], y, 0.0).float().sum(0).view(tokens, top_k, H)
    want = (results if weights is None else results * torch.nan_to_num(weights)[:, :, None]).sum(1)
    torch.testing.assert_close(out.float(), want, rtol=2**-7, atol=2**-7)
    assert done is None or not bool(done.any()), "counters are not set back"


CASES = {
    **{
        f"listed {E} x {n}, blocks of {b} + {x}": partial(listed, E, n, b, x)
        for E, n, b, x in ((8, 700, 32, 0), (60, 900, 64, 16), (512, 1100, 64, 0))
    },
    **{name: partial(grouped, *a) for name, a in GROUPED.items()},
    **{name: partial(few, *a) for name, a in FEW.items()},
    **{name: partial(table, *a) for name, a in TABLES.items()},
    **{name: partial(summed, *a) for name, a in SUMS.items()},
}


if __name__ == "__main__":
    answer_cases(CASES)
