"""What runs next: a pure function of the waiting requests, the time and a policy.

Requests wait in lines, one for each layer as it was held when they came and for router weights on the input: those of
one line can be computed as one batch, whichever client they came from and whatever their top_k and dtypes are (narrower
rows are padded with routes of -1).
The engine cuts a batch whenever it is free, so requests wait while it is busy, and the busier it is the larger the
batches get.  One short wait is worth its price: callers that were just answered together come back one by one.  Were
the first of them computed alone, 8 callers in a closed loop would alternate between batches of 1 and of 7 for ever.  So
for a part of the last batch's time (`patience`) the engine waits for as many requests as that batch had; whenever that
was in vain the part is halved (`trust_after`), so callers that do not come back cost next to nothing.

Fair: what fits into one batch is computed together, whoever asks.  What does not is taken turn by turn from the caller
who was served least (`Shares`), and a line waits the longer the more its callers were served: so a caller who floods
one layer or all of them holds up nobody but himself.

In time: where it is known what batches take (`forecast`), a request that would be late even alone is dropped before it
is computed, and a batch grows no further than to where one of it would be late.  csrc/lines.cpp says the same in C++.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from expertd_server.engine.admission import Amount
from expertd_server.engine.forecast import Bounds, Forecast
from expertd_server.engine.request import Request

__all__ = ["Cut", "LastBatch", "Line", "Policy", "Shares", "Waiting", "cut", "trust_after", "urgency", "wake_at"]

_SLACK_NS = 100_000_000
"""A request without a deadline is as urgent as one whose deadline is so long after its arrival."""
_SMOOTHING = 0.2
_REMEMBERED = 4096
"""Callers whose shares are kept while they have nothing waiting."""
_LEAST_TRUST = 1 / 16
"""What is left of the patience with callers that never come back: enough to notice when they do again."""


class Line(NamedTuple):
    """Requests that fit into one batch.  generation: ServedLayer's."""

    generation: int
    router_weight_on_input: bool


@dataclass(frozen=True)
class Policy:
    """max_tokens: of a batch (one larger request makes a batch alone).  max_wait_ns: how long a request may wait for
    company while the engine is idle; 0 = not at all.  patience: part of the last batch's time that the engine waits for
    the callers it has just answered; 0 = none."""

    max_tokens: int
    max_wait_ns: int = 0
    patience: float = 0.0


class LastBatch(NamedTuple):
    """The batch that was finished last: when, how long it took, of how many requests.  trust: from 0 to 1, part of the
    patience that its callers get."""

    end_ns: int
    service_ns: int
    requests: int
    trust: float = 1.0


class Cut(NamedTuple):
    """`run` and `dead` leave `line`: `run` are computed together, `dead` (cancelled, expired or doomed) are answered
    with an error."""

    line: Line
    run: tuple[Request, ...]
    dead: tuple[Request, ...]


class Shares:
    """Routes that each caller was served.  A caller who comes, or comes back, starts where the least served of those
    that wait is: nobody can save up.  Not thread-safe."""

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._floor = 0
        self._route_ns = 0.0

    def of(self, caller: str) -> int:
        return max(self._served.get(caller, 0), self._floor)

    def lag_ns(self, caller: str) -> int:
        """How long ago a caller would have to have come to be as urgent as one who was served least: the time that
        his larger share took."""
        return int((self.of(caller) - self._floor) * self._route_ns)

    def settle(self, waiting: Iterable[str]) -> None:
        """Before a cut: those who wait."""
        self._floor = max(self._floor, min(map(self.of, waiting), default=0))

    def serve(self, requests: Iterable[Request]) -> None:
        """After it: those who are computed."""
        for r in requests:
            self._served[r.caller] = self.of(r.caller) + r.routes
        if len(self._served) > _REMEMBERED:
            self._served = {c: n for c, n in self._served.items() if n > self._floor}
            if len(self._served) > _REMEMBERED:
                self._served.clear()

    def saw(self, routes: int, ns: int) -> None:
        """What a batch took."""
        each = ns / max(1, routes)
        self._route_ns = each if not self._route_ns else self._route_ns + _SMOOTHING * (each - self._route_ns)


