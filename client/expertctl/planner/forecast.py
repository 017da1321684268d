"""What a plan makes of a load: how long each server computes, where clients choose the replica that answers sooner.

    step_s     of each layer: the time of its busiest server; a layer is done when its slowest part is
    busy_s     of each server, over all layers
    rate       routes a second, when the busiest server never waits

Clients send a route to the replica with the shorter queue, so under load the queues of servers that share experts are
as long: routes are moved from the longer to the shorter until no move helps (`shares`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from expertctl.planner.problem import Held, Problem

__all__ = ["Forecast", "evenly", "forecast"]

_STEPS = 200
_CLOSE = 1e-3
"""Relative: how near to the best known step it ends."""


@dataclass(frozen=True)
class Forecast:
    """work: [L, S], seconds that each server computes for the load of a problem; copies: experts held, replicas too."""

    work: NDArray[np.float64]
    routes: float
    copies: int

    @property
    def step_s(self) -> NDArray[np.float64]:
        longest: NDArray[np.float64] = self.work.max(axis=1)
        return longest

    @property
    def busy_s(self) -> NDArray[np.float64]:
        total: NDArray[np.float64] = self.work.sum(axis=0)
        return total

    @property
    def rate(self) -> float:
        """Of calls that never wait for each other."""
        busiest_s = float(self.busy_s.max(initial=0.0))
        return self.routes / busiest_s if busiest_s else 0.0

    @property
    def balance(self) -> float:
        """Mean over time by layer of what servers compute, of what the busiest does: 1 = all are busy all the time."""
        return float(self.work.mean(axis=1).sum() / max(1e-300, self.step_s.sum()))


def evenly(problem: Problem, held: Held) -> NDArray[np.float64]:
    """[L, S]: seconds of work, where each replica of an expert has it for as long: routes in proportion to speed."""
    time_s = _time_s(problem, held)
    work: NDArray[np.float64] = np.einsum("lse,le->ls", held, time_s)
    return work


def _time_s(problem: Problem, held: Held) -> NDArray[np.float64]:
    """[L, E]: seconds for which each replica of an expert has to do with it."""
    speed = np.einsum("lse,s->le", held, problem.speed)
    time_s: NDArray[np.float64] = np.where(speed > 0, problem.load / np.where(speed > 0, speed, 1.0), 0.0)
    return time_s


def forecast(problem: Problem, held: Held) -> Forecast:
    """Of a plan.  Experts that nobody holds count nothing."""
    layers, servers, _ = held.shape
    row, server, expert = np.nonzero(held)
    time_s = _time_s(problem, held)
    alone = held.sum(axis=1)[row, expert] == 1
    cell = row * servers + server
    fixed = np.bincount(cell[alone], time_s[row, expert][alone], layers * servers).astype(np.float64)
    row, server, expert, cell = (x[~alone] for x in (row, server, expert, cell))
    work: NDArray[np.float64] = fixed + np.bincount(cell, time_s[row, expert], layers * servers)
    work = work.reshape(layers, servers)
    if len(cell):
        work = _shared(problem, fixed, work, (row, server, expert, cell))
    return Forecast(work, float((problem.load * held.any(axis=1)).sum()), int(held.sum()))


def _shared(
    problem: Problem,
    fixed: NDArray[np.float64],
    work: NDArray[np.float64],
    replicas: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
) -> NDArray[np.float64]:
    """[L, S]: the work when shares of replicas have settled; of each layer, the best that was found.

    fixed: [L * S], of experts with one replica; work: to begin with; replicas: (layer, server, expert, layer * S +
    server) of the others"""
    row, server, expert, cell = replicas
    shape, experts = work.shape, problem.load.shape[1]
    key = row * experts + expert
    speed, load = problem.speed[server], problem.load[row, expert]
    share = speed / np.bincount(key, speed, shape[0] * experts)[key]
    best: NDArray[np.float64] = work.copy()
    for n in range(_STEPS):
        mean = np.maximum(work.mean(axis=1), 1e-300)
        longer = work.ravel()[cell] / mean[row]
        share = share * np.exp(-(0.5 * 0.98**n) * np.clip(longer - 1.0, -2.0, 2.0))
        share /= np.maximum(np.bincount(key, share, shape[0] * experts)[key], 1e-300)
        work = (fixed + np.bincount(cell, share * load / speed, shape[0] * shape[1])).reshape(shape)
        better = work.max(axis=1) < best.max(axis=1)
        best[better] = work[better]
        if (work.max(axis=1) <= mean * (1 + _CLOSE)).all():
            break
    return best
