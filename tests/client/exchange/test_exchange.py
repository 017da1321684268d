"""The parts between a forward() and the wire: who gets which answer, deadlines, broken connections, sending again."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest
from exchange_kit import Waiter, X, answer, exchange, request

from expertd.codec import TensorView
from expertd.errors import (
    BadResponseError,
    BadShapeError,
    DeadlineExceededError,
    DrainingError,
    MessageTooLargeError,
    QueueFullError,
    RequestCancelledError,
    TooManyTokensError,
    UnavailableError,
    UnimplementedError,
)
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.exchange.link import blame
from expertd_client.requests.deadline import Deadline, LoopAlarm, ThreadAlarm, deadline_in
from expertd_client.requests.result import result_of
from expertd_client.requests.retry import NEVER, Retry, pause_s

# ---- answers ---------------------------------------------------------------------------------------------------------


def test_each_gets_his_own_answer_in_any_order():
    ex, hand, alarm = exchange()
    waiters = [Waiter() for _ in range(3)]
    ids = [ex.submit(request(), None, w) for w in waiters]
    assert len(set(ids)) == ex.in_flight == 3
    (way,) = hand.ways
    for n in (2, 0, 1):
        way.deliver(answer(ids[n], routes_computed=n, load=pb.Load(queued_tokens=n)))
    assert [w.what.routes_computed for w in waiters] == [0, 1, 2]
    assert (ex.in_flight, ex.load.queued_tokens, alarm.sets) == (0, 1, 0)


def test_more_tokens_than_the_server_takes_are_refused_before_they_are_sent():
    ex, hand, _ = exchange()
    ex.submit(request(), None, Waiter())
    ex.most_tokens = 2
    for send in (lambda: ex.submit(request(), None, Waiter()), lambda: ex.call(request(), None)):
        with pytest.raises(TooManyTokensError, match="hidden_states: got 3 tokens, want at most 2; split the batch"):
            send()
    (way,) = hand.ways
    assert len(way.sent) == 1
    way.breaks(UnavailableError("gone"))
    ex.submit(request(), None, Waiter())
    assert len(hand.ways[1].sent) == 1, "the next server may take more"


def test_an_answer_becomes_a_result():
    view = answer(1, timing=pb.Timing(kernel_ns=5), load=pb.Load(queued_tokens=2), placement_epoch=3)
    result = result_of(view, request())
    np.testing.assert_array_equal(result.output, X)
    assert (result.routes_computed, result.timing.kernel_ns, result.load.queued_tokens) == (6, 5, 2)
    assert (result.digest, result.placement_epoch) == (None, 3)
    digest = result_of(answer(1, output=None, digest=pb.Digest(crc32=7)), request(digest=True))
    assert (digest.output, digest.digest.crc32) == (None, 7)


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"output": None}, {}),
        ({"digest": pb.Digest()}, {}),
        ({}, {"digest": True}),
        ({"digest": pb.Digest()}, {"digest": True}),
        ({}, {"output_dtype": "bf16"}),
        ({"output": TensorView.of_raw(pb.DATA_TYPE_F32, (2, 8), bytes(64))}, {}),
    ],
)
def test_an_answer_to_another_question_is_refused(fields, options):
    ex, hand, _ = exchange()
    waiter = Waiter()
    number = ex.submit(request(**options), None, waiter)
    hand.ways[0].deliver(answer(number, **fields))
    assert isinstance(waiter.what, BadResponseError)
    assert waiter.what.request_id == number


# ---- deadlines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), float("inf")])
def test_a_timeout_is_a_positive_number(wrong):
    with pytest.raises(ValueError, match="timeout_s: got"):
        deadline_in(wrong)


def test_the_wire_carries_what_is_left_of_the_time():
    ex, hand, _ = exchange()
    with_time = deadline_in(5.0)
    time.sleep(0.002)
    late = Deadline(1.0, time.monotonic() - 1.0)
    ids = [ex.submit(request(), deadline, Waiter()) for deadline in (None, with_time, late)]
    none, left, over = (hand.ways[0].sent[n][0] for n in ids)
    assert none == 0
    assert 0 < left <= 4_998_000
    assert over == 1, "0 would mean no limit"
    assert late.left_s() == 0.0


def test_only_what_is_due_ends_and_is_taken_back():
    ex, hand, alarm = exchange()
    now_s = time.monotonic()
    soon, later, never, answered = (Waiter() for _ in range(4))
    ids = [
        ex.submit(request(layer=n), deadline, waiter)
        for n, (deadline, waiter) in enumerate(
            [
                (Deadline(30.0, now_s + 30.0), later),
                (Deadline(0.5, now_s - 0.1), soon),
                (None, never),
                (Deadline(0.4, now_s - 0.2), answered),
            ]
        )
    ]
    (way,) = hand.ways
    way.deliver(answer(ids[3]))
    assert alarm.when_s == now_s - 0.2
    alarm.ring()
    assert isinstance(soon.what, DeadlineExceededError)
    assert "forward of layer 1: got no answer within 0.5 s" in soon.what.message
    assert soon.what.request_id == ids[1]
    assert way.cancelled == [ids[1]]
    assert answered.what.routes_computed == 6
    assert (later.told, never.told, ex.in_flight) == ([], [], 2)
    assert alarm.when_s == now_s + 30.0, "the next one"
    way.deliver(answer(ids[1]))  # late: nobody wants it
    assert len(soon.told) == 1


def test_an_answered_request_leaves_nothing_behind():
    ex, hand, alarm = exchange()
    for _ in range(5000):
        number = ex.submit(request(), deadline_in(30.0), Waiter())
        hand.ways[0].deliver(answer(number))
    assert alarm.sets == 1, "the first deadline; the others are later"
    alarm.ring()
    assert alarm.when_s is None


def test_while_many_deadlines_pass_looks_at_them_are_rare(monkeypatch):
    ex, hand, alarm = exchange()
    now_s = time.monotonic()
    for n in range(50):
        ex.submit(request(), Deadline(1.0, now_s + 9 + n), Waiter())
    clock = iter([now_s + 10.0, now_s + 10.5])  # a look that takes half a second
    monkeypatch.setattr("expertd_client.exchange.exchange.time.monotonic", lambda: next(clock))
    alarm.ring()
    monkeypatch.undo()
    assert (ex.in_flight, len(hand.ways[0].cancelled)) == (48, 2)
    assert alarm.when_s == pytest.approx(now_s + 10.5 + 20 * 0.5), "not at the next deadline"


def test_before_the_first_request_nothing_is_in_flight_and_there_is_nothing_to_cancel():
    ex, hand, _ = exchange()
    assert ex.in_flight == 0
    assert ex.cancel(1) is False
    assert hand.ways == [], "no connection is made for that"
    waiter = Waiter()
    number = ex.submit(request(), None, waiter)
    assert [ex.cancel(number), ex.cancel(number)] == [True, False]
    assert hand.ways[0].cancelled == [number]


def test_what_is_due_in_a_moment_waits_for_it():
    ex, _, alarm = exchange()
    now_s = time.monotonic()
    soon, due = Waiter(), Waiter()
    for waiter, end_s in ((soon, now_s + 0.9), (due, now_s - 0.1)):
        ex.submit(request(), Deadline(1.0, end_s), waiter)
    alarm.ring()
    assert len(due.told) == 1
    assert soon.told == []


def test_deadlines_end_in_order_after_answered_ones_were_forgotten():
    ex, hand, alarm = exchange()
    now_s, left = time.monotonic(), {}
    for n in range(200):  # the latest first, so that their order is not the one in which they came
        end_s, waiter = now_s - 1 - n, Waiter()
        number = ex.submit(request(), Deadline(1.0, end_s), waiter)
        if n % 40:
            hand.ways[0].deliver(answer(number))
        else:
            left[number] = waiter
    for _ in range(100):
        number = ex.submit(request(), Deadline(1.0, now_s + 60), Waiter())
        hand.ways[0].deliver(answer(number))
    alarm.ring()
    assert hand.ways[0].cancelled == sorted(left, reverse=True), "the earliest deadline first"
    assert all(isinstance(w.what, DeadlineExceededError) for w in left.values())


@pytest.mark.parametrize("first_s", [0.02, 30.0])
def test_a_thread_rings_when_it_is_time_and_not_before(first_s):
    rang = threading.Event()
    begin_s, at_s = time.monotonic(), []

    def ring():
        at_s.append(time.monotonic())
        rang.set()

    alarm = ThreadAlarm(ring)
    alarm.set(begin_s + first_s)
    alarm.set(begin_s + 0.02)  # an earlier one wakes a thread that sleeps
    assert rang.wait(25)
    assert begin_s + 0.02 <= at_s[0] < begin_s + 29
    rang.clear()
    alarm.set(time.monotonic())
    assert rang.wait(10), "again"
    alarm.set(time.monotonic() + 0.5)
    alarm.close()
    assert not alarm._thread.is_alive(), "nobody is left to ring"
    assert len(at_s) == 2


async def test_a_loop_rings_when_it_is_time_and_not_before():
    loop = asyncio.get_running_loop()
    rang = asyncio.Queue()
    alarm = LoopAlarm(lambda: rang.put_nowait(loop.time()))
    begin_s = time.monotonic()
    alarm.set(begin_s + 30.0)
    alarm.set(begin_s + 0.02)
    alarm.set(begin_s + 0.5)  # later than what is set: left to whoever is rung
    assert await asyncio.wait_for(rang.get(), 10) >= begin_s + 0.02
    alarm.set(time.monotonic() + 0.01)
    await asyncio.wait_for(rang.get(), 10)
    alarm.set(time.monotonic() + 0.01)
    alarm.close()
    later, other = asyncio.Event(), LoopAlarm(lambda: later.set())
    other.set(time.monotonic() + 0.02)
    await asyncio.wait_for(later.wait(), 25)
    other.close()
    assert rang.empty(), "one that was set for later has rung"


# ---- ends ------------------------------------------------------------------------------------------------------------


def test_a_broken_connection_fails_what_was_on_it_and_the_next_request_makes_another():
    ex, hand, _ = exchange()
    waiters = [Waiter(), Waiter()]
    for w in waiters:
        ex.submit(request(), None, w)
    hand.ways[0].breaks(UnavailableError("gone"))
    assert [type(w.what) for w in waiters] == [UnavailableError] * 2
    assert waiters[0].what is not waiters[1].what
    third = Waiter()
    number = ex.submit(request(), None, third)
    assert list(hand.ways[1].sent) == [number]
    hand.ways[1].deliver(answer(number))
    assert third.what.routes_computed == 6


def test_where_requests_do_not_connect_a_session_does():
    ex, hand, _ = exchange(reconnects=False)
    broken = []
    ex.broke = lambda: broken.append(1)
    assert not ex.alive
    with pytest.raises(UnavailableError, match="made again"):
        ex.submit(request(), None, Waiter())
    ex.session(Waiter())
    assert ex.alive
    ex.submit(request(), None, Waiter())
    hand.ways[0].breaks(UnavailableError("gone"))
    assert (ex.alive, broken) == (False, [1])
    with pytest.raises(UnavailableError, match="made again"):
        ex.submit(request(), None, Waiter())
    assert len(hand.ways) == 1


def test_closing_ends_everything():
    ex, hand, alarm = exchange()
    waiter = Waiter()
    ex.submit(request(), deadline_in(9.0), waiter)
    ex.close()
    assert isinstance(waiter.what, RequestCancelledError)
    assert (hand.ways[0].ended, alarm.closed) == (True, True)
    with pytest.raises(RequestCancelledError, match="closed"):
        ex.submit(request(), None, Waiter())


@pytest.mark.parametrize("row", [DrainingError, UnavailableError, UnimplementedError, RequestCancelledError])
def test_an_end_that_holds_for_all_is_everybodys(row):
    first, second = blame(row("why"), "server", 5), blame(row("why"), "server", 5)
    assert type(first) is type(second) is row
    assert first is not second
    assert first.message == "why"


def test_the_fault_of_one_among_several_may_be_retried_by_all():
    error = blame(MessageTooLargeError("5 MiB"), "host:1", 3)
    assert isinstance(error, UnavailableError)
    assert error.retryable
    assert "host:1" in error.message
    assert "MESSAGE_TOO_LARGE" in error.message
    assert isinstance(blame(MessageTooLargeError("5 MiB"), "host:1", 1), MessageTooLargeError)


# ---- sending again ---------------------------------------------------------------------------------------------------


def test_nothing_is_sent_again_unless_asked():
    assert pause_s(NEVER, QueueFullError("full"), 1, None) is None


def test_pauses_double_up_to_their_bound_and_end_with_the_tries():
    retry = Retry(attempts=5, pause_s=0.1, max_pause_s=0.3)
    assert [pause_s(retry, DrainingError("x"), n, None) for n in range(1, 6)] == [0.1, 0.2, 0.3, 0.3, None]


def test_the_servers_advice_and_the_callers_time_count():
    retry = Retry(attempts=5, pause_s=0.1, max_pause_s=0.3)
    full = QueueFullError("full", retry_after_us=700_000)
    assert pause_s(retry, full, 1, None) == 0.7
    assert pause_s(retry, full, 1, 0.5) is None
    assert pause_s(retry, QueueFullError("full"), 1, 0.5) == 0.1


def test_what_would_fail_again_is_not_sent_again():
    assert pause_s(Retry(attempts=5), BadShapeError("x"), 1, None) is None


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_request_that_meets_the_end_of_its_connection_is_told_once_and_not_sent(when):
    ex, hand, _ = exchange()
    ex.submit(request(), None, Waiter())
    link, (way,) = ex._link, hand.ways

    class Pending(dict):
        def __setitem__(self, request_id, found):
            if when == "after":
                super().__setitem__(request_id, found)
            way.breaks(UnavailableError("gone"))
            if when == "before":
                super().__setitem__(request_id, found)

    link.pending = Pending(link.pending)
    late = Waiter()
    number = ex.submit(request(), None, late)
    assert (late.what.message, ex.in_flight) == ("gone", 0)  # .what: told once
    assert number not in way.sent