def urgency(r: Request) -> int:
    """The sooner, the more urgent."""
    usual = r.arrival_ns + _SLACK_NS
    return r.deadline_ns if r.deadline_ns and r.deadline_ns < usual else usual


def cut(
    lines: Mapping[Line, Sequence[Request]],
    now_ns: int,
    policy: Policy,
    last: LastBatch | None = None,
    shares: Shares | None = None,
    forecast: Forecast | None = None,
) -> Cut | None:
    """The batch to run now: of the line with the most urgent request, where urgency is put off by what its caller was
    served more than others; all of it where that is one batch and none of it would be late, in order of arrival, else
    as `_turn_by_turn`.  None when nothing waits, or nothing has waited long enough.  Empty lines are not allowed.
    forecast: None = nobody asks what batches take."""
    shares = shares or Shares()
    company_ns = _company_until(lines, policy, last)
    for line in _in_order(lines, shares) if len(lines) > 1 else lines:
        layer = lines[line][0].layer
        bounds = Bounds(now_ns) if forecast is None else forecast.bounds(now_ns, layer.layer)
        alive: list[Request] = []
        dead: list[Request] = []
        all_ = _Size()
        for r in lines[line]:
            if r.cancelled or r.expired(now_ns) or bounds.doomed(r.tokens, r.top_k, r.deadline_ns):
                dead.append(r)
            else:
                alive.append(r)
                all_ = all_.plus(r)
        most = policy.max_tokens
        fits = len(alive) <= 1 or (all_.fits(most, layer.top_k) and all_.in_time(bounds, all_.deadline_ns))
        run = alive if fits else _turn_by_turn(alive, most, bounds, shares)
        full = not fits or all_.tokens >= most
        if full or not run or now_ns >= max(run[0].arrival_ns + policy.max_wait_ns, company_ns):
            return Cut(line, tuple(run), tuple(dead))
    return None


def _in_order(lines: Mapping[Line, Sequence[Request]], shares: Shares) -> list[Line]:
    lag_ns = {caller: shares.lag_ns(caller) for caller in {r.caller for q in lines.values() for r in q}}
    return sorted(lines, key=lambda line: min(urgency(r) + lag_ns[r.caller] for r in lines[line]))


class _Size(NamedTuple):
    """Of a batch that grows.  deadline_ns: the earliest, 0 = none."""

    tokens: int = 0
    top_k: int = 0
    deadline_ns: int = 0

    def plus(self, r: Request) -> _Size:
        deadlines = [d for d in (self.deadline_ns, r.deadline_ns) if d]
        return _Size(self.tokens + r.tokens, max(self.top_k, r.top_k), min(deadlines, default=0))

    def fits(self, max_tokens: int, top_k: int) -> bool:
        """Whether it is one batch: it takes no more than max_tokens rows of the layer's own top_k."""
        return self.tokens <= max_tokens and self.tokens * self.top_k <= max_tokens * max(1, top_k)

    def in_time(self, bounds: Bounds, deadline_ns: int) -> bool:
        return bounds.in_time(self.tokens, self.top_k, deadline_ns)


def _turn_by_turn(alive: Sequence[Request], max_tokens: int, bounds: Bounds, shares: Shares) -> list[Request]:
    """A batch of some of them: always the most urgent request of the caller served least, until one does not fit, or
    makes those that were taken late.  One that only would be late itself waits for another turn.  The first is taken
    whatever its size."""
    of: dict[str, list[Request]] = {}
    for r in sorted(alive, key=urgency)[::-1]:  # the next of each stands last; of equals the one that came first
        of.setdefault(r.caller, []).append(r)
    turns = [(shares.of(caller), urgency(q[-1]), n, q) for n, (caller, q) in enumerate(of.items())]
    heapq.heapify(turns)
    run: list[Request] = []
    size = _Size()
    while turns:
        served, _, n, q = turns[0]
        r = q.pop()
        more = size.plus(r)
        if run and not (more.fits(max_tokens, r.layer.top_k) and more.in_time(bounds, size.deadline_ns)):
            break
        if not run or more.in_time(bounds, more.deadline_ns):
            run.append(r)
            size, served = more, served + r.routes
        if q:
            heapq.heapreplace(turns, (served, urgency(q[-1]), n, q))
        else:
            heapq.heappop(turns)
    return run


