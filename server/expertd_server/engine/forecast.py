"""When an answer is to be expected, from what batches took: what admission and the cut go by where requests have
deadlines.  A model of values and times; csrc/forecast.h says the same in C++.

    expected = what runs + what waits before it + its own part of the batch, or what it takes alone
    late     = expected, where what runs and waits counts for SAFETY, + the way to the caller + what went wrong lately
               - what is left of its time

What a batch takes is measured, layer by layer, and known from the warm-up on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["SAFETY", "BatchTimes", "Bounds", "Forecast", "Foreseen", "LayerWork"]

SAFETY = 1.25
"""Work counts for so much more where a request is let in or joins a batch."""
_SMOOTHING = 0.2
_ROWS, _WIDTHS = 33, 10
_HALF_LIFE_NS = 5e9
_FRESH_NS = 1_000_000_000


def _log2_up(n: int, most: int) -> int:
    return min(most, max(0, n - 1).bit_length())


@dataclass(slots=True)
class _Cell:
    """Moving averages of batches of about as many rows."""

    rows: float = 0.0
    ns: float = 0.0
    batches: int = 0


class BatchTimes:
    """Measured time of a layer's batches, by powers of two of their rows and of the routes of a row."""

    def __init__(self) -> None:
        self._columns: list[dict[int, _Cell]] = [{} for _ in range(_WIDTHS)]

    def saw(self, rows: int, top_k: int, ns: int) -> None:
        """A batch took so long."""
        cell = self._columns[_log2_up(top_k, _WIDTHS - 1)].setdefault(_log2_up(rows, _ROWS - 1), _Cell())
        cell.batches += 1
        weight = max(_SMOOTHING, 1 / cell.batches)  # the first ones count alike
        cell.rows += weight * (rows - cell.rows)
        cell.ns += weight * (ns - cell.ns)

    def expect(self, rows: int, top_k: int) -> float:
        """Of a batch of so many rows, in ns; 0.0: nothing is known."""
        wanted = _log2_up(top_k, _WIDTHS - 1)
        for away in range(_WIDTHS):  # wider rows take as long at least, narrower ones in proportion
            if wanted + away < _WIDTHS and self._columns[wanted + away]:
                return _between(self._columns[wanted + away], rows)
            if wanted >= away and self._columns[wanted - away]:
                return _between(self._columns[wanted - away], rows) * (1 << away)
        return 0.0


def _between(cells: dict[int, _Cell], rows: int) -> float:
    """Between the two that are known around it; fewer rows than any take no longer, more in proportion."""
    at = _log2_up(rows, _ROWS - 1)
    low = high = None
    for i in sorted(cells):
        if i < at or (i == at and cells[i].rows <= rows):
            low = cells[i]
        elif high is None:
            high = cells[i]
    if low is None:
        assert high is not None
        return high.ns
    if high is None:
        return low.ns * rows / low.rows
    return low.ns + (high.ns - low.ns) * (rows - low.rows) / (high.rows - low.rows)


class _Slack:
    """How much longer than expected something takes: what was seen, and half as much after each five seconds."""

    def __init__(self) -> None:
        self._ns = 0.0
        self._at_ns = 0

    def at(self, now_ns: int) -> float:
        return self._ns * math.pow(2.0, -(now_ns - self._at_ns) / _HALF_LIFE_NS) if now_ns > self._at_ns else self._ns

    def saw(self, now_ns: int, ns: float) -> None:
        before = self.at(now_ns)
        self._ns = max(ns, before)
        self._at_ns = now_ns


@dataclass(slots=True)
class LayerWork:
    """What waits in the lines of a layer (by router weights on the input), and what its batches take."""

    times: BatchTimes = field(default_factory=BatchTimes)
    top_k: int = 0
    tokens: list[int] = field(default_factory=lambda: [0, 0])
    routes: list[int] = field(default_factory=lambda: [0, 0])
    cost_ns: list[float] = field(default_factory=lambda: [0.0, 0.0])


class Bounds(NamedTuple):
    """What a batch of a layer may take.  times: what it takes; None = nobody asks.  before_ns: until it can begin;
    after_ns: from its end to its callers."""

    now_ns: int
    times: BatchTimes | None = None
    before_ns: float = 0.0
    after_ns: float = 0.0

    def doomed(self, tokens: int, top_k: int, deadline_ns: int) -> bool:
        """Whether a request would be late even if it were computed now and alone."""
        if self.times is None or not deadline_ns:
            return False
        return self.now_ns + self.before_ns + self.times.expect(tokens, top_k) + self.after_ns > deadline_ns

    def in_time(self, tokens: int, top_k: int, deadline_ns: int) -> bool:
        """Whether a batch is computed by a deadline; 0 = none."""
        if self.times is None or not deadline_ns:
            return True
        took_ns = SAFETY * self.times.expect(tokens, top_k)
        return self.now_ns + self.before_ns + took_ns + self.after_ns <= deadline_ns


class Foreseen(NamedTuple):
    """in_ns: when an answer is expected, from now, as a best guess; 0.0 = nothing is known.  late_ns: how long after
    its deadline it may come, allowing for what went wrong lately; <= 0 = in time."""

    in_ns: float = 0.0
    late_ns: float = 0.0


