"""What a batch takes by the experts that it has routes to and by its routes: few points, the rest lies between.

A batch that reaches more experts reads more weights, one with more routes computes more: on a CPU the first makes its
time up to some rows an expert, then the second; a GPU adds what launching takes.  `expertctl plan` reads the points.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["BUDGET_S", "Point", "batch_of", "grid", "measured_surface"]

BUDGET_S = 0.5
"""For one part of one kind of layer."""
_ROWS = (1, 4, 16, 64)
"""Routes an expert."""
_TIMES = 5


class Point(NamedTuple):
    """experts: that have routes; routes: of all of them together."""

    experts: int
    routes: int
    microseconds: float


def grid(held: int, top_k: int, most_tokens: int) -> list[tuple[int, int]]:
    """(experts, routes) to be measured of a part with so many experts: the corners first, then what lies between."""
    experts = [*(2**i for i in range(12) if 2**i < held), held]
    points = [(e, e * r) for e in experts for r in _ROWS if _tokens(e, e * r, top_k) <= most_tokens]
    corners = [(e, e * r) for r in _ROWS for e in (1, held)]
    return list(dict.fromkeys([*(p for p in corners if p in points), *points]))


def _tokens(experts: int, routes: int, top_k: int) -> int:
    return -(-routes // min(top_k, experts))


def batch_of(slots: Tensor, experts: int, routes: int, top_k: int, turn: int) -> tuple[Tensor, Tensor]:
    """(ids [M, top_k] int32, weights [M, top_k] f32) of a batch with `routes` routes to `experts` of `slots`, evenly;
    of others each turn, as long as there are others."""
    M, k = _tokens(experts, routes, top_k), min(top_k, experts)
    which = (torch.arange(routes) % experts + turn * experts) % len(slots)
    ids = torch.full((M, top_k), -1, dtype=torch.int32)
    flat = torch.full((M * k,), -1, dtype=torch.int32)
    flat[:routes] = slots[which].to(torch.int32)
    ids[:, :k] = flat.view(M, k)
    return ids, torch.full((M, top_k), 1.0 / top_k)


def measured_surface(
    seconds: Callable[[int, int, int], float], points: list[tuple[int, int]], budget_s: float = BUDGET_S
) -> tuple[Point, ...]:
    """seconds(experts, routes, turn): of a batch, of other experts each turn.  Ends when the time is over, but not
    before there are four points."""
    begin = time.perf_counter()
    out: list[Point] = []
    for experts, routes in points:
        if len(out) >= len(_ROWS) and time.perf_counter() - begin > budget_s:
            break
        for turn in range(2):
            seconds(experts, routes, turn)  # compiled, captured, allocated
        took = sorted(seconds(experts, routes, 2 + turn) for turn in range(_TIMES))
        out.append(Point(experts, routes, took[_TIMES // 2] * 1e6))
    return tuple(sorted(out))