def wake_at(lines: Mapping[Line, Sequence[Request]], policy: Policy, last: LastBatch | None = None) -> int | None:
    """When `cut` will next have something although nothing else happens, in ns; None = never."""
    heads = [q[0].arrival_ns for q in lines.values()]
    if not heads:
        return None
    return max(min(heads) + policy.max_wait_ns, _company_until(lines, policy, last))


def _company_until(lines: Mapping[Line, Sequence[Request]], policy: Policy, last: LastBatch | None) -> int:
    """Until when the callers of the last batch are waited for, in ns; 0 = they are back."""
    if last is None or sum(map(len, lines.values())) >= last.requests:
        return 0
    return last.end_ns + int(policy.patience * last.trust * last.service_ns)


def trust_after(trust: float, came: int, expected: int) -> float:
    """The trust after a wait for `expected` requests of which `came`: doubled if all did, halved if not."""
    return min(1.0, 2 * trust) if came >= expected else max(_LEAST_TRUST, trust / 2)


class Waiting:
    """The lines and their totals.  Not thread-safe: the engine holds its lock around each call.

    all, of: what stands in a line, of all callers and of each, cancelled requests included until they are cut or swept
    forecast: is told who comes and goes
    """

    def __init__(self, forecast: Forecast | None = None) -> None:
        self._forecast = forecast or Forecast(1)
        self.lines: dict[Line, deque[Request]] = {}
        self.all = Amount()
        self.of: dict[str, Amount] = {}

    @property
    def tokens(self) -> int:
        return self.all.tokens

    @property
    def requests(self) -> int:
        return self.all.requests

    def push(self, r: Request) -> None:
        line = Line(r.layer.generation, r.router_weight_on_input)
        q = self.lines.get(line)
        if q is None:
            q = self.lines[line] = deque()
        q.append(r)
        self.all = self.all.plus(r)
        self.of[r.caller] = self.of.get(r.caller, Amount()).plus(r)
        self._forecast.enter(r.layer.layer, int(r.router_weight_on_input), r.tokens, r.routes)

    def remove(self, c: Cut) -> None:
        """Take out what `cut` chose."""
        q = self.lines[c.line]
        gone = {id(r) for r in (*c.run, *c.dead)}
        for r in (*c.run, *c.dead):
            self._leave(r)
        if len(gone) == len(q):
            del self.lines[c.line]
        else:
            self.lines[c.line] = deque(r for r in q if id(r) not in gone)

    def sweep(self, now_ns: int) -> list[Request]:
        """Take out every cancelled and expired request, to be answered."""
        dead: list[Request] = []
        for line, q in list(self.lines.items()):
            alive: deque[Request] = deque()
            for r in q:
                if r.cancelled or r.expired(now_ns):
                    self._leave(r)
                    dead.append(r)
                else:
                    alive.append(r)
            if alive:
                self.lines[line] = alive
            else:
                del self.lines[line]
        return dead

    def clear(self) -> list[Request]:
        """Take out everything."""
        out = [r for q in self.lines.values() for r in q]
        self.lines.clear()
        for r in out:
            self._leave(r)
        return out

    def _leave(self, r: Request) -> None:
        self.all = self.all.minus(r)
        self._forecast.leave(r.layer.layer, int(r.router_weight_on_input), r.tokens, r.routes)
        own = self.of[r.caller].minus(r)
        if own.requests:
            self.of[r.caller] = own
        else:
            del self.of[r.caller]