class Forecast:
    """max_tokens: of a batch.  Not thread-safe."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._layers: dict[int, LayerWork] = {}
        self._backlog_ns = 0.0
        self._free_ns = self._seen_ns = self._waiting = self._under_way = 0
        self._slack, self._way_out = _Slack(), _Slack()

    def layer(self, number: int, top_k: int, measured: Iterable[tuple[int, int, int]] = ()) -> LayerWork:
        """It is served from now on.  measured: (rows, top_k, ns) of batches that were run before."""
        work = self._layers.setdefault(number, LayerWork())
        work.top_k = top_k
        for m in measured:
            work.times.saw(*m)
        return work

    def find(self, number: int) -> LayerWork | None:
        return self._layers.get(number)

    def enter(self, number: int, line: int, tokens: int, routes: int) -> None:
        """A request waits from now on."""
        self._waiting += 1
        self._change(number, line, tokens, routes)

    def leave(self, number: int, line: int, tokens: int, routes: int) -> None:
        """A request waits no more."""
        self._waiting -= 1
        self._change(number, line, -tokens, -routes)

    def begin(self, now_ns: int, work: LayerWork, rows: int, top_k: int) -> None:
        """A batch starts."""
        free_ns = max(now_ns, self._free_ns) if self._under_way else now_ns
        self._under_way += 1
        self._free_ns = free_ns + int(work.times.expect(rows, top_k))

    def computed(self, now_ns: int, work: LayerWork, rows: int, top_k: int, ns: int, behind_ns: float) -> None:
        """It took `ns` for itself.  behind_ns: how much later than foreseen the worst of its requests was computed."""
        work.times.saw(rows, top_k, ns)
        self._slack.saw(now_ns, behind_ns)

    def dropped(self, now_ns: int, work: LayerWork, tokens: int, top_k: int, foreseen_ns: int) -> None:
        """A request was not computed because it would be late, although it was expected at foreseen_ns."""
        self._slack.saw(now_ns, now_ns - foreseen_ns + work.times.expect(tokens, top_k))

    def end(self, now_ns: int) -> None:
        """It is over, computed or not."""
        self._under_way -= 1
        self._seen_ns = now_ns

    def went_out(self, now_ns: int, ns: float) -> None:
        """An answer took so long from there to its caller's connection."""
        self._way_out.saw(now_ns, ns)

    def running_ns(self, now_ns: int) -> float:
        """Until what is under way is over.  What should be over already takes as long again."""
        return float(abs(self._free_ns - now_ns)) if self._under_way else 0.0

    @property
    def waiting_ns(self) -> float:
        """What the waiting requests take."""
        return max(0.0, self._backlog_ns)

    def way_out_ns(self, now_ns: int) -> float:
        return self._way_out.at(now_ns)

    def fresh(self, now_ns: int) -> bool:
        """Whether times are not older than a second: else a request is computed whatever is expected, so that an
        estimate that was wrong does not stay so because nothing is computed any more."""
        return bool(self._under_way or (self._seen_ns and now_ns - self._seen_ns < _FRESH_NS))

    def bounds(self, now_ns: int, number: int) -> Bounds:
        """Of a batch of that layer."""
        work = self._layers.get(number)
        times = None if work is None or not self.fresh(now_ns) else work.times
        return Bounds(now_ns, times, self.running_ns(now_ns), self._way_out.at(now_ns))

    def foresee(
        self,
        now_ns: int,
        number: int,
        line: int,
        tokens: int,
        top_k: int,
        deadline_ns: int,
        own_routes: int,
        callers: int,
        all_routes: int,
    ) -> Foreseen:
        """Of a request with a deadline.  own_routes: of its caller that wait; callers: that have something waiting,
        with him; all_routes: that wait."""
        work = self._layers.get(number)
        if work is None or not tokens:
            return Foreseen()
        alone, left = work.times.expect(tokens, top_k), float(deadline_ns - now_ns)
        out = self._way_out.at(now_ns)
        if alone == 0:
            return Foreseen()
        if not self._under_way and not self._waiting:
            return Foreseen(alone, alone + out - left if self.fresh(now_ns) else 0.0)
        routes = tokens * top_k
        running = self.running_ns(now_ns)
        with_it = self._cost(work, work.tokens[line] + tokens, work.routes[line] + routes)
        more = max(0.0, with_it - work.cost_ns[line])
        # In turns: before a caller's last request others had no more than he, and nobody had more than there is.
        part = min(1.0, callers * (own_routes + routes) / (all_routes + routes))
        ahead = self.waiting_ns * part
        slack = min(self._slack.at(now_ns), left / 2)
        careful = SAFETY * running + max(SAFETY * ahead + more, alone) + out + slack
        return Foreseen(running + max(ahead + more, alone), careful - left)

    def _cost(self, work: LayerWork, tokens: int, routes: int) -> float:
        """Of the batches that so much makes."""
        if not tokens:
            return 0.0
        top_k = -(-routes // tokens)
        most = self._max_tokens
        if work.top_k and top_k > work.top_k:
            most = max(1, self._max_tokens * work.top_k // top_k)
        whole, rest = divmod(tokens, most)
        return whole * work.times.expect(most, top_k) + (work.times.expect(rest, top_k) if rest else 0.0)

    def _change(self, number: int, line: int, tokens: int, routes: int) -> None:
        work = self._layers.get(number)
        if work is None:
            return
        work.tokens[line] = max(0, work.tokens[line] + tokens)
        work.routes[line] = max(0, work.routes[line] + routes)
        cost = self._cost(work, work.tokens[line], work.routes[line])
        self._backlog_ns += cost - work.cost_ns[line]
        work.cost_ns[line] = cost
        if not self._waiting:
            self._backlog_ns = 0.0  # and nothing that rounding left of it
