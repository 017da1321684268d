"""Servers that go away, come back, are slow, hang or err: the call goes on at another one, and no part counts twice."""

from __future__ import annotations

import re
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from cluster_kit import E, Fake, Threaded, batch, experts_of, nothing_under_way, transports
from waiting import until

from expertd.errors import (
    BackendFailedError,
    BadResponseError,
    BadShapeError,
    DeadlineExceededError,
    DrainingError,
    InternalError,
    LayerNotHeldError,
    QueueFullError,
    RequestCancelledError,
    UnavailableError,
)
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.cluster import ExpertCluster, OnMissing, Policy

X, IDS, W = batch(12)
WANT, ROUTES = experts_of(X, IDS, W, range(E))
pytestmark = pytest.mark.timeout(60)


def replicas(**options):
    """Two of experts 0-3, one of 4-7."""
    return {"a": Fake({0: range(4)}, **options), "b": Fake({0: range(4)}, **options), "c": Fake({0: range(4, 8)})}


def cluster_of(servers, **options):
    return ExpertCluster(list(servers), transport=transports(servers, Threaded), **{"timeout_s": 10.0} | options)


def check(answer):
    np.testing.assert_allclose(answer.output, WANT, rtol=1e-5, atol=1e-6)
    assert answer.routes_computed == ROUTES


def always(error):
    def does(request):
        raise error

    return does


@pytest.mark.parametrize(
    "error",
    [
        UnavailableError("gone"),
        DrainingError("drains"),
        QueueFullError("full", retry_after_us=10_000_000),
        BackendFailedError("kernel"),
        LayerNotHeldError("moved"),
        DeadlineExceededError("the server says so"),
    ],
    ids=lambda error: error.reason,
)
def test_a_part_that_failed_is_answered_by_the_other_replica(error):
    servers = replicas()
    servers["a"].does = always(error)
    with cluster_of(servers) as cluster:
        for _ in range(20):
            answer = cluster.forward(0, X, IDS, W)
            check(answer)
            assert [part.server for part in answer.parts] == ["b", "c"]
    assert servers["a"].asked, "it was tried"
    assert len(servers["c"].asked) == 20, "its parts were not sent again"


def test_a_server_that_was_away_is_asked_again():
    servers = replicas()
    with cluster_of(servers) as cluster:
        check(cluster.forward(0, X, IDS, W))
        servers["a"].away = True
        until(lambda: cluster.servers["a"])
        for _ in range(10):
            check(cluster.forward(0, X, IDS, W))
        servers["a"].away = False
        until(lambda: not cluster.servers["a"])
        servers["b"].away = True
        check(cluster.forward(0, X, IDS, W))


def test_a_call_waits_for_its_only_server_inside_its_time():
    servers = replicas()
    with cluster_of(servers) as cluster:
        check(cluster.forward(0, X, IDS, W))
        servers["c"].away = True
        until(lambda: cluster.servers["c"])
        with pytest.raises(UnavailableError, match="no server that takes requests, want one of 1: c: away"):
            cluster.forward(0, X, IDS, W, timeout_s=0.3)
        begin_s = time.monotonic()
        skipped = cluster.forward(0, X, IDS, W, on_missing=OnMissing.SKIP, timeout_s=1000.0)
        assert time.monotonic() - begin_s < 500.0, "SKIP does not wait for the time that a call has"
        np.testing.assert_allclose(skipped.output, experts_of(X, IDS, W, range(4))[0], rtol=1e-5, atol=1e-6)
        later, before = cluster.submit(0, X, IDS, W), servers["c"].describes
        until(lambda: servers["c"].describes > before + 1 or later.done())
        assert not later.done(), "it waits while the server is looked for"
        servers["c"].away = False
        check(later.result(20))
    with cluster_of(servers, timeout_s=None, policy=Policy(patience_s=0.3)) as cluster:
        check(cluster.forward(0, X, IDS, W))
        servers["c"].away = True
        with pytest.raises(UnavailableError, match="away"):
            cluster.forward(0, X, IDS, W)


def test_a_call_that_no_replica_took_names_each_of_them_and_why():
    """All of its servers went away: no deadline that was too short.  One that is there and full is another matter."""
    servers = replicas()
    with cluster_of(servers) as cluster:
        check(cluster.forward(0, X, IDS, W))
        servers["a"].away = servers["b"].away = True
        until(lambda: cluster.servers["a"] and cluster.servers["b"])
        with pytest.raises(UnavailableError) as caught:
            cluster.forward(0, X, IDS, W, timeout_s=0.2)
        text = "layer 0: got no server that takes requests, want one of 2: a: away; b: away"
        assert caught.value.message == text
        assert caught.value.retryable
        servers["a"].away = False
        until(lambda: not cluster.servers["a"])
        servers["a"].does = always(QueueFullError("full", retry_after_us=10_000_000))
        with pytest.raises((QueueFullError, DeadlineExceededError)):
            cluster.forward(0, X, IDS, W, timeout_s=0.2)
        assert re.match(r"a: left alone for [\d.]+ s: full; b: away$", cluster._members.troubles())
        nothing_under_way(cluster)


