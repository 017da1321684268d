"""Errors of admission: why a request may not wait for a batch.  The core decides (Accounts::enter, csrc/accounts.h);
these pure functions state the same rules in Python and make the error.

    shut(state)                         why no request is admitted, or None
    admit(queue, request, now, limits)  why this request is not, or None

A refusal is an error of expertd.errors.  The request says who asks (EngineRequest.caller), how much (tokens, top_k) and
until when (deadline_ns).
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from expertd.errors import (
    DeadlineExceededError,
    DrainingError,
    ExpertdError,
    NotReadyError,
    OverloadedError,
    QueueFullError,
)
from expertd_server.engine.request import EngineRequest

# Why it is so: decisions 94 and 120 in DECISIONS.md.
__all__ = ["Amount", "Limits", "Queue", "QueueLimits", "State", "admit", "fits", "overloaded", "shut", "too_late"]


class State(Enum):
    """Of a server, in this order."""

    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"


class Amount(NamedTuple):
    """What waits, of all or of one caller."""

    requests: int = 0
    tokens: int = 0
    routes: int = 0
    nbytes: int = 0

    def plus(self, r: EngineRequest) -> Amount:
        return Amount(self.requests + 1, self.tokens + r.tokens, self.routes + r.routes, self.nbytes + r.nbytes)

    def minus(self, r: EngineRequest) -> Amount:
        return Amount(self.requests - 1, self.tokens - r.tokens, self.routes - r.routes, self.nbytes - r.nbytes)


class Queue(NamedTuple):
    """all: what waits; own: what of it the caller has sent who asks now.  token_ns: recent service time of a token, 0 =
    not known yet.  late_ns: how long after its deadline the answer to what he asks may come (see forecast); <= 0 = in
    time."""

    state: State
    all: Amount = Amount()
    own: Amount = Amount()
    token_ns: float = 0.0
    late_ns: float = 0.0


class Limits(NamedTuple):
    """max_tokens: of a request.  max_message_bytes: of a received message.  max_in_flight: requests of one session.
    max_unread_bytes: answers, from their request's taking until they have left, of one session where no other has any
    (see fits).  max_half_sent_bytes: of messages that are not whole yet, likewise, of one connection."""

    max_tokens: int
    max_message_bytes: int
    max_in_flight: int
    max_unread_bytes: int = 1 << 29
    max_half_sent_bytes: int = 1 << 29


class QueueLimits(NamedTuple):
    """Most that may wait of one caller where nobody else waits; an empty queue takes any single request.  Each part is
    bounded by itself: tokens, the routes that they take (what computing costs), the bytes held for them, requests.
    refuse_late: what cannot be answered by its deadline is refused, and dropped before that has passed."""

    tokens: int = 1 << 17
    requests: int = 4096
    routes: int = 1 << 20
    nbytes: int = 2 << 30
    refuse_late: bool = True


def shut(state: State) -> ExpertdError | None:
    """Why a server in this state takes no request at all."""
    if state is State.LOADING:
        return NotReadyError("server: it loads and checks its weights; wait until its health is SERVING")
    if state is State.DRAINING:
        return DrainingError("server: it drains and takes no new requests; ask another replica")
    return None


def admit(queue: Queue, r: EngineRequest, now_ns: int, limits: QueueLimits) -> ExpertdError | None:
    """Why `r` may not join the queue."""
    closed = shut(queue.state)
    if closed is not None:
        return closed
    if r.expired(now_ns):
        return too_late()
    full = _full(queue, r, limits) if queue.all.requests else None
    if full is None and limits.refuse_late and queue.late_ns > 0:
        return overloaded(r.deadline_ns, now_ns, queue.late_ns)
    return full


def too_late() -> DeadlineExceededError:
    """The refusal of a request that came after its deadline."""
    return DeadlineExceededError("request: its deadline had passed when it came; want time left to compute it")


def overloaded(deadline_ns: int, now_ns: int, late_ns: float) -> OverloadedError:
    """The refusal of a request whose answer may come so long after its deadline."""
    left_ms = (deadline_ns - now_ns) * 1e-6
    return OverloadedError.about(
        "request",
        got=f"{left_ms:.1f} ms left of its time",
        want=f"{left_ms + late_ns * 1e-6:.1f}, with what runs and waits before it",
        remedy="try again after retry_after_us, or another replica",
        retry_after_us=max(1, int(late_ns) // 1000),
    )


def fits(own: int, all_: int, limit: int) -> bool:
    """Whether a caller may have `own` waiting where all callers together have `all_`, both with what he asks for.

    A caller alone may have `limit`; n callers who all want as much as they can get have 4/(3n + 1) of it each, and at
    most 4/3 together.  So whoever fills the queue leaves room for the next one who comes.
    """
    return own + 3 * all_ <= 4 * limit


def _full(queue: Queue, r: EngineRequest, limits: QueueLimits) -> QueueFullError | None:
    own, all_ = queue.own.plus(r), queue.all.plus(r)
    for name, unit in _UNITS:
        limit = getattr(limits, name)
        if not fits(getattr(own, name), getattr(all_, name), limit):
            waiting, mine = getattr(queue.all, name), getattr(queue.own, name)
            return QueueFullError.about(
                "queue",
                got=f"{waiting} {unit} waiting, {mine} of them this caller's, and {getattr(all_, name) - waiting} more",
                want=f"at most {limit} of one caller, and room for others",
                remedy="try again after retry_after_us, or another replica",
                retry_after_us=max(1, int(queue.all.tokens * queue.token_ns / 1000)),
            )
    return None


_UNITS = (("requests", "requests"), ("tokens", "tokens"), ("routes", "routes"), ("nbytes", "bytes"))
