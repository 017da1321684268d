"""Cases of the kernels in front of gluon_w8a8's GEMMs where there are many routes: counted and placed by chunks, inputs
rounded to the places of their routes.  On a CPU tests/kernels/test_w8a8_prepare.py runs this file as a program of its
own, in Triton's interpreter: case names from stdin, one a line; each is answered with one line of JSON."""

from __future__ import annotations

import json
import sys
import traceback

import torch

from expertd_kernels.backends.gluon.w8a8_prepare import count_routes, place_routes, round_to_places
from expertd_kernels.backends.rounding import round_groups

CASES = {
    "even": (8, 2500, 64),
    "one chunk": (60, 300, 32),
    "experts 128": (128, 1600, 128),
    "one expert": (1, 1030, 128),
}
"""Experts, routes, routes that a program places at a time."""
CHUNK = 512


def check(experts: int, routes: int, some: int) -> None:
    generator = torch.Generator().manual_seed(routes)
    ids = torch.randint(-2, experts + 2, (routes,), generator=generator).int()
    tokens, H = 37, 384
    x = torch.randn(tokens, H, generator=generator).bfloat16()
    padded, chunks = max(32, 1 << (experts - 1).bit_length()), -(-routes // CHUNK)
    table = torch.full((chunks, padded), -9, dtype=torch.int32)
    counts, lists = (torch.full((size,), -9, dtype=torch.int32) for size in (experts, routes))
    sizes = (experts, padded, CHUNK)
    count_routes[(chunks,)](ids, table, routes, *sizes, False)
    places = torch.full((routes,), -9, dtype=torch.int32)
    step = 2 if chunks < 4 else 4
    place_routes[(chunks,)](ids, table, counts, lists, places, routes, chunks, *sizes, some, step, False)
    here = ((ids >= 0) & (ids < experts)).nonzero()[:, 0]
    order = here[torch.sort(ids[here].long(), stable=True).indices]
    assert torch.equal(counts.long(), torch.bincount(ids[here].long(), minlength=experts)), "counts"
    assert torch.equal(lists[: len(order)].long(), order), "lists"
    assert bool((lists[len(order) :] == -9).all()), "places beyond the last route are written"
    inverse = torch.full((routes,), -1)
    inverse[order] = torch.arange(len(order))
    assert torch.equal(places.long(), inverse), "places"
    top_k = 3
    there = torch.randperm(tokens * top_k, generator=generator).int().view(tokens, top_k)
    there[1, 1], there[5] = -1, -1
    spread = torch.zeros(tokens * top_k, H, dtype=torch.float8_e4m3fn)
    spread_scale = torch.full((tokens * top_k, H // 128), torch.nan)
    round_to_places[(-(-tokens // 4),)](x, there, spread, spread_scale, tokens, top_k, H, True, False, 4, 512, False)
    to, token = there[there >= 0].long(), (there >= 0).nonzero()[:, 0]
    wanted, wanted_scale = round_groups(x)
    torch.testing.assert_close(spread_scale[to], wanted_scale[token])
    differ = float((spread[to].float() != wanted[token].float()).float().mean())
    assert differ < 0.05, f"{differ} of the rounded inputs: more than the carries that the interpreter loses"
    assert int(spread_scale.isnan().any(1).sum()) == top_k + 1, "places of routes to nowhere are written"


def answer(name: str) -> dict[str, str]:
    try:
        check(*CASES[name])
    except Exception:
        return {"failed": traceback.format_exc()}
    return {"failed": ""}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(line.rstrip("\n"))), flush=True)
