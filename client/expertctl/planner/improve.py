"""A better plan by few moves from the one that is there.

A move is an expert that a server has to load.  Of these, which take work from the busiest server of a layer, the one
that takes most from the layer's longest time for each move is done first:

    copy       another server gets a replica of one of its experts (1 move)
    give       another server gets the expert instead of it (1 move)
    replace    as copy, at a full server that lets go of an expert which others hold, too (1 move)
    swap       it gives an expert and gets a lighter one (2 moves)

Whatever goes is still held by somebody, and nothing goes where the expert's other replicas are, while there is another
host or zone.  Time of an expert: its routes over the speed of its replicas together, for each of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from expertctl.planner.problem import Held, Problem

__all__ = ["improve"]

_GAIN = 1e-6
"""Of the longest time, the least that a move must take away."""


@dataclass(frozen=True, slots=True)
class _Step:
    """Server `giver` lets go of `gives` (-1: keeps it, `copies` goes to `taker`); `taker` lets go of `drops` (-1: of
    nothing), which goes to `giver` where `back`."""

    expert: int
    giver: int
    taker: int
    keeps: bool
    drops: int
    back: bool

    @property
    def moves(self) -> int:
        return 2 if self.back else 1


def improve(problem: Problem, held: Held, most: int | None = None, least: int = 1, extra: int | None = None) -> int:
    """Changes `held` by at most so many moves, None = as many as help.  How many it took.

    least: copies of an expert that stay; extra: copies of a layer beyond those of all experts, None = what there is
    room for"""
    layers = [_Layer(problem, held, n, least, extra) for n in range(len(held))]
    queue: list[tuple[float, int]] = []
    found: list[_Step | None] = [None] * len(layers)

    def look(n: int, left: int) -> None:
        gain, found[n] = layers[n].best(left)
        if found[n] is not None:
            heapq.heappush(queue, (-gain, n))

    left = most if most is not None else 1 << 40
    for n in range(len(layers)):
        look(n, left)
    taken = 0
    while queue and left:
        _, n = heapq.heappop(queue)
        step = found[n]
        if step is None:
            continue
        if step.moves <= left:
            layers[n].do(step)
            taken += step.moves
            left -= step.moves
        look(n, left)
    return taken


def _unused(replicas: NDArray[np.bool_], label: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[n, S]: servers whose label none of `replicas` [n, S] has."""
    used = np.zeros((len(replicas), int(label.max(initial=0)) + 1), np.bool_)
    row, server = np.nonzero(replicas)
    used[row, label[server]] = True
    out: NDArray[np.bool_] = ~used[:, label]
    return out


