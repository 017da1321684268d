"""One server of a call that its caller carries out himself: its session, and what it is told about."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

from expertd.shm.layout import Completion
from expertd_client.cluster import native
from expertd_client.cluster.assignment import Assigned
from expertd_client.cluster.member import Member
from expertd_client.cluster.result import Answered
from expertd_client.cluster.routing import most_tokens
from expertd_client.cluster.shared import ClusterState
from expertd_client.cluster.split import SubBatch
from expertd_client.cluster.sub_request import Attempt, SubRequest
from expertd_client.exchange.link import Link
from expertd_client.requests.deadline import Deadline
from expertd_client.requests.request import Request
from expertd_client.requests.result import ForwardResult
from expertd_client.tracing import TracedCall
from expertd_client.transports.message import Sent, message_bytes, refusal, timing_of
from expertd_client.transports.protocol import CallingConnection, ConnectionFullError

if TYPE_CHECKING:
    from expertd_client.cluster.flight import Flight

__all__ = ["ServerCall", "server_call"]


class ServerCall:
    """Its session is used until leave().  tokens, routes: of its part."""

    __slots__ = ("_used", "assigned", "connection", "link", "member", "routes", "tokens")

    def __init__(
        self, member: Member, assigned: Assigned, link: Link, connection: CallingConnection, tokens: int, routes: int
    ) -> None:
        """Raises ConnectionFullError where the session is over."""
        self.member, self.assigned, self.link, self.connection = member, assigned, link, connection
        self.tokens, self.routes = tokens, routes
        connection.use()
        self._used = True

    def leave(self) -> None:
        """The session is not used any more."""
        if self._used:
            self._used = False
            self.connection.unuse()

    def lend(self, ticket: int, sent: Sent, request: Request, answer: Completion) -> ForwardResult:
        """The answer, whose memory, and so the session, stays until it is released."""
        self._used = False
        return self.connection.lend(ticket, sent, request, answer)

    def late_at_s(self, state: ClusterState, begin_s: float) -> float:
        """When somebody else is to be asked for its part; infinite: nobody else could be."""
        assigned = self.assigned
        if not assigned.raced:
            return math.inf
        late_s = math.inf if assigned.apart else state.latencies.late_s(self.tokens)
        return min(begin_s + late_s, max(begin_s, self.member.stalls_at_s()) + 1e-3)

    def answered(
        self,
        state: ClusterState,
        seconds: float,
        inside_ns: int,
        queued_tokens: int,
        token_ns: float,
        late: bool = False,
    ) -> None:
        """Its part was answered `seconds` after the call began, or, if late, somewhat earlier; the others as the answer
        says."""
        self.member.heard(self.tokens, seconds, inside_ns, queued_tokens, token_ns, late)
        if len(self.assigned.replicas) > 1 and not late:
            state.latencies.add(self.tokens, seconds)

    def report(self, layer: int, seconds: float, name: bytes) -> Answered:
        """For the caller.  name: of the backend, as the answer says."""
        backend = _text(name) or self.member.backends.get(layer, "")
        return Answered(self.member.address, self.tokens, self.routes, 1, seconds, backend)

    def record(self, traced: TracedCall, begin_s: float, sent_ns: int, answer: Completion, answered_ns: int) -> None:
        """For a trace: when its part was sent and answered."""
        part = traced.part(self.member.address, self.tokens)
        part.begin_ns, part.sent_ns = int(begin_s * 1e9), sent_ns
        part.transport = self.member.exchange.transport_name
        part.answered(timing_of(answer), answered_ns)

    # ---- out of the ordinary -----------------------------------------------------------------------------------------

    def sub(self, part: SubBatch) -> SubRequest:
        """Its part of a Flight."""
        return SubRequest(part, self.assigned.replicas, self.assigned.first, None, self.assigned.apart)

    def tell(
        self,
        flight: Flight,
        attempt: Attempt,
        deadline: Deadline | None,
        ticket: int,
        state: int,
        at_s: float,
        sent: Sent,
        answer: Completion,
    ) -> None:
        """Tells a Flight what became of a part that was sent: it is in one of native's states since `at_s`.  ticket: 0
        where the session ended before one was known."""
        connection, request = self.connection, attempt.sub.part.request
        if state == native.ANSWERED:
            flight.answered(attempt, self.lend(ticket, sent, request, answer), at_s)
        elif state == native.REFUSED:
            connection.release(ticket)
            flight.failed(attempt, refusal(answer))
        elif state == native.LOST:
            if ticket:
                connection.abandon(ticket)
            flight.failed(attempt, connection.lost())
        else:
            exchange = self.member.exchange
            attempt.request_id = exchange.adopt(self.link, connection, ticket, sent, request, deadline, attempt)
            if attempt not in attempt.sub.tries:  # the call was over before
                attempt.recall()

    def abandon(self, ticket: int) -> None:
        """Nobody wants its answer; 0: it was not sent."""
        if ticket:
            self.connection.abandon(ticket)
        self.member.dropped(self.tokens)


def server_call(
    state: ClusterState, assigned: Assigned, request: Request, tokens: int, routes: int, now_s: float
) -> ServerCall | None:
    """None: the server cannot be asked so now for a part of a request."""
    member = state.members.by_address.get(assigned.server)
    if member is None or not member.usable(now_s):
        return None
    if request.weights_version and not member.holds(request.weights_version, request.layer):
        return None
    found = member.exchange.blocking()
    if found is None or (tokens > 1 and 0 < most_tokens(state.members, assigned.replicas) < tokens):
        return None
    link, connection = found
    if 0 < connection.most_bytes < message_bytes(request):
        return None
    try:
        return ServerCall(member, assigned, link, connection, tokens, routes)
    except ConnectionFullError:
        return None


@lru_cache(maxsize=256)
def _text(name: bytes) -> str:
    """Of a backend, filled up with zeros."""
    return name.rstrip(b"\0").decode(errors="replace")
