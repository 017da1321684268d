"""Which replica, when a second one, what a failure means: decisions over values."""

from __future__ import annotations

import itertools
import math
import random
from types import SimpleNamespace

import pytest

from expertd.errors import (
    TABLE,
    BackendFailedError,
    BadShapeError,
    DeadlineExceededError,
    QueueFullError,
    RequestCancelledError,
    UnavailableError,
)
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.cluster.member import Member
from expertd_client.cluster.policy import Latencies, Policy, Verdict, choose, verdict


class Server:
    def __init__(self, wait, stalls=False):
        self.wait, self.stalls = wait, stalls

    def wait_s(self, tokens, now_s):
        return self.wait

    def stalled(self, now_s):
        return self.stalls


def test_of_two_random_ones_the_better():
    rng, servers = random.Random(1), [Server(1.0), Server(2.0), Server(3.0)]
    chosen = [choose(servers, 4, 0.0, rng) for _ in range(600)]
    counts = [sum(c is s for c in chosen) for s in servers]
    assert counts[2] == 0, "it is the worse of any two"
    assert 340 < counts[0] < 460, "in two of three pairs"
    equal = [Server(1.0), Server(1.0)]
    assert 200 < sum(choose(equal, 4, 0.0, rng) is equal[0] for _ in range(600)) < 400


@pytest.mark.parametrize("waits", list(itertools.permutations([1.0, 2.0, 3.0])), ids=str)
def test_the_worst_is_never_compared_with_itself(waits):
    rng, servers = random.Random(1), [Server(wait) for wait in waits]
    assert {choose(servers, 4, 0.0, rng).wait for _ in range(100)} == {1.0, 2.0}


def test_stalled_ones_only_where_there_is_no_other():
    rng, hung, good = random.Random(1), Server(0.1, stalls=True), Server(9.0)
    assert all(choose([hung, good], 1, 0.0, rng) is good for _ in range(50))
    assert choose([hung], 1, 0.0, rng) is hung
    assert {choose([hung, other], 1, 0.0, rng) for other in [Server(0.2, stalls=True)] for _ in range(50)} != {good}


def member(**fields):
    return Member("a", None, SimpleNamespace(load=None, alive=True, submit=lambda *args: 1), None, 0.2, **fields)


def result(token_ns=1000.0, queued=0, kernel_ns=0):
    return SimpleNamespace(timing=pb.Timing(kernel_ns=kernel_ns), load=pb.Load(token_ns=token_ns, queued_tokens=queued))


def request(tokens=8):
    return SimpleNamespace(tokens=tokens)


def test_a_server_s_wait_is_its_distance_and_what_is_ahead():
    slow, fast, far = member(), member(), member()
    for server, token_ns, seconds in ((slow, 4e6, 0.032), (fast, 1e6, 0.008), (far, 1e6, 1.008)):
        for _ in range(20):
            server.submit(request(), None, None)
            server.answered(8, seconds, result(token_ns, kernel_ns=int(8 * token_ns)))
    now_s = fast._distance_at_s
    assert fast.wait_s(8, now_s) == pytest.approx(0.008, rel=0.01)
    assert slow.wait_s(8, now_s) == pytest.approx(0.032, rel=0.01)
    assert far.wait_s(8, far._distance_at_s) > 0.5
    assert far.wait_s(8, far._distance_at_s + 30) < 0.02, "what is remembered fades"
    fast.submit(request(100), None, None)
    assert fast.wait_s(8, now_s) == pytest.approx(0.108, rel=0.01), "what is under way there counts"


