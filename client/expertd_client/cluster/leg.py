"""A sub-request, which is a part of a call while it is under way, and one try of it at one server."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from expertd.errors import ExpertdError
from expertd_client.cluster.member import Member
from expertd_client.cluster.result import Answered
from expertd_client.cluster.split import Part
from expertd_client.requests.result import ForwardResult

if TYPE_CHECKING:
    from expertd_client.cluster.flight import Flight

__all__ = ["Leg", "Try", "in_order", "report"]


class Leg:
    """A part under way.

    holders   addresses of the servers that hold all of its experts; chosen: the first to be asked, None = any
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
        "holders",
        "part",
        "result",
        "seconds",
        "server",
        "since_s",
        "spurned",
        "tries",
    )

    def __init__(
        self, part: Part, holders: Sequence[str], first: int, chosen: Member | None, apart: bool = False
    ) -> None:
        self.part = part
        self.apart = apart
        self.chosen = chosen
        self.holders = holders
        self.first = first
        self.tries: list[Try] = []
        self.asked = 0
        self.spurned: list[Member] = []
        self.due_s = math.inf
        self.since_s = 0.0
        self.result: ForwardResult | None = None
        self.server: Member | None = None
        self.seconds = 0.0


class Try:
    """A leg at one server; the waiter of its request."""

    __slots__ = ("_flight", "begin_s", "leg", "member", "request_id", "traced")

    def __init__(self, flight: Flight, leg: Leg, member: Member, begin_s: float) -> None:
        self._flight = flight
        self.leg = leg
        self.member = member
        self.begin_s = begin_s
        self.request_id = 0
        traced = flight.traced
        self.traced = None if traced is None else traced.part(member.address, leg.part.request.tokens)

    def answer(self, value: ForwardResult) -> None:
        self._flight.answered(self, value)

    def fail(self, error: ExpertdError) -> None:
        self._flight.failed(self, error)

    def recall(self) -> None:
        """Its answer is not wanted any more."""
        if self.request_id and self.member.exchange.cancel(self.request_id):
            self.member.dropped(self.leg.part.request.tokens)


def in_order(legs: Iterable[Leg]) -> list[Leg]:
    """That in which they are added: it does not depend on who answered, nor when."""
    return sorted(legs, key=lambda leg: (leg.first, 0 if leg.part.rows is None else int(leg.part.rows[0])))


def report(legs: Iterable[Leg], layer: int) -> tuple[Answered, ...]:
    """Who answered what."""
    return tuple(_answered(leg, layer) for leg in legs)


def _answered(leg: Leg, layer: int) -> Answered:
    assert leg.result is not None
    assert leg.server is not None
    backend = leg.result.timing.backend or leg.server.backends.get(layer, "")  # shared memory does not carry the name
    part = leg.part
    return Answered(leg.server.address, part.request.tokens, part.routes, leg.asked, leg.seconds, backend)
