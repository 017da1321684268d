"""A call that the calling thread carries out itself, where every server of it has a session that lets it: parts are
gathered where the servers read them, sent, waited for together and added up, in C++ (csrc/ask.cpp).

Nothing but the ordinary is done here.  A part that fails, is late, cannot be sent or does not fit makes a Flight of the
call, with what was answered and what is under way: hand_over().
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expertd.dtypes import DTYPE_BYTES
from expertd.shm.layout import Tensors
from expertd_client.beside import CallConnection
from expertd_client.cluster import native
from expertd_client.cluster.assign import Assigned, Assignment, assignment
from expertd_client.cluster.call import Call
from expertd_client.cluster.desk import Desk, Told
from expertd_client.cluster.flight import Flight
from expertd_client.cluster.join import Sum, adds_up, join
from expertd_client.cluster.leg import Leg, Try
from expertd_client.cluster.member import Member
from expertd_client.cluster.place import most_tokens
from expertd_client.cluster.policy import choose
from expertd_client.cluster.result import Answered, ClusterResult
from expertd_client.cluster.split import Part, Shares, part_of, scanned
from expertd_client.cluster.surroundings import Surroundings
from expertd_client.cluster.table import LayerTable
from expertd_client.deadline import Deadline
from expertd_client.link import Link
from expertd_client.request import Request
from expertd_client.result import ForwardResult
from expertd_client.shm_message import Sent, load_of, message_bytes, refusal, timing_of
from expertd_client.tensors import numpy_dtype
from expertd_client.transport import ChannelFullError

__all__ = ["DirectCall", "direct_call"]

_SLICE_S = 0.1
"""How long a call may keep the interpreter from looking at signals."""
_DONE, _TIME_OVER = 0, 1


class _Server:
    """One server of a call, whose session is used until leave().  number: of its share; owner: of the assignment."""

    __slots__ = ("_used", "assigned", "link", "member", "number", "owner", "routes", "tokens", "way")

    def __init__(
        self,
        number: int,
        owner: int,
        member: Member,
        assigned: Assigned,
        link: Link,
        way: CallConnection,
        tokens: int,
        routes: int,
    ) -> None:
        self.number, self.owner, self.member, self.assigned = number, owner, member, assigned
        self.link, self.way, self.tokens, self.routes = link, way, tokens, routes
        way.use()
        self._used = True

    def sent(self, desk: Desk, request: Request) -> Sent:
        """Its part as a request that was sent."""
        hidden_size, out_dtype = request.hidden_states.shape[1], request.dtypes[0]
        room = Tensors(out_bytes=self.tokens * hidden_size * DTYPE_BYTES[out_dtype])
        return Sent(desk.submission(self.number), room, (), out_dtype, (self.tokens, hidden_size))

    def lend(self, desk: Desk, ticket: int, request: Request) -> ForwardResult:
        """The answer, whose memory stays until it is released."""
        self._used = False
        return self.way.lend(ticket, self.sent(desk, request), request, desk.answer(self.number))

    def leave(self) -> None:
        """The session is not used any more."""
        if self._used:
            self._used = False
            self.way.unuse()


def direct_call(around: Surroundings, call: Call, deadline: Deadline | None) -> DirectCall | None:
    """None: not every part of it can go so.  Raises what start() raises."""
    library, table = native.library(), around.members.table(call.layer)
    if library is None or not call.host.tokens or not _has_sessions(around, table):
        return None
    desk = around.desks.pop() if around.desks else Desk(around.usual_ns)
    made = None
    try:
        made = _made(library, around, call, deadline, table, desk)
    finally:
        if made is None:
            around.desks.append(desk)
    return made


def _made(
    library: native.Library,
    around: Surroundings,
    call: Call,
    deadline: Deadline | None,
    table: LayerTable,
    desk: Desk,
) -> DirectCall | None:
    request = call.host
    batch, kept = native.batch_of(request)
    desk.put_batch(batch)
    tokens, top_k = request.topk_ids.shape
    routes, groups = 0, table.groups
    if not table.single or table.whole:
        routes, groups, orphans = scanned(library, desk.batch, table, call.layer)
        if orphans:
            return None
    chosen = table.addresses if table.single else _chosen(around, table, groups, tokens)
    if not chosen or not groups:
        return None
    assigned = assignment(table, groups, chosen)
    count = len(assigned.servers)
    desk.put_owners(table.group_of_at, assigned.owner_of_group_at, table.num_experts, count)
    found = None
    if not table.whole:
        found = desk.count(library, tokens, top_k, count)
        if found is None:
            return None
        routes = sum(found.routes)
        if count == 1 and found.tokens[0] == tokens:
            found = None
    servers = _servers(around, assigned, request, found, routes)
    if not servers:
        return None
    return DirectCall(library, around, call, deadline, table, assigned, desk, kept, servers, found, routes)


def _has_sessions(around: Surroundings, table: LayerTable) -> bool:
    """Whether it is worth a look: that one server has one."""
    member = around.members.by_address.get(table.holders[0][0]) if table.holders else None
    return member is not None and member.exchange.direct() is not None


def _chosen(around: Surroundings, table: LayerTable, groups: tuple[int, ...], tokens: int) -> tuple[str, ...]:
    """The server of each group; none: one has nobody who can be asked now."""
    chosen = []
    for group in groups:
        there = around.members.usable(table.holders[group])
        if not there:
            return ()
        chosen.append(choose(there, tokens, around.clock(), around.rng).address)
    return tuple(chosen)


def _servers(
    around: Surroundings, assigned: Assignment, request: Request, found: Shares | None, routes: int
) -> list[_Server] | None:
    """Those that get something; None: one of them cannot be asked so now."""
    servers: list[_Server] = []
    known, now_s = around.members.by_address, around.clock()
    for n, one in enumerate(assigned.servers):
        tokens = request.tokens if found is None else found.tokens[n]
        if not tokens:
            continue
        member = known.get(one.server)
        direct = member.exchange.direct() if member is not None and member.usable(now_s) else None
        try:
            if member is None or direct is None or 0 < most_tokens(around.members, one.holders) < tokens:
                raise ChannelFullError
            link, way = direct
            if 0 < way.most_bytes < message_bytes(request):
                raise ChannelFullError
            mine = routes if found is None else found.routes[n]
            servers.append(_Server(len(servers), n, member, one, link, way, tokens, mine))
        except ChannelFullError:
            for server in servers:
                server.leave()
            return None
    return servers


class DirectCall:
    """answer(), and then hand_over() where that said None.

    found    which server gets which tokens; None = the only one gets all
    """

    def __init__(
        self,
        library: native.Library,
        around: Surroundings,
        call: Call,
        deadline: Deadline | None,
        table: LayerTable,
        assigned: Assignment,
        desk: Desk,
        kept: Any,
        servers: list[_Server],
        found: Shares | None,
        routes: int,
    ) -> None:
        self._library, self._around, self._call, self._deadline = library, around, call, deadline
        self._table, self._assigned, self._desk, self._kept = table, assigned, desk, kept
        self._servers, self._found, self._routes = servers, found, routes
        self._adds = False
        self._begin_s = 0.0

    def answer(self) -> ClusterResult | None:
        """None: hand_over()."""
        if self._call.traced is not None:
            self._call.traced.split()
        try:
            target = self._fill()
        except BaseException:
            self._leave()
            raise
        self._begin_s = self._around.clock()
        try:
            for server in self._servers:
                server.member.begun(server.tokens)
            due_s = self._due_s()
            how = self._library.ask(self._desk.call, self._until_ns(due_s))
            while how == _TIME_OVER and self._around.clock() < due_s:
                how = self._library.wait(self._desk.call, self._until_ns(due_s))
        except BaseException:  # an interrupt
            self._abandon()
            raise
        if how != _DONE:
            return None
        try:
            return self._result(target)
        finally:
            self._leave()

    # ---- the ordinary ------------------------------------------------------------------------------------------------

    def _fill(self) -> NDArray[Any] | None:
        """What the C++ is told.  Returns the array where the sum comes; None: the only partial sum is lent."""
        desk, request, found = self._desk, self._call.host, self._found
        end_s = math.inf if self._deadline is None else self._deadline.end_s
        desk.put_call(request, request.topk_ids.shape[1], end_s, len(self._servers))
        for server in self._servers:
            begin = -1 if found is None else found.begins[server.owner]
            desk.put_share(server.number, server.owner, server.way.session, begin, server.tokens, server.routes)
        sums = numpy_dtype(request.dtypes[0])
        if found is None and self._call.lends(sums):
            desk.put_sum(0, 0, False, False)
            return None
        target = self._call.target()
        self._adds = adds_up(sums, target)
        address = native.at(target) if self._adds else 0
        desk.put_sum(address, target.strides[0], sums.itemsize == 2, target.itemsize == 2)
        return target

    def _due_s(self) -> float:
        """When somebody else is to be asked, or the time is over."""
        due_s = math.inf if self._deadline is None else self._deadline.end_s
        for server in self._servers:
            assigned = server.assigned
            if len(assigned.holders) > 1 or assigned.apart:
                late_s = math.inf if assigned.apart else self._around.latencies.late_s(server.tokens)
                stalls_s = max(self._begin_s, server.member.stalls_at_s()) + 1e-3
                due_s = min(due_s, self._begin_s + late_s, stalls_s)
        return due_s

    def _until_ns(self, due_s: float) -> int:
        return int(min(due_s, self._around.clock() + _SLICE_S) * 1e9)

    def _leave(self) -> None:
        for server in self._servers:
            server.leave()
        self._around.desks.append(self._desk)

    def _result(self, target: NDArray[Any] | None) -> ClusterResult:
        """All parts were answered, and added up where the C++ does that."""
        call, desk, servers = self._call, self._desk, self._servers
        told = [desk.told(server.number) for server in servers]
        last = max(range(len(told)), key=lambda n: told[n].answered_ns)
        answer = desk.answer(servers[last].number)
        parts = tuple([self._heard(*one) for one in zip(servers, told, strict=True)])
        if call.traced is not None:
            self._record(told)
        give_back = None
        if target is None:
            only = servers[0].lend(desk, told[0].ticket, call.host)
            output, kept = call.lent(only.output)
            if kept:
                give_back = only.release
            else:
                only.release()
        else:
            if not self._adds:
                self._add_up(told, target)
            output = call.delivered(target)
        result = ClusterResult(
            output,
            None,
            self._routes,
            partial(timing_of, answer),
            partial(load_of, answer),
            self._around.members.epoch,
            give_back,
            parts=parts,
        )
        if call.traced is not None:
            call.traced.end()
        return result

    def _heard(self, server: _Server, told: Told) -> Answered:
        member, tokens, late = server.member, server.tokens, bool(told.late)
        seconds = told.answered_ns * 1e-9 - self._begin_s
        member.heard(tokens, seconds, told.inside_ns, told.queued_tokens, told.token_ns, late)
        if len(server.assigned.holders) > 1 and not late:
            self._around.latencies.add(tokens, seconds)
        backend = _text(told.name) or member.backends.get(self._call.layer, "")
        return Answered(member.address, tokens, server.routes, 1, seconds, backend)

    def _record(self, told: list[Told]) -> None:
        """For a trace: when each part was sent and answered."""
        traced = self._call.traced
        assert traced is not None
        for server, one in zip(self._servers, told, strict=True):
            part = traced.part(server.member.address, server.tokens)
            part.begin_ns, part.sent_ns = int(self._begin_s * 1e9), one.sent_ns
            part.transport = server.member.exchange.way
            part.answered(timing_of(self._desk.answer(server.number)), one.answered_ns)
        traced.joined_ns = max(one.answered_ns for one in told)

    def _add_up(self, told: list[Told], target: NDArray[Any]) -> None:
        """Where the C++ does not: sums in f16."""
        parts = self._parts()
        answers = [s.lend(self._desk, t.ticket, p.request) for s, t, p in zip(self._servers, told, parts, strict=True)]
        join([Sum(part.rows, answer.output) for part, answer in zip(parts, answers, strict=True)], target)
        for answer in answers:
            answer.release()

    # ---- out of the ordinary -----------------------------------------------------------------------------------------

    def hand_over(self, landed: Callable[[Flight], object]) -> Flight:
        """The call as a Flight, with what was answered, what failed and what is under way."""
        try:
            parts = self._parts()
        except BaseException:
            self._abandon()
            raise
        flight = Flight(self._around, self._call, self._deadline, landed, self._begin_s)
        sent = []
        for server, part in zip(self._servers, parts, strict=True):
            assigned = server.assigned
            leg = Leg(part, assigned.holders, assigned.first, None, assigned.apart)
            flight.add(leg)
            told = self._desk.told(server.number)
            if told.ticket:
                sent.append((told, server, flight.sent(leg, server.member)))
            else:
                server.member.dropped(server.tokens)
        flight.take_off()
        for told, server, attempt in sorted(sent, key=lambda one: one[0].state):  # first what is in flight
            self._tell(flight, server, attempt, told)
        self._leave()
        return flight

    def _tell(self, flight: Flight, server: _Server, attempt: Try, told: Told) -> None:
        way, request, desk = server.way, attempt.leg.part.request, self._desk
        exchange = server.member.exchange
        if attempt.traced is not None:
            attempt.traced.sent_ns, attempt.traced.transport = told.sent_ns, exchange.way
        if told.state == native.ANSWERED:
            flight.answered(attempt, server.lend(desk, told.ticket, request), told.answered_ns * 1e-9)
        elif told.state == native.REFUSED:
            way.release(told.ticket)
            flight.failed(attempt, refusal(desk.answer(server.number)))
        elif told.state == native.LOST:
            way.abandon(told.ticket)
            flight.failed(attempt, way.lost())
        else:
            sent = server.sent(desk, request)
            attempt.request_id = exchange.adopt(server.link, way, told.ticket, sent, request, self._deadline, attempt)
            if attempt not in attempt.leg.tries:  # the call was over before
                attempt.recall()

    def _abandon(self) -> None:
        for server in self._servers:
            ticket = self._desk.told(server.number).ticket
            if ticket:
                server.way.abandon(ticket)
            server.member.dropped(server.tokens)
        self._leave()

    def _parts(self) -> list[Part]:
        """What each server was sent, gathered once more."""
        request, found = self._call.host, self._found
        if found is None:
            return [Part(0, None, request, self._routes)]
        ids = request.topk_ids
        owner = np.where(ids < 0, -1, self._assigned.owner_of_group[self._table.group_of[ids]])
        parts = []
        for server in self._servers:
            n, begin = server.owner, found.begins[server.owner]
            rows = found.rows[begin : begin + server.tokens].copy()  # the desk's
            parts.append(Part(n, rows, part_of(request, rows, owner[rows] == n), server.routes))
        return parts


@lru_cache(maxsize=256)
def _text(name: bytes) -> str:
    """Of a backend, filled up with zeros."""
    return name.rstrip(b"\0").decode(errors="replace")
