"""Which experts of a layer would better be on another of the devices that share it, by the routing that was counted.

    following = Following(rate=200 << 20)
    following.count(layer, routes, batches, now_s)              what was computed
    found = following.best({layer: (where, surfaces)}, now_s)   the layer that gains most; None: all stays where it is
    following.rest_s(nbytes, took_s)                            how long to move nothing, having moved it

Every device keeps as many experts as it has: two change places.  The device that is expected to take longest gives an
expert that is used much for one that is used little, as long as that makes the layer quicker.  What chance may have
made, and what gains little, moves nothing.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from expertd.common.surface import Surface

# Why it is so: decision 175 in DECISIONS.md.
__all__ = ["Better", "Counted", "Following", "better_shares", "site_us"]

HALF_S = 15.0
"""After which a route counts half."""
_SURE = 6.0
"""How many standard deviations two experts must lie apart: of 16,000 pairs with even routing none does."""
_TIMES = 1.25
"""How many times as much the one that goes to the quicker device must be used."""
_GAIN = 0.03
"""Of a layer's time: what moving must save."""
_CANDIDATES = 8
_MOST = 512
"""Pairs that change places at once."""

Floats = NDArray[np.float64]


class Counted:
    """Routes to each expert of one layer, old ones counting less.  Not thread-safe."""

    def __init__(self, num_experts: int, half_s: float = HALF_S) -> None:
        self.routes: Floats = np.zeros(num_experts)
        self._batches = 0.0
        self._half_s, self._at_s = half_s, 0.0

    def add(self, routes: NDArray[np.int64], batches: int, now_s: float) -> None:
        """routes: [num_experts], of so many batches together."""
        self.fade(now_s)
        self.routes += routes
        self._batches += batches

    def fade(self, now_s: float) -> None:
        """Until now."""
        left = 0.5 ** (max(0.0, now_s - self._at_s) / self._half_s)
        self.routes *= left
        self._batches *= left
        self._at_s = max(self._at_s, now_s)

    @property
    def batch_routes(self) -> float:
        """Of a batch in the mean; 0 = none was counted."""
        return float(self.routes.sum() / self._batches) if self._batches > 1e-6 else 0.0


@dataclass(frozen=True)
class Better:
    """where: [num_experts] device of each expert, -1 = of none; moved: experts that change places; before_us, after_us:
    expected time of the layer."""

    where: NDArray[np.int64]
    moved: int
    before_us: float
    after_us: float

    @property
    def saves(self) -> float:
        """Of the layer's time."""
        return 1.0 - self.after_us / self.before_us if self.before_us else 0.0


class Following:
    """What was counted of all layers, and which of them to move next.  rate: bytes of packed weights a second.  count()
    may be called by another thread."""

    def __init__(self, rate: int, half_s: float = HALF_S) -> None:
        self._rate, self._half_s = rate, half_s
        self._counted: dict[int, Counted] = {}
        self._lock = threading.Lock()

    def count(self, layer: int, routes: NDArray[np.int64], batches: int, now_s: float) -> None:
        """routes: [num_experts] that so many batches of a layer had."""
        with self._lock:
            counted = self._counted.get(layer)
            if counted is None or len(counted.routes) != len(routes):
                counted = self._counted[layer] = Counted(len(routes), self._half_s)
            counted.add(routes, batches, now_s)

    def best(
        self, layers: Mapping[int, tuple[NDArray[np.int64], Sequence[Surface]]], now_s: float
    ) -> tuple[int, Better] | None:
        """layers: where its experts are and what its devices take, see better_shares()."""
        found: tuple[int, Better] | None = None
        for layer, (where, surfaces) in layers.items():
            with self._lock:
                counted = copy.deepcopy(self._counted.get(layer))
            if counted is None:
                continue
            counted.fade(now_s)
            better = better_shares(counted, where, surfaces)
            if better is not None and (found is None or better.saves > found[1].saves):
                found = layer, better
        return found

    def rest_s(self, nbytes: int, took_s: float) -> float:
        """After a move of so many bytes, which took so long."""
        return max(0.0, nbytes / self._rate - took_s)


