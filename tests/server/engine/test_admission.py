"""admit(): who is let in, as a pure function."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertd.errors import DeadlineExceededError, DrainingError, NotReadyError, OverloadedError, QueueFullError
from expertd_server.engine.admission import Amount, Queue, QueueLimits, State, admit, shut
from expertd_server.engine.request import EngineRequest, Operand
from expertd_server.engine.served import ServedLayer

NOTHING = Operand("bf16", np.empty(0, np.uint16))
LAYER = ServedLayer(0, 8, range(8), 2, 16, 32, None, "none")


def request(tokens=1, top_k=1, deadline_ns=0) -> EngineRequest:
    return EngineRequest(LAYER, tokens, top_k, NOTHING, NOTHING, None, lambda *_: None, deadline_ns=deadline_ns)


def test_a_server_that_does_not_serve_says_why_before_anything_else():
    full = Amount(1 << 20, 1 << 20, 1 << 30, 1 << 40)
    for state, error in ((State.LOADING, NotReadyError), (State.DRAINING, DrainingError)):
        assert isinstance(shut(state), error)
        assert isinstance(admit(Queue(state, full, full, 1.0), request(deadline_ns=1), 2, QueueLimits()), error)
    assert shut(State.SERVING) is None


@pytest.mark.parametrize(("deadline_ns", "late"), [(0, False), (99, True), (100, True), (101, False)])
def test_a_request_has_to_have_time_left(deadline_ns, late):
    refusal = admit(Queue(State.SERVING), request(deadline_ns=deadline_ns), 100, QueueLimits())
    assert isinstance(refusal, DeadlineExceededError) if late else refusal is None


@pytest.mark.parametrize(
    ("late_ns", "refuse", "refused"), [(0.0, True, False), (2.5e6, True, True), (2.5e6, False, False)]
)
def test_a_request_that_would_be_late_is_refused_with_what_it_lacks(late_ns, refuse, refused):
    queue, limits = Queue(State.SERVING, late_ns=late_ns), QueueLimits(refuse_late=refuse)
    refusal = admit(queue, request(deadline_ns=10_000_000), 4_000_000, limits)
    assert isinstance(refusal, OverloadedError) == refused
    if refusal is not None:
        assert "got 6.0 ms left of its time, want 8.5" in refusal.message
        assert refusal.retry_after_us == 2500


def test_what_a_request_holds_is_its_operands_and_its_output():
    x, ids, w = Operand("bf16", np.empty(48, np.uint16)), Operand("i32", np.empty(6, np.int32)), np.empty(6, np.float32)
    r = EngineRequest(LAYER, 3, 2, x, ids, Operand("f32", w), lambda *_: None, output_dtype="f32")
    assert (r.routes, r.nbytes) == (6, 96 + 24 + 24 + 3 * 16 * 4)


LIMITS = QueueLimits(tokens=100, requests=10, routes=300, nbytes=50_000)


@pytest.mark.parametrize(
    ("tokens", "top_k", "limit"),
    [(1, 1, "10"), (20, 1, "100"), (10, 8, "300"), (40, 1, "100")],
    ids=["requests", "tokens", "routes", "few and large"],
)
def test_one_caller_alone_may_fill_the_queue_and_not_a_request_more(tokens, top_k, limit):
    limits = LIMITS._replace(nbytes=1 << 30)
    r, all_ = request(tokens, top_k), Amount()
    while (refusal := admit(Queue(State.SERVING, all_, all_, 2000.0), r, 0, limits)) is None:
        all_ = all_.plus(r)
    assert isinstance(refusal, QueueFullError)
    assert f"want at most {limit} of one caller" in refusal.message
    assert refusal.retry_after_us == max(1, int(all_.tokens * 2))
    assert all_.requests <= 10
    assert all_.tokens <= 100
    assert all_.routes <= 300
    more = all_.plus(r)
    assert more.requests > 10 or more.tokens > 100 or more.routes > 300


def test_bytes_are_bounded():
    r = request(tokens=10)  # an output of 320 bytes
    assert (
        admit(Queue(State.SERVING, Amount(1, 1, 1, 680), Amount(1, 1, 1, 680)), r, 0, LIMITS._replace(nbytes=1000))
        is None
    )
    refusal = admit(
        Queue(State.SERVING, Amount(1, 1, 1, 681), Amount(1, 1, 1, 681)), r, 0, LIMITS._replace(nbytes=1000)
    )
    assert isinstance(refusal, QueueFullError)
    assert "got 681 bytes waiting" in refusal.message


def test_what_leaves_takes_as_much_away_as_it_brought():
    waiting = Amount(5, 50, 100, 10_000)
    assert waiting.plus(request(7, 3)) == Amount(6, 57, 121, 10_000 + request(7, 3).nbytes)
    assert waiting.plus(request(7, 3)).minus(request(7, 3)) == waiting


def test_an_empty_queue_takes_any_single_request():
    assert admit(Queue(State.SERVING), request(tokens=1 << 20, top_k=8), 0, LIMITS) is None


@given(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.integers(1, 8))
def test_whoever_fills_the_queue_leaves_room_for_the_next_one_who_comes(callers, top_k):
    """Greedy callers, each with requests of one size, fill it in turn; then a new one asks for one token."""
    of = [Amount() for _ in callers]
    all_, refused = Amount(), 0
    while refused < len(callers):
        refused = 0
        for i, tokens in enumerate(callers):
            r = request(tokens, top_k)
            if admit(Queue(State.SERVING, all_, of[i]), r, 0, LIMITS) is None:
                all_, of[i] = all_.plus(r), of[i].plus(r)
            else:
                refused += 1
    assert admit(Queue(State.SERVING, all_, Amount()), request(1), 0, LIMITS) is None
    assert all_.requests <= 10 * 4 / 3
    assert all_.tokens <= 100 * 4 / 3
    assert all_.routes <= 300 * 4 / 3
    assert max(a.requests for a in of) <= 10
