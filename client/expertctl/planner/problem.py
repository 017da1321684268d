"""What is to be placed where, as arrays.

Letters: L layers, S servers, E experts of a layer (of the largest; what a smaller one does not have is in no plan).
A plan is held [L, S, E] bool: whether a server holds an expert.  Load is in routes: a token that goes to an expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from expertd.errors import PlacementError
from expertd.placement import Placement, Server

__all__ = ["Held", "Place", "Problem", "held_of", "placement_of"]

Held = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Place:
    """One server.  speed: routes a second; experts: of each layer that it has room for, or of all layers together where
    `total`; host, zone: replicas are not put into the same one where there is another; delay_us: of the network there
    and back."""

    address: str
    speed: float
    experts: int
    host: str = ""
    zone: str = ""
    total: bool = False
    delay_us: float = 0.0


@dataclass(frozen=True)
class Problem:
    """layers: their numbers, ascending; num_experts: of each of them; load: [L, E] f64, routes to each expert.

    Raises PlacementError where the experts find no room."""

    layers: tuple[int, ...]
    num_experts: tuple[int, ...]
    load: NDArray[np.float64]
    places: tuple[Place, ...]

    def __post_init__(self) -> None:
        want = (len(self.layers), max(self.num_experts, default=0))
        if self.load.shape != want or not np.isfinite(self.load).all() or (self.load < 0).any():
            raise PlacementError.about("load", got=f"{self.load.shape}", want=f"numbers >= 0, [layers, experts] {want}")
        bad = next((p for p in self.places if not p.speed > 0), None)
        if bad is not None:
            raise PlacementError.about(f"speed of {bad.address}", got=bad.speed, want="routes a second, > 0")
        short = np.flatnonzero(self.slots.sum(axis=1) < np.array(self.num_experts))
        if len(short):
            layer = int(short[0])
            raise PlacementError.about(
                f"layer {self.layers[layer]}",
                got=f"room for {int(self.slots[layer].sum())} experts at {len(self.places)} servers",
                want=f"room for {self.num_experts[layer]}",
                remedy="more servers, or more memory for them",
            )

    @cached_property
    def exists(self) -> NDArray[np.bool_]:
        """[L, E]: whether the layer has that expert."""
        return np.arange(self.load.shape[1]) < np.array(self.num_experts)[:, None]

    @cached_property
    def speed(self) -> NDArray[np.float64]:
        """[S], routes a second."""
        return np.array([p.speed for p in self.places], np.float64)

    @cached_property
    def slots(self) -> NDArray[np.int64]:
        """[L, S]: experts of a layer that a server has room for.  What is left of a room for all layers goes to layers
        in turns, another one first for each server."""
        count = len(self.layers)
        out = np.zeros((count, len(self.places)), np.int64)
        first = 0
        for s, p in enumerate(self.places):
            each, more = divmod(p.experts, max(1, count)) if p.total else (p.experts, 0)
            out[:, s] = each
            out[(first + np.arange(more)) % max(1, count), s] += 1
            first += more
        return np.minimum(out, np.array(self.num_experts, np.int64)[:, None])

    @cached_property
    def equal(self) -> bool:
        """Whether all servers are as fast and as large."""
        return bool((self.speed == self.speed[:1]).all() and (self.slots == self.slots[:, :1]).all())

    @cached_property
    def host_of(self) -> NDArray[np.int64]:
        """[S]: number of its host."""
        return _numbers([(p.zone, p.host) for p in self.places])

    @cached_property
    def zone_of(self) -> NDArray[np.int64]:
        """[S]: number of its zone."""
        return _numbers([p.zone for p in self.places])

    def nothing(self) -> Held:
        """The plan in which nobody holds anything."""
        return np.zeros((len(self.layers), len(self.places), self.load.shape[1]), np.bool_)


def _numbers(names: Sequence[object]) -> NDArray[np.int64]:
    seen = {name: n for n, name in enumerate(dict.fromkeys(names))}
    return np.array([seen[name] for name in names], np.int64)


def held_of(problem: Problem, placement: Placement) -> Held:
    """A placement as a plan; servers and layers that the problem has not are left out."""
    held = problem.nothing()
    row = {layer: n for n, layer in enumerate(problem.layers)}
    column = {p.address: n for n, p in enumerate(problem.places)}
    for server in placement.servers:
        if server.address in column:
            for layer, experts in server.layers.items():
                if layer in row:
                    held[row[layer], column[server.address], list(experts)] = True
    return held & problem.exists[:, None, :]


def placement_of(problem: Problem, held: Held, epoch: int = 0, fingerprint: str = "") -> Placement:
    """The inverse."""
    servers = []
    for s, place in enumerate(problem.places):
        found = {n: tuple(np.flatnonzero(held[i, s]).tolist()) for i, n in enumerate(problem.layers)}
        servers.append(Server(place.address, {n: experts for n, experts in found.items() if experts}))
    counts: Mapping[int, int] = dict(zip(problem.layers, problem.num_experts, strict=True))
    return Placement(tuple(servers), counts, epoch, fingerprint)
