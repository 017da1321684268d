"""What happens to a cluster: calls, and servers that fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from expertctl.common.workload import LayerShape, drawn, routes
from expertctl.planner.plan import plan
from expertctl.planner.problem import Place, Problem, placement_of
from expertctl.simulation.service import Service
from expertd.placement import Placement
from expertd_client.cluster.split import split
from expertd_client.cluster.table import layer_table
from expertd_client.requests.request import Request

__all__ = ["LAYER", "Outage", "Trace", "busiest_s", "placed", "shape_of", "traced"]

LAYER = 0
_HIDDEN, _POOL, _PILOT = 8, 512, 256


@dataclass(frozen=True, slots=True)
class Outage:
    """hangs: it is there and does nothing; else it dies.  Then, for so long, and it is as before."""

    at_s: float
    server: int
    seconds: float
    hangs: bool


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """at_s: [calls], ascending, when each begins; which: [calls], its request of the pool."""

    at_s: NDArray[np.float64]
    which: NDArray[np.int64]
    pool: Sequence[Request]
    outages: Sequence[Outage]


def placed(servers: int, shape: LayerShape, zipf: float, copies: int, room: int) -> Placement:
    """What the planner makes of this load for equal servers with room for so many experts each."""
    ids = routes(np.random.default_rng(1), 1 << 14, shape, zipf)
    load = np.bincount(ids.ravel(), minlength=shape.num_experts)[None].astype(np.float64) + 1.0
    places = tuple(Place(f"s{n}", 1.0, room, host=f"h{n}") for n in range(servers))
    problem = Problem((LAYER,), (shape.num_experts,), load, places)
    return placement_of(problem, plan(problem, least=copies).held)


def traced(
    calls: int,
    rate: float,
    tokens: int,
    shape: LayerShape,
    zipf: float,
    servers: int,
    failures: float,
    down_s: float,
    hangs: float,
    seed: int = 0,
) -> Trace:
    """rate: calls a second, at random; failures: a second over all servers, each for down_s on average; hangs: the
    share of them that hang."""
    rng = np.random.default_rng(seed)
    at_s = np.cumsum(rng.exponential(1.0 / rate, calls))
    pool = [drawn(rng, tokens, shape, zipf) for _ in range(min(calls, _POOL))]
    outages = []
    when_s = 0.0
    while failures:
        when_s += float(rng.exponential(1.0 / failures))
        if when_s > at_s[-1]:
            break
        outage = Outage(when_s, int(rng.integers(servers)), float(rng.exponential(down_s)), bool(rng.random() < hangs))
        outages.append(outage)
    return Trace(at_s, rng.integers(len(pool), size=calls), pool, outages)


def busiest_s(placement: Placement, tokens: int, shape: LayerShape, zipf: float, service: Service) -> float:
    """Seconds that the busiest server computes for a call on average, each part by itself, replicas taken at random."""
    rng = np.random.default_rng(2)
    held = {s.address: s.layers[LAYER] for s in placement.servers if LAYER in s.layers}
    table, number = layer_table(shape.num_experts, held), {address: n for n, address in enumerate(held)}
    work = np.zeros(len(held))
    for _ in range(_PILOT):
        owners = [number[replicas[int(rng.integers(len(replicas)))]] for replicas in table.replicas]
        for part in split(drawn(rng, tokens, shape, zipf), table, owners, len(held)):
            work[part.owner] += service.batch_s(part.request.tokens)
    return float(work.max()) / _PILOT


def shape_of(experts: int, top_k: int) -> LayerShape:
    """Hidden states have few columns: nobody computes with them."""
    return LayerShape(LAYER, _HIDDEN, experts, top_k)
