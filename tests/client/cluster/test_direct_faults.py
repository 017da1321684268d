"""What becomes of calls that the calling thread carries out itself when a server does not do its part, or the caller
has no time, is interrupted, or cannot take the answer."""

from __future__ import annotations

import signal
import threading
import time

import numpy as np
import pytest
from direct_kit import ALL, HIGH, LOW, SPLIT_OR_WHOLE, E, H, K, inputs, near, needs_libraries, nothing_left
from waiting import until

from expertd.errors import DeadlineExceededError
from expertd_client.cluster import Policy
from expertd_server.engine.served import ServedLayer

pytestmark = [needs_libraries, pytest.mark.timeout(60)]


@SPLIT_OR_WHOLE
def test_a_deadline_ends_a_call_and_the_next_one_goes_on(start, holdings):
    cluster = start(*holdings)
    args, want = inputs(3, absent=0.0)
    cluster.found[-1].gate.clear()
    begin = time.monotonic()
    with pytest.raises(DeadlineExceededError):
        cluster.forward(0, *args, timeout_s=0.05)
    assert 0.05 <= time.monotonic() - begin < 10
    cluster.found[-1].gate.set()
    assert near(cluster.forward(0, *args, timeout_s=10).output, want)
    nothing_left(cluster)


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_late_call_of_one_server_goes_to_its_replica(start, kind):
    cluster = start(ALL, ALL, kinds=(kind,), policy=Policy(hedge=0.0, stall_s=0.05))
    cluster.found[0].gate.clear()
    asked = set()
    for seed in range(6):
        args, want = inputs(5, seed, absent=0.0)
        answer = cluster.forward(0, *args, timeout_s=10)
        assert near(answer.output, want)
        asked |= {(part.server, part.asked) for part in answer.parts}
        del answer
    assert ("s1", 2) in asked, "the other one was never asked first"
    cluster.found[0].gate.set()
    until(lambda: cluster._members.by_address["s0"].outstanding == 0)
    nothing_left(cluster)


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_late_part_goes_to_another_replica_and_the_answered_one_is_kept(start, kind):
    cluster = start(LOW, HIGH, HIGH, kinds=(kind,), policy=Policy(hedge=0.0, stall_s=0.05))
    cluster.found[1].gate.clear()
    before = cluster.found[0].calls
    for seed in range(6):  # one of them asks the replica that hangs first
        args, want = inputs(5, seed, absent=0.0)
        answer = cluster.forward(0, *args, timeout_s=10)
        assert near(answer.output, want)
        del answer
    assert cluster.found[0].calls == before + 6, "a part that was answered is not asked for again"
    cluster.found[1].gate.set()
    until(lambda: cluster._members.by_address["s1"].outstanding == 0)
    nothing_left(cluster)


@pytest.mark.parametrize("holdings", [(LOW, HIGH, HIGH), (ALL, ALL)])
def test_a_session_that_ends_while_it_is_waited_for(start, holdings):
    cluster = start(*holdings, policy=Policy(hedge=0.0, stall_s=5.0))
    one, other = len(holdings) - 2, len(holdings) - 1
    for n in (one, other):
        cluster.found[n].gate.clear()
    args, want = inputs(5, absent=0.0)
    answers = []
    calling = threading.Thread(target=lambda: answers.append(cluster.forward(0, *args, timeout_s=20)))
    calling.start()
    until(lambda: any(cluster.found[n].entered.is_set() for n in (one, other)))
    gone, left = (one, other) if cluster.found[one].entered.is_set() else (other, one)
    cluster.found[left].gate.set()
    cluster.found[gone].listener.close()
    calling.join(15)
    assert near(answers[0].output, want)
    assert [p.asked for p in answers[0].parts if p.server == f"s{left}"] == [2]


@pytest.mark.parametrize("holdings", [(LOW, HIGH, HIGH), (ALL, ALL)])
def test_routes_that_do_not_add_up_are_not_added(start, monkeypatch, holdings):
    """A server that says that it holds more than it does."""
    cluster = start(*holdings)
    liar = cluster.found[-1]
    liar.engine.hold([ServedLayer(0, E, (4, 5), K, H, 8, liar, "sums")])
    liar.held = (4, 5)
    monkeypatch.setattr(liar, "held", holdings[-1])  # it goes on saying so
    for seed in range(20):
        args, want = inputs(6, seed, absent=0.0)
        assert near(cluster.forward(0, *args, timeout_s=10).output, want)
    nothing_left(cluster)


@pytest.fixture(params=[KeyboardInterrupt, SystemExit])
def interrupt(request):
    """What a signal raises; whatever a test before has left."""

    def handle(*_):
        raise request.param

    before = signal.signal(signal.SIGINT, handle)
    yield request.param
    signal.signal(signal.SIGINT, before)


@SPLIT_OR_WHOLE
def test_an_interrupt_takes_everything_back(start, holdings, interrupt):
    cluster = start(*holdings)
    args, want = inputs(5, absent=0.0)
    assert near(cluster.forward(0, *args, timeout_s=10).output, want)
    held = cluster.found[-1]
    held.entered.clear()
    held.gate.clear()

    def signals():
        assert held.entered.wait(20)
        signal.raise_signal(signal.SIGINT)

    interrupting = threading.Thread(target=signals)
    interrupting.start()
    with pytest.raises(interrupt):
        cluster.forward(0, *args, timeout_s=40)
    interrupting.join()
    held.gate.set()
    assert near(cluster.forward(0, *args, timeout_s=10).output, want)
    nothing_left(cluster)


def test_a_cluster_that_is_closed_meanwhile(start):
    cluster = start(LOW, HIGH)
    cluster.found[1].gate.clear()
    args, _ = inputs(5, absent=0.0)
    said = []

    def call():
        try:
            cluster.forward(0, *args, timeout_s=20)
        except Exception as error:
            said.append(error)

    calling = threading.Thread(target=call)
    calling.start()
    until(lambda: cluster._members.by_address["s1"].outstanding == 1)
    threading.Timer(0.3, cluster.found[1].gate.set).start()
    cluster.close()
    calling.join(10)
    assert [type(e).__name__ for e in said] == ["RequestCancelledError"]


@SPLIT_OR_WHOLE
def test_an_answer_that_cannot_be_given_leaves_nothing_behind(start, monkeypatch, holdings):
    cluster = start(*holdings)
    args, want = inputs(5, absent=0.0)
    out = np.empty(args[0].shape, np.float32)
    for where in ("target", "delivered"):
        with monkeypatch.context() as patched:
            patched.setattr(f"expertd_client.cluster.call.Call.{where}", failing)
            with pytest.raises(MemoryError):
                cluster.forward(0, *args, out=out)
        nothing_left(cluster)
    assert near(cluster.forward(0, *args, out=out).output, want)


def failing(*args):
    raise MemoryError
