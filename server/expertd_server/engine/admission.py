"""Who is let in: pure functions of what waits, of the request, of the time and of the limits.

    shut(state)                         why nobody is, or None
    admit(queue, request, now, limits)  why this request is not, or None

A refusal is a row of the error table.  The request says who asks (Request.caller), how much (tokens, top_k) and until
when (deadline_ns).
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from expertd.errors import DeadlineExceededError, DrainingError, ExpertdError, NotReadyError, QueueFullError
from expertd_server.engine.request import Request

__all__ = ["Limits", "Queue", "QueueLimits", "State", "admit", "shut"]


class State(Enum):
    """Of a server, in this order."""

    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"


class Queue(NamedTuple):
    """What waits.  token_ns: recent service time of a token, 0 = not known yet."""

    state: State
    tokens: int
    requests: int
    token_ns: float


class Limits(NamedTuple):
    """max_tokens: of a request.  max_message_bytes: of a received message.  max_in_flight: requests of one session."""

    max_tokens: int
    max_message_bytes: int
    max_in_flight: int


class QueueLimits(NamedTuple):
    """Most that may wait; an empty queue takes any single request."""

    tokens: int = 1 << 17
    requests: int = 4096


def shut(state: State) -> ExpertdError | None:
    """Why a server in this state takes no request at all."""
    if state is State.LOADING:
        return NotReadyError("server: it loads and checks its weights; wait until its health is SERVING")
    if state is State.DRAINING:
        return DrainingError("server: it drains and takes no new requests; ask another replica")
    return None


def admit(queue: Queue, r: Request, now_ns: int, limits: QueueLimits) -> ExpertdError | None:
    """Why `r` may not join the queue."""
    closed = shut(queue.state)
    if closed is not None:
        return closed
    if r.expired(now_ns):
        return DeadlineExceededError("request: its deadline had passed when it came; want time left to compute it")
    if queue.requests and (queue.tokens + r.tokens > limits.tokens or queue.requests >= limits.requests):
        return QueueFullError.about(
            "queue",
            got=f"{queue.requests} requests of {queue.tokens} tokens waiting and one of {r.tokens} more",
            want=f"at most {limits.requests} requests of {limits.tokens} tokens",
            remedy="try again after retry_after_us, or another replica",
            retry_after_us=max(1, int(queue.tokens * queue.token_ns / 1000)),
        )
    return None
