"""Cases of the kernel that puts inputs and router weights to the places of their routes, in front of kernel "wide".
On a CPU tests/kernels/test_gluon_wide.py runs this file as a program of its own, in Triton's interpreter: case names
from stdin, one a line; each is answered with one line of JSON."""

from __future__ import annotations

import json
import sys
import traceback

import torch

from expertd_kernels.backends.gluon.wide_prepare import place_inputs

CASES = {
    "padded rows": (37, 3, 328, 384),
    "several parts of a row": (9, 4, 1088, 1088),
    "one token, one route": (1, 1, 64, 64),
}
"""Tokens, routes a token, columns of an input, elements of a placed row."""


def check(tokens: int, top_k: int, columns: int, stride: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, columns, generator=generator).bfloat16()
    weights = torch.rand(tokens, top_k, generator=generator)
    routes = tokens * top_k
    places = torch.randperm(routes, generator=generator).int().view(tokens, top_k)
    if tokens > 5:
        places[1, 1], places[5] = -1, -1
    placed = torch.full((routes, stride), torch.nan, dtype=torch.bfloat16)
    placed_weights = torch.full((routes,), torch.nan)
    R, B = 4, 512
    grid = (-(-tokens // R) * -(-columns // B),)
    place_inputs[grid](x, places, weights, placed, placed_weights, tokens, top_k, columns, stride, R, B, False)
    here = places >= 0
    at, token = places[here].long(), here.nonzero()[:, 0]
    assert torch.equal(placed[at][:, :columns], x[token]), "inputs"
    assert torch.equal(placed_weights[at], weights[here]), "weights"
    assert bool(placed[:, columns:].isnan().all()), "columns beyond the input are written"
    missing = routes - len(at)
    assert int(placed[:, 0].isnan().sum()) == missing, "places of routes to nowhere are written"
    assert int(placed_weights.isnan().sum()) == missing, "places of routes to nowhere are written"


def answer(name: str) -> dict[str, str]:
    try:
        check(*CASES[name])
    except Exception:
        return {"failed": traceback.format_exc()}
    return {"failed": ""}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(line.rstrip("\n"))), flush=True)
