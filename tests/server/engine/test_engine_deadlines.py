"""What comes too late, is taken back, or finds no room: refused, dropped, and never computed."""

from __future__ import annotations

import contextlib
import time

import pytest
from setup_kit import SOON_S, Setup, inputs, one, pass_deadline, pass_moment

from expertd.codec import ForwardHead
from expertd.errors import (
    DeadlineExceededError,
    OverloadedError,
    QueueFullError,
    RequestCancelledError,
)
from expertd_server.engine.policy import Policy
from expertd_server.engine.request import Answer, EngineRequest


def test_expired_and_cancelled_requests_never_reach_the_kernel(make):
    s = make()
    s.block()
    late, good = one(s, 1, SOON_S), one(s, 3, 60.0)
    gone = s.caller.request(2, inputs(1), [[2]], [[1.0]])
    for r in (late, gone, good):
        s.engine.submit(r)
    gone.cancelled = True
    pass_deadline(late)
    s.fake.gate.set()
    s.caller.wait(1, 2, 3)
    assert [c[0] for c in s.fake.calls] == [1, 1], "tag 0 and tag 3, one token each"
    with pytest.raises(DeadlineExceededError, match=r"waited \d+\.\d ms in the queue"):
        raise s.caller.outcomes[1]
    assert isinstance(s.caller.outcomes[3], Answer)
    assert isinstance(s.caller.outcomes[2], RequestCancelledError), "from now on its memory is free"


def test_a_deadline_that_has_passed_is_refused_at_the_door(make):
    s = make()
    with pytest.raises(DeadlineExceededError, match="had passed when it came"):
        s.engine.submit(s.caller.request(1, inputs(1), [[2]], [[1.0]], deadline_ns=time.monotonic_ns() - 1))
    assert s.fake.calls == []


def test_what_is_hopeless_is_what_submit_would_refuse_for_the_time(make):
    s = make(measured=[(1, 1, 5_000_000_000)])
    s.block()
    s.engine.submit(s.caller.request(1, inputs(1), [[2]], [[1.0]]))

    def hopeless(timeout_ms, layer=0):
        head = ForwardHead(9, layer, 1, 1, 1, 0)
        return s.engine.hopeless(head, "test", time.monotonic_ns() + int(timeout_ms * 1e6))

    assert hopeless(1_000_000) is None
    assert hopeless(2000, layer=7) is None, "a layer that is not held: for submit() to say"
    assert hopeless(2000).reason == "OVERLOADED"
    assert hopeless(2000).retry_after_us > 100_000
    assert hopeless(-1).reason == "DEADLINE_EXCEEDED"
    with pytest.raises(OverloadedError):
        s.engine.submit(one(s, 2, 2.0))
    s.fake.gate.set()


def test_a_full_queue_refuses_clearly_and_says_when_to_come_again(make):
    s = make(max_queue_tokens=8, max_queue_requests=3)
    s.run(s.caller.request(9, inputs(4), [[2]] * 4, [[1.0]] * 4))  # so that the time of a token is known
    s.block()
    s.engine.submit(s.caller.request(1, inputs(6), [[2]] * 6, [[1.0]] * 6))
    with pytest.raises(
        QueueFullError, match="got 6 tokens waiting, 6 of them this caller's, and 3 more, want at most 8"
    ) as e:
        s.engine.submit(s.caller.request(2, inputs(3), [[2]] * 3, [[1.0]] * 3))
    assert e.value.retry_after_us >= 1
    assert e.value.retryable
    s.engine.submit(s.caller.request(3, inputs(1), [[2]], [[1.0]]))
    s.engine.submit(s.caller.request(4, inputs(1), [[2]], [[1.0]]))
    with pytest.raises(QueueFullError, match="got 3 requests waiting"):
        s.engine.submit(s.caller.request(5, inputs(1), [[2]], [[1.0]]))
    s.fake.gate.set()
    s.caller.wait(1, 3, 4)


def test_requests_that_are_dead_make_room_in_a_full_queue(make):
    s = make(max_queue_requests=2)
    s.block()
    late = one(s, 1, SOON_S)
    gone = s.caller.request(2, inputs(1), [[2]], [[1.0]])
    s.engine.submit(late)
    s.engine.submit(gone)
    gone.cancelled = True
    pass_deadline(late)
    s.engine.submit(s.caller.request(3, inputs(1), [[2]], [[1.0]]))
    s.caller.wait(1, 2)
    assert isinstance(s.caller.outcomes[1], DeadlineExceededError)
    assert isinstance(s.caller.outcomes[2], RequestCancelledError)
    s.fake.gate.set()
    s.caller.wait(3)


def test_the_dead_are_answered_also_where_their_room_is_not_enough(make):
    s = make(max_queue_tokens=8)
    s.block()
    late = one(s, 1, SOON_S, tokens=2)
    s.engine.submit(late)
    s.engine.submit(s.caller.request(2, inputs(6), [[2]] * 6, [[1.0]] * 6))
    pass_deadline(late)
    with pytest.raises(QueueFullError, match="got 6 tokens waiting, 6 of them this caller's, and 4 more"):
        s.engine.submit(s.caller.request(3, inputs(4), [[2]] * 4, [[1.0]] * 4))
    s.caller.wait(1)
    assert isinstance(s.caller.outcomes[1], DeadlineExceededError)
    s.fake.gate.set()
    s.caller.wait(2)