@pytest.mark.parametrize("late", ["abc", "c", "ab"])
def test_a_call_waits_for_servers_that_never_answered(late):
    servers = replicas()
    for name in late:
        servers[name].away = True
    with cluster_of(servers) as cluster:
        for timeout_s in (1.0, 0.2):
            with pytest.raises(UnavailableError, match="away"):
                cluster.forward(0, X, IDS, W, timeout_s=timeout_s)
        waiting = cluster.submit(0, X, IDS, W) if "a" not in late else None
        begin = threading.Timer(0.2, lambda: [setattr(servers[name], "away", False) for name in late])
        begin.start()
        check(cluster.forward(0, X, IDS, W))
        if waiting is not None:
            check(waiting.result(20))
        begin.join()


def test_what_cannot_be_sent_ends_the_call(monkeypatch):
    servers = replicas()
    with cluster_of(servers) as cluster:
        check(cluster.forward(0, X, IDS, W))
        for member in cluster._members.by_address.values():
            monkeypatch.setattr(member.exchange, "submit", lambda *args: 1 / 0)
        with pytest.raises(InternalError, match="cannot be sent: ZeroDivisionError"):
            cluster.forward(0, X, IDS, W)
        nothing_under_way(cluster)


def test_what_every_replica_would_refuse_is_raised_at_once():
    servers = replicas()
    servers["a"].does = servers["b"].does = always(BadShapeError("no"))
    with cluster_of(servers) as cluster, pytest.raises(BadShapeError, match="no"):
        cluster.forward(0, X, IDS, W)
    assert len(servers["a"].asked) + len(servers["b"].asked) == 1


def test_a_failure_of_both_replicas_is_raised_and_tried_once_each():
    servers = replicas()
    servers["a"].does = servers["b"].does = always(BackendFailedError("both"))
    with cluster_of(servers) as cluster, pytest.raises(BackendFailedError, match="both"):
        cluster.forward(0, X, IDS, W)
    assert (len(servers["a"].asked), len(servers["b"].asked)) == (1, 1)


def test_a_server_that_fails_again_and_again_is_left_alone_until_it_is_described():
    servers = replicas(load=pb.Load())
    servers["a"].does = always(BackendFailedError("kernel"))
    with cluster_of(servers) as cluster:
        until(
            lambda: (check(cluster.forward(0, X, IDS, W)), "in a row" in cluster.servers["a"])[1] or not time.sleep(0)
        )
        until(lambda: not cluster.servers["a"])


def test_routes_that_do_not_add_up_are_not_added():
    servers = replicas()
    servers["a"].routes = lambda n: n - 1
    with cluster_of(servers) as cluster:
        for _ in range(10):
            check(cluster.forward(0, X, IDS, W))
        servers["b"].routes = lambda n: n + 1
        with pytest.raises(BadResponseError, match="routes computed"):
            cluster.forward(0, X, IDS, W)


def test_a_drain_is_seen_before_anything_is_refused():
    servers = replicas()
    with cluster_of(servers) as cluster:
        check(cluster.forward(0, X, IDS, W))
        servers["a"].load = pb.Load(draining=True)
        until(
            lambda: (
                any(p.server == "a" for p in cluster.forward(0, X, IDS, W).parts) or "drains" in cluster.servers["a"]
            )
        )
        asked = len(servers["a"].asked)
        for _ in range(10):
            check(cluster.forward(0, X, IDS, W))
        assert len(servers["a"].asked) == asked


def held_up(servers, release, calls=1):
    """Makes the next so many requests to the replicas wait; those after them are answered."""
    taken = threading.Semaphore(calls)

    def does(request):
        if taken.acquire(blocking=False):
            assert release.wait(20)

    servers["a"].does = servers["b"].does = does


def test_a_late_part_is_asked_of_the_other_replica_too():
    servers, release = replicas(), threading.Event()
    with cluster_of(servers, policy=Policy(stall_s=15.0)) as cluster:
        for _ in range(60):  # recent ones, and a budget of 3
            check(cluster.forward(0, X, IDS, W))
        until(lambda: check(cluster.forward(0, X, IDS, W)) or cluster._state.latencies._budget >= 1.0)
        nothing_under_way(cluster)
        before = len(servers["a"].asked) + len(servers["b"].asked)
        held_up(servers, release)
        answer = cluster.forward(0, X, IDS, W)
        check(answer)
        assert not release.is_set()
        assert [part.asked for part in answer.parts] == [2, 1]
        assert len(servers["a"].asked) + len(servers["b"].asked) == before + 2
        release.set()
        check(cluster.forward(0, X, IDS, W))
        nothing_under_way(cluster)


