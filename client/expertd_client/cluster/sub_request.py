"""A sub-request, which is a part of a call while it is under way, and one try of it at one server."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

from expertd.errors import ExpertdError
from expertd_client.cluster.member import Member
from expertd_client.cluster.result import Answered
from expertd_client.cluster.split import SubBatch
from expertd_client.requests.result import ForwardResult
from expertd_client.tracing import TracedCall

__all__ = ["Attempt", "AttemptOwner", "SubRequest", "in_order", "report"]


class SubRequest:
    """A part under way.

    replicas  addresses of the servers that hold all of its experts; chosen: the first to be asked, None = any
    first     the lowest expert of its groups
    apart     nobody else holds all of its experts, but others hold them among themselves
    tries     where it is in flight now; asked: servers that were asked so far; spurned: where it failed
    due_s     when something is to be done about it; infinite = when an event comes
    since_s   when it was first found that nobody can be asked; 0 = never
    result    its answer, from `server`, `seconds` after the call began; None until it came
    """

    __slots__ = (
        "apart",
        "asked",
        "chosen",
        "due_s",
        "first",
        "part",
        "replicas",
        "result",
        "seconds",
        "server",
        "since_s",
        "spurned",
        "tries",
    )

    def __init__(
        self, part: SubBatch, replicas: Sequence[str], first: int, chosen: Member | None, apart: bool = False
    ) -> None:
        self.part = part
        self.apart = apart
        self.chosen = chosen
        self.replicas = replicas
        self.first = first
        self.tries: list[Attempt] = []
        self.asked = 0
        self.spurned: list[Member] = []
        self.due_s = math.inf
        self.since_s = 0.0
        self.result: ForwardResult | None = None
        self.server: Member | None = None
        self.seconds = 0.0


class AttemptOwner(Protocol):
    """What a Flight is to its attempts.  traced: what is recorded of the call; None = nothing is."""

    traced: TracedCall | None

    def answered(self, attempt: Attempt, result: ForwardResult, /) -> None:
        """Its answer came; the owner releases it where it is of no use."""

    def failed(self, attempt: Attempt, error: ExpertdError, /) -> None:
        """It came to nothing."""


class Attempt:
    """A sub-request at one server; the waiter of its request."""

    __slots__ = ("_owner", "begin_s", "member", "request_id", "sub", "traced")

    def __init__(self, owner: AttemptOwner, sub: SubRequest, member: Member, begin_s: float) -> None:
        self._owner = owner
        self.sub = sub
        self.member = member
        self.begin_s = begin_s
        self.request_id = 0
        traced = owner.traced
        self.traced = None if traced is None else traced.part(member.address, sub.part.request.tokens)

    def answer(self, value: ForwardResult) -> None:
        self._owner.answered(self, value)

    def fail(self, error: ExpertdError) -> None:
        self._owner.failed(self, error)

    def recall(self) -> None:
        """Its answer is not wanted any more."""
        if self.request_id and self.member.exchange.cancel(self.request_id):
            self.member.dropped(self.sub.part.request.tokens)


def in_order(sub_requests: Iterable[SubRequest]) -> list[SubRequest]:
    """That in which they are added: it does not depend on who answered, nor when."""
    return sorted(sub_requests, key=lambda sub: (sub.first, 0 if sub.part.rows is None else int(sub.part.rows[0])))


def report(sub_requests: Iterable[SubRequest], layer: int) -> tuple[Answered, ...]:
    """Who answered what."""
    return tuple(_answered(sub, layer) for sub in sub_requests)


def _answered(sub: SubRequest, layer: int) -> Answered:
    assert sub.result is not None
    assert sub.server is not None
    backend = sub.result.timing.backend or sub.server.backends.get(layer, "")  # shared memory does not carry the name
    part = sub.part
    return Answered(sub.server.address, part.request.tokens, part.routes, sub.asked, sub.seconds, backend)
