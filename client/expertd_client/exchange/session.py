"""Over which transport messages travel between a client and one server: the main one, or a faster one that both agreed
on.

A client offers the transports that it has (SessionOffer).  The server accepts at most one, with a reason for each other
(SessionAnswer).  The client opens it with the token and the endpoint of that answer.  Until then, where none
is accepted, and after it broke, messages travel inline: on the connection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from expertd.errors import DeadlineExceededError

__all__ = ["INLINE", "Session", "unanswered"]

INLINE = "inline"


@dataclass(frozen=True, slots=True)
class Session:
    """What a client and a server agreed on.

    transport   "inline": on the connection itself, which is gRPC to an address; or the name of the transport that is
                open: "shm", "tcp".  Calls from GPU to GPU have a session of their own, which is not told here
    refused     the others that this client has, best first, each with the reason why it is not that one
    """

    transport: str = INLINE
    refused: Mapping[str, str] = field(default_factory=dict)


def unanswered(target: str, timeout_s: float) -> DeadlineExceededError:
    """The server at `target` left an offer without an answer."""
    return DeadlineExceededError.about(
        f"session with {target}", got=f"no answer to the offer within {timeout_s} s", want="one in time"
    )