def test_an_answer_that_nobody_waits_for_any_more_is_given_back_and_counts_for_nothing():
    """It was on its way when its attempt was recalled: the call has ended, or went on at another server."""
    servers, release = {"a": Fake({0: range(E)})}, threading.Event()
    servers["a"].does = lambda request: release.wait(20)

    def call() -> None:
        with pytest.raises(RequestCancelledError):
            cluster.forward(0, X, IDS, W)

    with cluster_of(servers) as cluster:
        calling = threading.Thread(target=call)
        calling.start()
        until(lambda: servers["a"].asked)
        flight = next(iter(cluster._state.flights))
        [sub] = flight.sub_requests
        [attempt] = sub.tries
        assert flight.cancel()
        calling.join(20)
        given_back = []
        late = SimpleNamespace(
            routes_computed=sub.part.routes,
            weights_version=1,
            timing=pb.Timing(),
            load=pb.Load(),
            release=lambda: given_back.append(True),
        )
        flight.answered(attempt, late)
        assert given_back == [True]
        assert sub.result is None
        release.set()


def lent(server):
    """Makes a Fake lend its outputs: (lent, given back), each a list that grows."""
    serve, out, back = server.serve, [], []

    def lends(request):
        answer = serve(request)
        number = len(out)
        out.append(number)
        answer.give_back = lambda: back.append(number)
        return answer

    server.serve = lends
    return out, back


def test_answers_of_a_call_that_failed_are_given_back():
    servers, answered = {"a": Fake({0: range(4)}), "c": Fake({0: range(4, 8)})}, threading.Event()
    out, back = lent(servers["a"])

    def fails(request):
        assert answered.wait(20)
        raise BadShapeError("no")

    servers["c"].does = fails
    with cluster_of(servers) as cluster:
        call = cluster.submit(0, X, IDS, W)
        [flight] = cluster._state.flights
        until(lambda: any(sub.result is not None for sub in flight.sub_requests))
        assert (len(out), back) == (1, []), "it is to be added still"
        answered.set()
        with pytest.raises(BadShapeError):
            call.result(20)
        assert back == out


def test_an_answer_with_too_few_routes_is_given_back():
    servers = {"a": Fake({0: range(E)})}
    out, back = lent(servers["a"])
    with cluster_of(servers) as cluster:
        servers["a"].routes = lambda n: n - 1 if len(out) < 1 else n
        answer = cluster.forward(0, X, IDS, W)
        check(answer)
        assert (out, back) == ([0, 1], [0]), "the first was of no use, the second is the caller's"


def test_nothing_is_hedged_without_a_budget():
    """The control: another cluster, which asks later, has asked twice and is answered."""
    servers, release = replicas(), threading.Event()
    asked = lambda: len(servers["a"].asked) + len(servers["b"].asked)  # noqa: E731
    with (
        cluster_of(servers, policy=Policy(hedge=0.0, stall_s=15.0)) as cluster,
        cluster_of(servers, policy=Policy(stall_s=15.0)) as control,
    ):
        for _ in range(60):
            check(cluster.forward(0, X, IDS, W))
            check(control.forward(0, X, IDS, W))
        until(lambda: check(control.forward(0, X, IDS, W)) or control._state.latencies._budget >= 1.0)
        nothing_under_way(control)
        before = asked()
        held_up(servers, release, calls=2)
        waiting = cluster.submit(0, X, IDS, W)
        until(lambda: asked() == before + 1)
        assert [part.asked for part in control.forward(0, X, IDS, W).parts] == [2, 1]
        assert not waiting.done()
        assert asked() == before + 3
        release.set()
        check(waiting.result(10))
        assert asked() == before + 3


def test_a_hung_server_is_passed_over_whatever_the_budget():
    servers = replicas()
    hang = threading.Event()
    with cluster_of(servers, policy=Policy(hedge=0.0, stall_s=0.1)) as cluster:
        for _ in range(5):
            check(cluster.forward(0, X, IDS, W))
        servers["a"].does = lambda request: hang.wait(100)
        for _ in range(200):
            check(cluster.forward(0, X, IDS, W))  # in the ten seconds that a call has
        stuck = servers["a"].asked
        assert len(stuck) <= 10, "once it hangs it gets nothing"
        hang.set()


def test_many_callers_while_servers_come_and_go():
    servers = replicas()
    going, faults, calls = threading.Event(), [], []

    def call():
        while not going.is_set():
            try:
                check(cluster.forward(0, X, IDS, W))
                calls.append(1)
            except Exception as error:
                faults.append(error)

    with cluster_of(servers) as cluster:
        callers = [threading.Thread(target=call) for _ in range(4)]
        for t in callers:
            t.start()
        for n in range(10):
            server = servers["ab"[n % 2]]
            server.away = True
            time.sleep(0.05)
            server.away = False
            until(lambda n=n: not cluster.servers["ab"[n % 2]])
        until(lambda: faults or len(calls) > 50)
        going.set()
        for t in callers:
            t.join(20)
        assert not faults
        nothing_under_way(cluster)