class _Layer:
    """One layer of a plan: held [S, E] is a view of it."""

    def __init__(self, problem: Problem, held: Held, n: int, least: int, extra: int | None) -> None:
        self._problem = problem
        self._least = least
        self._most = held[n].size if extra is None else least * problem.num_experts[n] + extra
        self._held = held[n]
        self._load, self._slots = problem.load[n], np.maximum(problem.slots[n], held[n].sum(axis=1))
        self._slots = np.where(problem.slots[n] > 0, self._slots, 0)
        self._weigh()

    def _weigh(self) -> None:
        held, speed = self._held, self._problem.speed
        self._count = held.sum(axis=0)
        self._speed_of = np.where(self._count > 0, speed @ held, 1.0)  # of an expert's replicas together
        self._time = np.where(self._count > 0, self._load / self._speed_of, 0.0)
        self._busy = held @ self._time
        self._free = self._slots > held.sum(axis=1)

    def best(self, moves: int) -> tuple[float, _Step | None]:
        """The gain for each move of the best step of at most so many moves, and it; (0, None): there is none."""
        if not moves or not len(self._busy):
            return 0.0, None
        giver = int(self._busy.argmax())
        peak = float(self._busy[giver])
        others = float(np.delete(self._busy, giver).max(initial=0.0))
        best: tuple[float, _Step | None] = (_GAIN * peak, None)
        for step, after in self._steps(giver, moves):
            gain = (peak - max(after, min(others, peak))) + 1e-3 * (peak - after)  # the second part settles ties
            if gain / step.moves > best[0] and after < peak * (1 - _GAIN):
                best = (gain / step.moves, step)
        return best if best[1] is not None else (0.0, None)

    def _steps(self, giver: int, moves: int) -> Iterator[tuple[_Step, float]]:
        """The best step of each kind, and the longer of the two servers' times after it."""
        mine = np.flatnonzero(self._held[giver] & (self._time > 0))
        if not len(mine):
            return
        held, speed, busy, time = self._held, self._problem.speed, self._busy, self._time
        there = held[:, mine].T  # [n, S]
        load, of = self._load[mine, None], self._speed_of[mine, None]
        alone = there.copy()
        alone[:, giver] = False
        may_copy, may_give = self._may(there), self._may(alone)
        copied = load / (of + speed)  # [n, S]: the expert's time with that server, too
        given = load / (of - speed[giver] + speed)
        peak_copy = np.maximum(busy[giver] - time[mine, None] + copied, busy + copied)
        peak_give = np.maximum(busy[giver] - time[mine, None], busy + given)
        others = (self._count[mine] > 1)[:, None]
        grown = np.where(others, np.where(alone, busy, 0.0).max(axis=1, keepdims=True) + given - time[mine, None], 0.0)
        peak_give = np.maximum(peak_give, grown)
        if held.sum() < self._most:
            yield from _least(np.where(may_copy & self._free, peak_copy, np.inf), mine, giver, keeps=True)
        yield from _least(np.where(may_give & self._free, peak_give, np.inf), mine, giver, keeps=False)
        yield from self._replacing(giver, mine, may_copy, copied)
        if moves >= 2:
            yield from self._swaps(giver, mine, may_give, given)

    def _may(self, replicas: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """[n, S]: where one more replica may be."""
        there = (self._slots > 0) & ~replicas
        may: NDArray[np.bool_] = there & _unused(replicas, self._problem.zone_of)
        for wider in (there & _unused(replicas, self._problem.host_of), there):
            none = ~may.any(axis=1)
            may[none] = wider[none]
        return may

    def _replacing(
        self, giver: int, mine: NDArray[np.int64], may: NDArray[np.bool_], copied: NDArray[np.float64]
    ) -> Iterator[tuple[_Step, float]]:
        """A replica in the place of the lightest expert of a full server that others hold, too."""
        held, busy, time, speed = self._held, self._busy, self._time, self._problem.speed
        full = np.flatnonzero(~self._free)
        spare = held[full] & (self._count > self._least)
        spare[:, mine] = False  # what the giver holds would come back to it
        weight = np.where(spare, time, np.inf)
        light = weight.argmin(axis=1)
        possible = np.isfinite(weight[np.arange(len(full)), light])
        full, light = full[possible], light[possible]
        if not len(full):
            return
        more = self._load[light] / np.maximum(self._speed_of[light] - speed[full], 1e-300) - time[light]
        replicas = held[:, light]
        replicas[full, np.arange(len(full))] = False
        others = np.where(replicas, busy[:, None], 0.0).max(axis=0) + more  # those who get what goes
        peak = np.maximum(busy[giver] - time[mine, None] + copied[:, full], busy[full] - time[light] + copied[:, full])
        peak = np.where(may[:, full], np.maximum(peak, others), np.inf)
        i, j = divmod(int(peak.argmin()), len(full))
        if np.isfinite(peak[i, j]):
            yield _Step(int(mine[i]), giver, int(full[j]), True, int(light[j]), False), float(peak[i, j])

    def _swaps(
        self, giver: int, mine: NDArray[np.int64], may: NDArray[np.bool_], given: NDArray[np.float64]
    ) -> Iterator[tuple[_Step, float]]:
        """An expert of the busiest server for a lighter one of another; no third server's time changes."""
        held, busy, speed = self._held, self._busy, self._problem.speed
        alike, single = speed == speed[giver], self._count == 1
        takers, theirs = np.nonzero(held & ~held[giver] & (single | alike[:, None]))
        if not len(takers):
            return
        ok = may[:, takers] & ~held[takers][:, mine].T & (single[mine][:, None] | alike[takers])
        back = self._load[theirs] / (self._speed_of[theirs] - speed[takers] + speed[giver])
        peak = np.maximum(
            busy[giver] - self._time[mine, None] + back, busy[takers] - self._time[theirs] + given[:, takers]
        )
        peak = np.where(ok, peak, np.inf)
        i, j = divmod(int(peak.argmin()), len(takers))
        if np.isfinite(peak[i, j]):
            yield _Step(int(mine[i]), giver, int(takers[j]), False, int(theirs[j]), True), float(peak[i, j])

    def do(self, step: _Step) -> None:
        held = self._held
        held[step.taker, step.expert] = True
        if not step.keeps:
            held[step.giver, step.expert] = False
        if step.drops >= 0:
            held[step.taker, step.drops] = False
        if step.back:
            held[step.giver, step.drops] = True
        self._weigh()


def _least(
    peak: NDArray[np.float64], mine: NDArray[np.int64], giver: int, keeps: bool
) -> Iterator[tuple[_Step, float]]:
    """The step with the least peak [n, S], if there is one."""
    i, s = divmod(int(peak.argmin()), peak.shape[1])
    if np.isfinite(peak[i, s]):
        yield _Step(int(mine[i]), giver, s, keeps, -1, False), float(peak[i, s])
