"""How long a layer takes under a plan, from what its servers measured when they started.

    parts = parts_of(described)                      of each server: which experts are where, what batches take there
    rows  = expected(problem, held, parts, top_k)    for so many callers with a token each, in one batch

Batches are drawn: tokens choose their experts by the load of a layer, and each part takes what it measured for as many
experts and routes.  Parts and servers compute at the same time, so a layer takes as long as its slowest part, with the
network's delay where the inventory says it.  Waiting for others is not in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from expertctl.planner.problem import Held, Problem
from expertd.common.surface import Surface
from expertd.v1 import expert_service_pb2 as pb

__all__ = ["CALLERS", "Expected", "Part", "Surface", "expected", "parts_of", "speed_of"]

CALLERS = (1, 8, 64)
_DRAWS = 24
_MOST_LAYERS = 16
"""That are drawn for, evenly spread: layers of a model are alike."""


@dataclass(frozen=True)
class Part:
    """Experts of a layer on one device of a server.  held: their ids."""

    device: str
    held: frozenset[int]
    surface: Surface


Parts = Mapping[str, Mapping[int, Sequence[Part]]]
"""address -> layer -> its parts."""


class Expected(NamedTuple):
    """layer_us: of a layer, in the mean of batches and layers; tokens_per_s: through all layers of the plan, one after
    another."""

    callers: int
    layer_us: float
    tokens_per_s: float


def parts_of(described: Mapping[str, pb.DescribeResponse]) -> dict[str, dict[int, list[Part]]]:
    """Of servers that measured; a layer of which any part was not is left out."""
    out: dict[str, dict[int, list[Part]]] = {}
    for address, d in described.items():
        for layer in d.layers:
            if layer.parts and all(p.surface for p in layer.parts):
                parts = [
                    Part(
                        p.device,
                        frozenset(e for r in p.held for e in range(r.first, r.first + r.count)),
                        Surface(tuple((s.experts, s.routes, s.microseconds) for s in p.surface)),
                    )
                    for p in layer.parts
                ]
                out.setdefault(address, {})[layer.layer] = parts
    return out


def speed_of(parts: Mapping[int, Sequence[Part]], top_k: int) -> float:
    """Routes a second of one server in batches of the most callers, evenly routed; 0 = it did not measure."""
    if not parts:
        return 0.0
    of_layer = next(iter(parts.values()))
    held = sum(len(p.held) for p in of_layer)
    routes = max(CALLERS) * top_k
    us = max(float(p.surface(*_counts(len(p.held), routes * len(p.held) / held))[0]) for p in of_layer)
    return routes / us * 1e6 if us else 0.0


def _counts(experts: int, routes: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    hit = min(float(experts), experts * (1 - (1 - 1 / max(1, experts)) ** routes))
    return np.array([max(1, round(hit))]), np.array([max(1, round(routes))])


def expected(
    problem: Problem, held: Held, parts: Parts, top_k: int, callers: Sequence[int] = CALLERS, seed: int = 0
) -> list[Expected]:
    """[] where a server that holds something did not measure, or an expert is nowhere."""
    layers = sorted({*np.linspace(0, len(problem.layers) - 1, min(_MOST_LAYERS, len(problem.layers))).astype(int)})
    owners = [_owners(problem, held, parts, n) for n in layers]
    if not layers or any(o is None for o in owners):
        return []
    generator = np.random.default_rng(seed)
    out = []
    for tokens in callers:
        us = [
            _layer_us(generator, problem.load[n, : problem.num_experts[n]], tokens, top_k, o)
            for n, o in zip(layers, owners, strict=True)
            if o is not None
        ]
        mean = float(np.mean(us))
        out.append(Expected(tokens, mean, tokens / (mean * 1e-6 * len(problem.layers)) if mean else 0.0))
    return out


_Owner = tuple[NDArray[np.bool_], Surface, float]


def _owners(problem: Problem, held: Held, parts: Parts, n: int) -> list[_Owner] | None:
    """[E] of each part of layer n: whether it has the expert, what it takes, the delay to it.  None: see expected()."""
    out: list[_Owner] = []
    count = problem.num_experts[n]
    for s, place in enumerate(problem.places):
        mine = held[n, s, :count]
        if not mine.any():
            continue
        measured = parts.get(place.address, {})
        of_layer = measured.get(problem.layers[n]) or next(iter(measured.values()), None)
        if of_layer is None:
            return None
        left = mine.copy()
        for i, part in enumerate(of_layer):
            own = np.zeros(count, np.bool_)
            own[[e for e in part.held if e < count]] = True
            own = left if i == len(of_layer) - 1 else own & left  # what is new is on the last device
            left = left & ~own
            out.append((own, part.surface, place.delay_us))
    covered = np.zeros(count, np.bool_)
    for own, *_ in out:
        covered |= own
    return out if covered.all() else None


def _layer_us(
    generator: np.random.Generator,
    load: NDArray[np.float64],
    tokens: int,
    top_k: int,
    owners: Sequence[_Owner],
) -> float:
    """Mean over drawn batches of the slowest part's time."""
    experts = len(load)
    share = np.log((load + 1e-9 * max(1.0, float(load.sum()))) / max(1.0, float(load.sum())))
    keys = share + generator.gumbel(size=(_DRAWS, tokens, experts))
    chosen = np.argpartition(-keys, min(top_k, experts) - 1, axis=2)[:, :, :top_k]
    routes = np.zeros((_DRAWS, experts), np.int64)
    for draw in range(_DRAWS):
        routes[draw] = np.bincount(chosen[draw].ravel(), minlength=experts)
    replicas = np.sum([own for own, *_ in owners], axis=0)
    times = np.zeros(_DRAWS)
    for i, (own, surface, delay_us) in enumerate(owners):
        before = np.sum([other for other, *_ in owners[:i]], axis=0) if i else np.zeros(experts, np.int64)
        each, more = np.divmod(routes, replicas)  # replicas take turns
        mine = np.where(own, each + (before < more), 0)
        hit = (mine > 0).sum(axis=1)
        times = np.maximum(times, surface(hit, mine.sum(axis=1)) + np.where(hit > 0, delay_us, 0.0))
    return float(times.mean())
