"""More requests than can be computed, each with a deadline: the core's rules on a clock of the test's.

The kernel is a function of rows; nothing here waits, so the figures are the rules' own and the same on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from rules_kit import MS, Asked, Rules

from expertd_server.engine.admission import QueueLimits

pytestmark = pytest.mark.timeout(60)

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
    """The core's rules, and the times at which requests were answered."""

    def __init__(self, kernel: Kernel, seed: int = 0, refuse_late: bool = True) -> None:
        self.kernel, self.rng = kernel, random.Random(seed)
        self.rules = Rules(4096, QueueLimits(refuse_late=refuse_late), [(n, 4) for n in range(4)])
        warm = [(rows, 4, kernel(rows, self.rng)) for rows in (1, 32)]
        for n in range(4):
            for one in warm:
                self.rules.rules_saw(n, *one)
        self.batch: Sequence[Asked] = ()
        self.over_ns = self.begun_ns = 0
        self.took_ns: list[tuple[Asked, int]] = []  # computed: when
        self.dropped: list[Asked] = []

    def come(self, r: Asked, now: int) -> bool:
        """Whether it is taken."""
        r.arrival = now
        refusal, _ = self.rules.come(r, now)
        if not refusal:
            self.start(now)
        return not refusal

    def start(self, now: int) -> None:
        """The next batch, if none is under way."""
        while not self.batch:
            c = self.rules.cut(now)
            if c is None:
                return
            self.dropped += c.dead
            if c.run:
                rows, k = sum(r.tokens for r in c.run), max(r.top_k for r in c.run)
                self.batch, self.begun_ns = c.run, now
                self.over_ns = now + self.kernel(rows * k // 4, self.rng)

    def end(self) -> None:
        """The batch under way is over."""
        now, run = self.over_ns, self.batch
        foreseen = [f for r in run if (f := self.rules.foreseen(r))]
        behind = max((now - f for f in foreseen), default=0)
        self.rules.ended(now, list(run), now - self.begun_ns, float(behind))
        self.took_ns += [(r, now) for r in run]
        self.batch = ()
        self.start(now)


def request(tokens: int, deadline_ns: int, caller: str, layer: int = 0, top_k: int = 4) -> Asked:
    return Asked(layer, tokens, top_k, 0, deadline_ns, caller)


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
    took = sorted(now - r.arrival for r, now in s.took_ns)
    return took[int(0.99 * len(took))]


def outcome(kernel: Kernel, load: float, **how) -> tuple[float, float]:
    """(goodput as part of the peak, part of the admitted that were late or dropped), deadlines four times the normal
    p99."""
    most = peak(kernel, **how)
    deadline_ns = 4 * normal_p99(kernel, most / 2, **how)
    s = Server(kernel)
    _, taken = offered(s, load * most, 20, deadline_ns, **how)
    good = sum(now <= r.deadline for r, now in s.took_ns)
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
    assert sum(now <= r.deadline for r, now in s.took_ns) / 10 < 0.5 * most


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
    late = [r for r, at in s.took_ns if r.caller == "modest" and at > r.deadline]
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


def one_caller(s: Server, way_out: Callable[[int], int] = lambda n: 0) -> list[bool]:
    """A call of 4 tokens each 50 ms, with 5 ms: which of them were answered, or would have been but for way_out, how
    long the n-th answer took to its caller."""
    answered = []
    for n in range(200):
        now = n * 50 * MS
        r = request(4, now + 5 * MS, "a")
        s.come(r, now)
        computed = bool(s.batch)
        if computed:
            s.end()
            s.rules.forecast_went_out(s.over_ns, float(way_out(n)))
        answered.append(computed)
    return answered


@pytest.mark.parametrize("slow", [{20}, {20, 60}])
def test_one_slow_batch_of_an_idle_server_refuses_nobody_after_it(slow):
    count = iter(range(-8, 1000))
    s = Server(lambda rows, rng: 47 * MS if next(count) in slow else MS // 4)
    assert one_caller(s) == [True] * 200


def test_one_slow_answer_of_an_idle_server_refuses_nobody_after_it():
    s = Server(lambda rows, rng: MS // 4)
    assert one_caller(s, lambda n: 47 * MS if n == 20 else MS // 10) == [True] * 200


def test_an_idle_server_that_is_too_slow_for_a_deadline_says_so():
    """It tries again once a second."""
    assert sum(one_caller(Server(lambda rows, rng: 20 * MS))) <= 10
