"""admit(): who is let in, as a pure function."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertd.errors import DeadlineExceededError, DrainingError, NotReadyError, QueueFullError
from expertd_server.engine.admission import Queue, QueueLimits, State, admit, shut
from expertd_server.engine.request import Operand, Request
from expertd_server.engine.served import ServedLayer

NOTHING = Operand("bf16", np.empty(0, np.uint16))
LAYER = ServedLayer(0, 8, range(8), 2, 16, 32, None, "none")


def request(tokens=1, deadline_ns=0) -> Request:
    return Request(LAYER, tokens, 1, NOTHING, NOTHING, None, lambda *_: None, deadline_ns=deadline_ns)


def test_a_server_that_does_not_serve_says_why_before_anything_else():
    full = {"tokens": 1 << 20, "requests": 1 << 20, "token_ns": 1.0}
    for state, error in ((State.LOADING, NotReadyError), (State.DRAINING, DrainingError)):
        assert isinstance(shut(state), error)
        assert isinstance(admit(Queue(state, **full), request(deadline_ns=1), 2, QueueLimits()), error)
    assert shut(State.SERVING) is None


@pytest.mark.parametrize(("deadline_ns", "late"), [(0, False), (99, True), (100, True), (101, False)])
def test_a_request_has_to_have_time_left(deadline_ns, late):
    refusal = admit(Queue(State.SERVING, 0, 0, 0.0), request(deadline_ns=deadline_ns), 100, QueueLimits())
    assert isinstance(refusal, DeadlineExceededError) if late else refusal is None


queues = st.builds(
    Queue, st.just(State.SERVING), st.integers(0, 100), st.integers(0, 10), st.floats(0, 1e6, allow_nan=False)
)
limits = st.builds(QueueLimits, st.integers(1, 100), st.integers(1, 10))


@given(queues, st.integers(1, 100), limits)
def test_the_queue_has_bounds_and_says_when_to_come_again(queue, tokens, limits):
    refusal = admit(queue, request(tokens), 0, limits)
    if refusal is None:
        assert queue.requests == 0 or (queue.requests < limits.requests and queue.tokens + tokens <= limits.tokens)
    else:
        assert isinstance(refusal, QueueFullError)
        assert queue.requests > 0, "an empty queue takes any single request"
        assert queue.requests >= limits.requests or queue.tokens + tokens > limits.tokens
        assert refusal.retry_after_us == max(1, int(queue.tokens * queue.token_ns / 1000))
