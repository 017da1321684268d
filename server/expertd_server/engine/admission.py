"""What may wait, and what a server that does not serve says.  The core admits requests by these limits
(Accounts::enter, csrc/accounts.h); the texts of its refusals are in refusal_texts.py."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from expertd.errors import ExpertdError, NotReadyError
from expertd_server.engine.refusal_texts import refusal

# Why it is so: decisions 94 and 120 in DECISIONS.md.
__all__ = ["Limits", "QueueLimits", "State", "fits", "shut"]


class State(Enum):
    """Of a server, in this order."""

    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"


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
        return refusal("draining")
    return None


def fits(own: int, all_: int, limit: int) -> bool:
    """Whether a caller may have `own` waiting where all callers together have `all_`, both with what he asks for.

    A caller alone may have `limit`; n callers who all want as much as they can get have 4/(3n + 1) of it each, and at
    most 4/3 together.  So whoever fills the queue leaves room for the next one who comes.
    """
    return own + 3 * all_ <= 4 * limit