SLOW = ((1, 1, 200_000_000), (64, 1, 12_800_000_000))
"""As if a row took 200 ms: no busy machine comes near."""


def test_what_is_too_slow_on_an_idle_server_gets_no_advice_to_wait(make):
    s = make(measured=SLOW)

    def refused(tag: int) -> OverloadedError | None:
        s.run(s.caller.request(tag, inputs(1), [[2]], [[1.0]]))
        try:
            s.engine.ask(one(s, 1000, 3.0, tokens=30))
        except OverloadedError as e:
            return e
        return None  # a pause of this machine: times are older than a second

    error = next(e for tag in range(100) if (e := refused(tag)) and not e.retry_after_us)
    assert "which it takes alone; allow more" in error.message


def test_what_cannot_be_in_time_is_refused_at_once_with_advice(make):
    s = make(measured=SLOW)
    s.block()
    s.engine.submit(one(s, 1, 50.0, tokens=20))  # 4 s
    with pytest.raises(OverloadedError, match="left of its time, want") as e:
        s.engine.submit(one(s, 2, 3.0))  # at once: the gate is closed
    assert e.value.retryable
    assert 1_000_000 < e.value.retry_after_us < 10_000_000
    with pytest.raises(OverloadedError):
        s.engine.ask(one(s, 3, 3.0))
    assert s.engine.load().wait_ns > 3_000_000_000
    s.engine.ask(one(s, 4, 50.0))
    assert s.engine.load().queued_requests == 2, "who only asks does not wait"
    s.engine.submit(one(s, 5, 50.0))
    s.engine.submit(s.caller.request(6, inputs(1), [[2]], [[1.0]]))  # no deadline: never too late
    s.fake.gate.set()
    s.caller.wait(1, 5, 6)
    assert all(isinstance(s.caller.outcomes[tag], Answer) for tag in (1, 5, 6))


def test_it_can_be_switched_off(make):
    s = make(measured=SLOW, refuse_late=False)
    s.block()
    s.engine.submit(one(s, 1, 50.0, tokens=60))
    s.engine.submit(one(s, 2, 3.0))
    s.fake.gate.set()
    s.caller.wait(1, 2)
    assert isinstance(s.caller.outcomes[2], Answer)


def test_a_batch_grows_no_further_than_to_where_one_of_it_would_be_late(make):
    s = make(measured=SLOW)
    s.block()
    s.engine.submit(one(s, 1, 9.0, tokens=4))
    for tag in range(2, 7):
        s.engine.submit(one(s, tag, 200.0, tokens=12))
    s.fake.gate.set()
    s.caller.wait(*range(1, 7))
    assert all(isinstance(s.caller.outcomes[tag], Answer) for tag in range(1, 7))
    rows = [call[0] for call in s.fake.calls]
    assert rows[1] in (4, 16, 28), "its own 4 rows and what fits into the nine seconds that it has, by 250 ms a row"
    assert sum(rows[1:]) == 64


def admit(s: Setup, tag: int, within_s: float, tokens: int) -> EngineRequest:
    """Submits it, again where it has become too late between its making and its way in."""
    for _ in range(50):
        with contextlib.suppress(OverloadedError):
            s.engine.submit(r := one(s, tag, within_s, tokens=tokens))
            return r
    raise AssertionError("it is always refused")


def test_what_can_no_longer_be_in_time_is_dropped_before_its_deadline_has_passed(make):
    s = make(measured=((1, 1, 10_000_000), (2, 1, 300_000_000_000)))  # two rows take 300 s
    s.block()
    late = admit(s, 1, 300.1, tokens=2)
    pass_moment(late.deadline_ns - 300 * 10**9)
    s.engine.submit(one(s, 2, 1000.0))
    s.fake.gate.set()
    s.caller.wait(1, 2)
    assert isinstance(s.caller.outcomes[1], OverloadedError), s.caller.outcomes[1]
    assert "us left of its time" in s.caller.outcomes[1].message
    assert isinstance(s.caller.outcomes[2], Answer)
    assert [call[0] for call in s.fake.calls] == [1, 1]


def test_a_batch_waits_for_more_requests_as_long_as_it_is_told_to(make):
    """The second request comes within the delay of the first, and a full batch does not wait for its end."""
    s = make(policy=Policy(4, max_wait_ns=10**10))
    s.engine.submit(s.caller.request(1, inputs(1), [[2]], [[1.0]]))
    s.engine.submit(s.caller.request(2, inputs(3), [[2]] * 3, [[1.0]] * 3))
    s.caller.wait(1, 2)
    assert [tokens for tokens, *_ in s.fake.calls] == [4]


def test_a_batching_delay_ends_in_time(make):
    s = make(policy=Policy(64, max_wait_ns=30 * 10**6))
    begun = time.monotonic()
    s.run(s.caller.request(1, inputs(1), [[2]], [[1.0]]))
    assert time.monotonic() - begun >= 0.03
    assert s.caller.outcomes[1].queue_ns >= 30 * 10**6