def test_a_silent_server_stalls_and_is_left_alone_for_longer_each_time():
    server = member()
    server.refused = ""
    server.submit(request(), None, None)
    begin_s = server._heard_s
    assert not server.stalled(begin_s + 0.19)
    assert server.stalled(begin_s + 0.21)
    rests = []
    for _ in range(3):
        server._heard_s -= 1.0  # a second of silence
        server.dropped(8)
        rests.append(server._not_before_s)
        assert not server.usable(rests[-1] - 0.01)
        assert server.usable(rests[-1])
        server._not_before_s = 0.0
        server.submit(request(), None, None)
        assert not server.usable(math.inf), "one part, to see"
    now_s = server._heard_s
    assert [round(rest - now_s, 1) for rest in rests] == [0.5, 1.0, 2.0]
    server.answered(8, 0.01, result())
    server.submit(request(), None, None)
    assert server.usable(math.inf)


@pytest.mark.parametrize(
    "error", [DeadlineExceededError("late"), RequestCancelledError("taken back")], ids=lambda e: e.reason
)
def test_what_ends_because_of_its_caller_says_nothing_of_the_server(error):
    now_s = 100.0
    server = member(clock=lambda: now_s)
    server.refused = ""
    server.submit(request(), None, None)
    now_s += 1.0
    for _ in range(20):
        server.submit(request(), None, None)
        server.failed(8, error)
    assert server.usable(now_s)
    assert server.stalled(now_s), "it was no word of the server's"
    assert server.outstanding == 1
    for _ in range(20):  # the control
        server.submit(request(), None, None)
        server.failed(8, BackendFailedError("kernel"))
    assert not server.usable(now_s)
    assert not server.stalled(now_s)


def test_a_server_that_computes_for_us_is_not_away_because_its_describe_is_late():
    """On a host without a free core a Describe takes seconds while parts are answered; were such a server away, every
    call would wait until one Describe and one session come in time."""
    now_s = 100.0
    server = member(clock=lambda: now_s)
    server.refused = ""
    late, gone = DeadlineExceededError("no answer in time"), UnavailableError("connection refused")
    server.submit(request(), None, None)
    server.answered(8, 0.01, result())
    now_s += 4.0
    server.silent(late)
    assert not server.refused
    server.silent(gone)
    assert server.refused == "connection refused"
    server.silent(late)
    assert server.refused, "who is away comes back by an answer alone"
    server.refused = ""
    now_s += 1.5
    server.submit(request(), None, None)  # which is no word of the server's
    server.dropped(8)
    server.silent(late)
    assert server.refused == "no answer in time"


def test_late_is_what_95_of_100_are_not_by_size():
    found = Latencies(0.05)
    assert found.late_s(8) == math.inf
    for n in range(100):
        found.add(8, n * 1e-3)
        found.add(1000, 5.0)
    assert 0.085 <= found.late_s(8) <= 0.099
    assert found.late_s(15) == found.late_s(8), "the same power of two"
    assert found.late_s(1000) == 5.0
    assert found.late_s(16) == math.inf
    assert Latencies(0.0).late_s(8) == math.inf


def test_the_budget_of_hedges():
    found = Latencies(0.05)
    assert not found.take_hedge()
    for _ in range(41):
        found.add(8, 0.001)
    assert [found.take_hedge() for _ in range(3)] == [True, True, False]
    for _ in range(10_000):
        found.add(8, 0.001)
    assert sum(found.take_hedge() for _ in range(100)) == 10, "what is saved has a bound"


def test_what_a_failure_means():
    assert verdict(QueueFullError("")) is Verdict.ELSEWHERE
    assert verdict(BackendFailedError("")) is Verdict.ELSEWHERE
    assert verdict(DeadlineExceededError("")) is Verdict.ELSEWHERE
    assert verdict(BadShapeError("")) is Verdict.HOPELESS
    assert verdict(RequestCancelledError("")) is Verdict.HOPELESS
    assert all(verdict(row("")) is Verdict.ELSEWHERE for row in TABLE.values() if row.retryable)


def test_pauses_grow_up_to_a_bound():
    policy = Policy()
    pauses = [policy.pause(n) for n in range(40)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (policy.pause_s, policy.max_pause_s)
