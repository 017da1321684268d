"""More requests than can be computed, each with a deadline: admission, cut and forecast on a clock of their own.

The kernel is a function of rows; nothing here waits, so the figures are the rules' own and the same on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from expertd_server.engine.admission import Amount, Queue, QueueLimits, State, admit
from expertd_server.engine.forecast import Forecast
from expertd_server.engine.request import Operand, Request
from expertd_server.engine.scheduler import Policy, Shares, Waiting, cut
from expertd_server.engine.served import ServedLayer

pytestmark = pytest.mark.timeout(30)

NOTHING = Operand("bf16", np.empty(0, np.uint16))
LAYERS = [ServedLayer(n, 8, range(8), 4, 16, 32, None, "none") for n in range(4)]
MS = 1_000_000
LIMITS = QueueLimits()

Kernel = Callable[[int, random.Random], int]


def steep(rows: int, rng: random.Random) -> int:
    """In proportion to its rows."""
    return int((MS + 0.9 * MS * rows) * rng.uniform(0.95, 1.05))


def flat(rows: int, rng: random.Random) -> int:
    """Weights that are read once, whatever the rows are."""
    return int((20 * MS + 0.3 * MS * rows) * rng.uniform(0.95, 1.05))


def unsteady(rows: int, rng: random.Random) -> int:
    """One batch of 50 takes twice as long."""
    return steep(rows, rng) * (2 if rng.random() < 0.02 else 1)


class Server:
    """A server's rules, and the times at which requests were answered."""

    def __init__(self, kernel: Kernel, seed: int = 0, refuse_late: bool = True) -> None:
        self.kernel, self.rng = kernel, random.Random(seed)
        self.limits = LIMITS._replace(refuse_late=refuse_late)
        self.forecast = Forecast(4096)
        warm = [(rows, 4, kernel(rows, self.rng)) for rows in (1, 32)]
        self.works = {s.layer: self.forecast.layer(s.layer, s.top_k, warm) for s in LAYERS}
        self.waiting, self.shares = Waiting(self.forecast), Shares()
        self.batch: Sequence[Request] = ()
        self.over_ns = self.begun_ns = 0
        self.took_ns: list[tuple[Request, int]] = []  # computed: when
        self.dropped: list[Request] = []

    def come(self, r: Request, now: int) -> bool:
        """Whether it is taken."""
        r.arrival_ns = r.queued_ns = now
        own, late_ns = self.waiting.of.get(r.caller, Amount()), 0.0
        if r.deadline_ns:
            callers = len(self.waiting.of) + (not own.requests)
            seen = self.forecast.foresee(
                now, r.layer.layer, 0, r.tokens, r.top_k, r.deadline_ns, own.routes, callers, self.waiting.all.routes
            )
            late_ns, r.foreseen_ns = seen.late_ns, now + int(seen.in_ns) if seen.in_ns else 0
        refusal = admit(Queue(State.SERVING, self.waiting.all, own, 0.0, late_ns), r, now, self.limits)
        if refusal is None:
            self.waiting.push(r)
            self.start(now)
        return refusal is None

    def start(self, now: int) -> None:
        """The next batch, if none is under way."""
        while not self.batch and self.waiting.lines:
            self.shares.settle(self.waiting.of)
            forecast = self.forecast if self.limits.refuse_late else None
            c = cut(self.waiting.lines, now, Policy(4096), None, self.shares, forecast)
            assert c is not None
            self.waiting.remove(c)
            self.shares.serve(c.run)
            self.dropped += c.dead
            for r in c.dead:
                if r.foreseen_ns:
                    self.forecast.dropped(now, self.works[r.layer.layer], r.tokens, r.top_k, r.foreseen_ns)
            if c.run:
                rows, k = sum(r.tokens for r in c.run), max(r.top_k for r in c.run)
                self.forecast.begin(now, self.works[c.run[0].layer.layer], rows, k)
                self.batch, self.begun_ns = c.run, now
                self.over_ns = now + self.kernel(rows * k // 4, self.rng)

    def end(self) -> None:
        """The batch under way is over."""
        now, run = self.over_ns, self.batch
        rows, k = sum(r.tokens for r in run), max(r.top_k for r in run)
        behind = max((now - r.foreseen_ns for r in run if r.foreseen_ns), default=0)
        self.forecast.computed(now, self.works[run[0].layer.layer], rows, k, now - self.begun_ns, behind)
        self.forecast.end(now)
        self.shares.saw(sum(r.routes for r in run), now - self.begun_ns)
        self.took_ns += [(r, now) for r in run]
        self.batch = ()
        self.start(now)


def request(tokens: int, deadline_ns: int, caller: str, layer: int = 0, top_k: int = 4) -> Request:
    return Request(
        LAYERS[layer], tokens, top_k, NOTHING, NOTHING, None, lambda *_: None, caller=caller, deadline_ns=deadline_ns
    )


def offered(s: Server, rate: float, seconds: float, deadline_ns: int, tokens: Sequence[int] = (8,), layers: int = 1):
    """Requests that came and that were taken, of four callers in an open loop."""
    rng, now, came, taken = random.Random(7), 0, 0, []
    while now < seconds * 1e9:
        now += int(rng.expovariate(rate) * 1e9)
        while s.batch and s.over_ns <= now:
            s.end()
        r = request(
            rng.choice(tokens), now + deadline_ns if deadline_ns else 0, "abcd"[came % 4], rng.randrange(layers)
        )
        came += 1
        if s.come(r, now):
            taken.append(r)
    while s.batch:
        s.end()
    return came, taken


def peak(kernel: Kernel, in_flight: int = 32, tokens: Sequence[int] = (8,), layers: int = 1) -> float:
    """Answers a second in a closed loop."""
    s, rng = Server(kernel, refuse_late=False), random.Random(3)
    for n in range(in_flight):
        s.come(request(rng.choice(tokens), 0, "abcd"[n % 4], rng.randrange(layers)), 0)
    while s.over_ns < 5e9:
        before = len(s.took_ns)
        s.end()
        for r, now in s.took_ns[before:]:
            s.come(request(rng.choice(tokens), 0, r.caller, rng.randrange(layers)), now)
    return len(s.took_ns) / (s.over_ns * 1e-9)


def normal_p99(kernel: Kernel, rate: float, **how) -> int:
    s = Server(kernel)
    offered(s, rate, 5, 0, **how)
    took = sorted(now - r.arrival_ns for r, now in s.took_ns)
    return took[int(0.99 * len(took))]


def outcome(kernel: Kernel, load: float, **how) -> tuple[float, float]:
    """(goodput as part of the peak, part of the admitted that were late or dropped), deadlines four times the normal
    p99."""
    most = peak(kernel, **how)
    deadline_ns = 4 * normal_p99(kernel, most / 2, **how)
    s = Server(kernel)
    _, taken = offered(s, load * most, 20, deadline_ns, **how)
    good = sum(now <= r.deadline_ns for r, now in s.took_ns)
    assert len(s.took_ns) + len(s.dropped) == len(taken)
    return good / 20 / most, 1 - good / len(taken)


SHAPES = {"of one size": {}, "of three sizes": {"tokens": (4, 8, 16)}, "of four layers": {"layers": 4}}


@pytest.mark.parametrize("load", [2, 10])
@pytest.mark.parametrize("kernel", [steep, flat])
@pytest.mark.parametrize("shape", SHAPES)
def test_goodput_stays_and_what_was_taken_is_in_time(shape, kernel, load):
    goodput, late = outcome(kernel, load, **SHAPES[shape])
    assert goodput >= 0.9
    assert late <= 0.005


@pytest.mark.parametrize("load", [2, 10])
def test_batches_that_take_twice_as_long_now_and_then_are_late_themselves_and_not_many_others(load):
    goodput, late = outcome(unsteady, load)
    assert goodput >= 0.9
    assert late <= 0.02


def test_without_it_hardly_anything_is_in_time():
    """What the rules are for: the same load on a server that only looks whether a deadline has passed."""
    most = peak(steep)
    deadline_ns = 4 * normal_p99(steep, most / 2)
    s = Server(steep, refuse_late=False)
    offered(s, 2 * most, 10, deadline_ns)
    assert sum(now <= r.deadline_ns for r, now in s.took_ns) / 10 < 0.5 * most


def test_one_who_floods_does_not_take_the_place_of_one_who_asks_for_little():
    """Ten times the peak from one caller, a tenth of it from another."""
    most, rng = peak(steep), random.Random(5)
    s, now, asked, got = Server(steep), 0, 0, 0
    while now < 10e9:
        now += int(rng.expovariate(10.1 * most) * 1e9)
        while s.batch and s.over_ns <= now:
            s.end()
        modest = rng.random() < 0.1 / 10.1
        taken = s.come(request(8, now + 200 * MS, "modest" if modest else "greedy"), now)
        asked, got = asked + modest, got + (modest and taken)
    assert got >= 0.8 * asked > 50
    late = [r for r, at in s.took_ns if r.caller == "modest" and at > r.deadline_ns]
    assert len(late) + sum(r.caller == "modest" for r in s.dropped) <= 0.05 * got


def test_a_slow_minute_is_forgotten():
    """Every batch takes ten times as long for a while: nothing can be in time.  Afterwards everything is, again."""
    s, slow = Server(steep), [False]
    s.kernel = lambda rows, rng: steep(rows, rng) * (10 if slow[0] else 1)
    taken: dict[int, list[bool]] = {0: [], 1: [], 2: []}
    now, rng = 0, random.Random(1)
    while now < 12e9:
        now += int(rng.expovariate(20) * 1e9)
        phase = 0 if now < 2e9 else 1 if now < 4e9 else 2
        slow[0] = phase == 1
        while s.batch and s.over_ns <= now:
            s.end()
        yes = s.come(request(8, now + 60 * MS, "a"), now)
        if now < 2e9 or 3e9 < now < 4e9 or now > 9e9:
            taken[phase].append(yes)
    assert np.mean(taken[0]) > 0.9
    assert np.mean(taken[1]) < 0.3
    assert np.mean(taken[2]) > 0.9