def site_us(share: Floats, routes: float, where: NDArray[np.int64], surfaces: Sequence[Surface]) -> Floats:
    """[devices] expected time of a batch with so many routes.  share: [num_experts], of the routes."""
    return _State(share, routes, where, surfaces).us


def better_shares(counted: Counted, where: NDArray[np.int64], surfaces: Sequence[Surface]) -> Better | None:
    """where: [num_experts] device of each expert, -1 = of none; surfaces: of each device."""
    routes, total = counted.batch_routes, float(counted.routes.sum())
    if routes <= 0 or total <= 0:
        return None
    state = _State(counted.routes, routes, where, surfaces)
    before = float(state.us.max())
    moved = 0
    while moved < _MOST and state.exchange():
        moved += 1
    better = Better(state.where, int((state.where != where).sum()), before, float(state.us.max()))
    return better if better.moved and better.saves >= _GAIN else None


class _State:
    """us: [devices] expected time of each with the experts that `where` gives it."""

    def __init__(self, counts: Floats, routes: float, where: NDArray[np.int64], surfaces: Sequence[Surface]) -> None:
        share = counts / counts.sum()
        self._counts, self._surfaces = counts, surfaces
        self._hit, self._routes = _hit(share, routes), share * routes
        self.where = where.copy()
        sites = range(len(surfaces))
        self._reached = np.array([self._hit[where == s].sum() for s in sites])
        self._taken = np.array([self._routes[where == s].sum() for s in sites])
        self.us = np.array([self._one(s) for s in sites])

    def exchange(self) -> bool:
        """The two experts whose change of places helps most.  False: none helps."""
        slow = int(self.us.argmax())
        found: tuple[float, int, int, int] | None = None
        for site in range(len(self._surfaces)):
            if site != slow and (pair := self._best(slow, site)) is not None and (found is None or pair[0] < found[0]):
                found = (*pair, site)
        if found is None:
            return False
        _, gives, takes, site = found
        self.where[gives], self.where[takes] = site, slow
        for at, sign in ((slow, 1.0), (site, -1.0)):
            self._reached[at] += sign * (self._hit[takes] - self._hit[gives])
            self._taken[at] += sign * (self._routes[takes] - self._routes[gives])
            self.us[at] = self._one(at)
        return True

    def _best(self, slow: int, site: int) -> tuple[float, int, int] | None:
        """(time of the slower of both, expert that goes, expert that comes)."""
        mine, others = np.flatnonzero(self.where == slow), np.flatnonzero(self.where == site)
        if not len(mine) or not len(others):
            return None
        gives = mine[np.argsort(-self._counts[mine], kind="stable")[:_CANDIDATES]][:, None]
        takes = others[np.argsort(self._counts[others], kind="stable")[:_CANDIDATES]][None, :]
        more, fewer = self._counts[gives], self._counts[takes]
        sure = (more - fewer > _SURE * np.sqrt(more + fewer)) & (more >= _TIMES * fewer)
        hit, routes = self._hit[gives] - self._hit[takes], self._routes[gives] - self._routes[takes]
        times = np.maximum(
            _us(self._surfaces[slow], self._reached[slow] - hit, self._taken[slow] - routes),
            _us(self._surfaces[site], self._reached[site] + hit, self._taken[site] + routes),
        )
        times = np.where(sure, times, np.inf)
        at = np.unravel_index(int(times.argmin()), times.shape)
        if times[at] >= self.us[slow] * (1 - 1e-6):
            return None
        return float(times[at]), int(gives[at[0], 0]), int(takes[0, at[1]])

    def _one(self, site: int) -> float:
        at = slice(site, site + 1)
        return float(_us(self._surfaces[site], self._reached[at], self._taken[at])[0])


def _hit(share: Floats, routes: float) -> Floats:
    """How likely a batch with so many routes reaches each expert."""
    out: Floats = -np.expm1(routes * np.log1p(-np.minimum(share, 1 - 1e-12)))
    return out


def _us(surface: Surface, reached: Floats, routes: Floats) -> Floats:
    """Where fewer than one expert is reached in the mean: seldom as long as with one."""
    reached = np.maximum(reached, 0.0)
    times = surface(np.maximum(reached, 1.0), np.maximum(routes, np.maximum(reached, 1.0)))
    out: Floats = np.minimum(reached, 1.0) * times
    return out
