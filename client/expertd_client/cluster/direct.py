"""A call that the calling thread carries out itself, where every server of it has a session that lets it: parts are
gathered where the servers read them, sent, waited for together and added up, in C++ (csrc/ask.cpp).

Nothing but the ordinary is done here.  A part that fails, is late, cannot be sent or does not fit makes a Flight of the
call, with what was answered and what is under way: hand_over().
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expertd.dtypes import DTYPE_BYTES
from expertd.shm.layout import Completion, Tensors
from expertd_client.cluster import native
from expertd_client.cluster.asked import Asked, asked
from expertd_client.cluster.assign import Assignment, assignment
from expertd_client.cluster.call import Call
from expertd_client.cluster.desk import Desk, Told
from expertd_client.cluster.flight import Flight
from expertd_client.cluster.join import Sum, adds_up, join
from expertd_client.cluster.policy import choose
from expertd_client.cluster.result import Answered, ClusterResult
from expertd_client.cluster.split import Part, Shares, part_of, scanned
from expertd_client.cluster.surroundings import Surroundings
from expertd_client.cluster.table import LayerTable
from expertd_client.requests.deadline import Deadline
from expertd_client.requests.request import Request
from expertd_client.requests.tensors import numpy_dtype
from expertd_client.tracing import TracedCall
from expertd_client.transports.core_connection import SLICE_S
from expertd_client.transports.message import Sent, load_of, timing_of

__all__ = ["DirectCall", "direct_call"]

_DONE, _TIME_OVER = 0, 1


def direct_call(around: Surroundings, call: Call, deadline: Deadline | None) -> DirectCall | None:
    """None: not every part of it can go so.  Raises what start() raises."""
    library, table = native.library(), around.members.table(call.layer)
    if library is None or not call.host.tokens or not _has_sessions(around, table):
        return None
    desk, made = _desk(around), None
    try:
        made = _made(library, around, call, deadline, table, desk)
    finally:
        if made is None:
            around.desks.append(desk)
    return made


def _desk(around: Surroundings) -> Desk:
    """One that nobody uses."""
    try:
        return around.desks.pop()
    except IndexError:  # a look before could be too early: another thread may take the last one
        return Desk(around.usual_ns)


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
    groups = table.groups
    if not table.single:
        _, groups, orphans = scanned(library, desk.batch, table, call.layer)
        if orphans:
            return None
    assigned = _assigned(around, table, groups, request)
    if assigned is None:
        return None
    count = len(assigned.servers)
    desk.put_owners(table.group_of_at, assigned.owner_of_group_at, table.num_experts, count)
    found = desk.count(library, tokens, top_k)
    if found is None:
        return None
    servers = _servers(around, assigned, request, found)
    if not servers:
        return None
    return DirectCall(library, around, call, deadline, table, assigned, desk, kept, servers, found)


def _has_sessions(around: Surroundings, table: LayerTable) -> bool:
    """Whether it is worth a look: that one server has one."""
    member = around.members.by_address.get(table.holders[0][0]) if table.holders else None
    return member is not None and member.exchange.blocking() is not None


def _assigned(around: Surroundings, table: LayerTable, groups: tuple[int, ...], request: Request) -> Assignment | None:
    """Who computes which group; None: one of them has nobody who can be asked now, or there is none."""
    if table.single:
        return assignment(table, groups, table.addresses) if groups else None
    chosen = []
    for group in groups:
        there = around.members.usable(table.holders[group], version=request.weights_version)
        if not there:
            return None
        chosen.append(choose(there, request.tokens, around.clock(), around.rng).address)
    return assignment(table, groups, tuple(chosen)) if chosen else None


def _servers(around: Surroundings, assigned: Assignment, request: Request, found: Shares) -> list[Asked] | None:
    """Those that get something; None: one of them cannot be asked so now."""
    servers: list[Asked] = []
    now_s = around.clock()
    for one, tokens, routes in zip(assigned.servers, found.tokens, found.routes, strict=False):
        if not tokens:
            continue
        server = asked(around, one, request, tokens, routes, now_s)
        if server is None:
            for other in servers:
                other.leave()
            return None
        servers.append(server)
    return servers


class DirectCall:
    """answer(), and then hand_over() where that said None.

    found    which server gets which tokens
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
        servers: list[Asked],
        found: Shares,
    ) -> None:
        self._library, self._around, self._call, self._deadline = library, around, call, deadline
        self._table, self._assigned, self._desk, self._kept = table, assigned, desk, kept
        self._servers, self._found = servers, found
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
        """What the C++ is told.  Returns the array where the sum comes; None: the only answer is lent."""
        request = self._call.host
        end_s = math.inf if self._deadline is None else self._deadline.end_s
        servers = iter(self._servers)
        sessions = [next(servers).connection.session if tokens else 0 for tokens in self._found.tokens]
        sums = numpy_dtype(request.dtypes[0])
        if self._servers[0].tokens == request.tokens and len(self._servers) == 1 and self._call.lends(sums):
            self._desk.put_call(request, end_s, sessions, 0, 0, False, False)
            return None
        target = self._call.target()
        self._adds = adds_up(sums, target)
        address = native.at(target) if self._adds else 0
        widths = sums.itemsize == 2, target.itemsize == 2
        self._desk.put_call(request, end_s, sessions, address, target.strides[0], *widths)
        return target

    def _due_s(self) -> float:
        """When somebody else is to be asked, or the time is over."""
        due_s = math.inf if self._deadline is None else self._deadline.end_s
        if not self._assigned.raced:
            return due_s
        return min(due_s, *(server.late_at_s(self._around, self._begin_s) for server in self._servers))

    def _until_ns(self, due_s: float) -> int:
        return int(min(due_s, self._around.clock() + SLICE_S) * 1e9)

    def _leave(self) -> None:
        for server in self._servers:
            server.leave()
        self._around.desks.append(self._desk)

    def _result(self, target: NDArray[Any] | None) -> ClusterResult:
        """All parts were answered, and added up where the C++ does that.  target: of _fill()."""
        call, told = self._call, self._desk.told()
        begin_s, last, last_ns = self._begin_s, 0, 0
        for n, (_, _, late, _, answered_ns, inside_ns, queued_tokens, token_ns, _) in enumerate(told):
            if answered_ns > last_ns:
                last, last_ns = n, answered_ns
            seconds = answered_ns * 1e-9 - begin_s
            self._servers[n].answered(self._around, seconds, inside_ns, queued_tokens, token_ns, late > 0)
        answer = self._desk.answer(last)
        output, give_back = self._lent(told[0][0], answer) if target is None else (self._summed(told, target), None)
        timing, load = partial(timing_of, answer), partial(load_of, answer)
        parts = partial(_reports, self._servers, told, call.layer, begin_s)
        routes = sum(server.routes for server in self._servers)
        version, epoch = answer.weights_version, self._around.members.epoch
        result = ClusterResult(output, None, routes, timing, load, epoch, give_back, version, parts=parts)
        if call.traced is not None:
            self._record(call.traced, told, last_ns)
        return result

    def _record(self, traced: TracedCall, told: list[Told], last_ns: int) -> None:
        """For a trace: when each part was sent and answered.  Its own time is not in it."""
        end_ns = time.monotonic_ns()
        for n, (server, one) in enumerate(zip(self._servers, told, strict=True)):
            server.record(traced, self._begin_s, one[3], self._desk.answer(n), one[4])
        traced.over_at(last_ns, end_ns)

    def _lent(self, ticket: int, answer: Completion) -> tuple[Any, Callable[[], None] | None]:
        """The only answer, in the memory where its server wrote it, and what gives that back; None: it was copied."""
        only = self._servers[0].lend(ticket, self._sent(0), self._call.host, answer)
        output, kept = self._call.lent(only.output)
        if kept:
            return output, only.release
        only.release()
        return output, None

    def _summed(self, told: list[Told], target: NDArray[Any]) -> Any:
        """What the caller gets: the sum of all answers, which is in `target` where the C++ adds."""
        if not self._adds:
            self._add_up(told, target)
        return self._call.delivered(target)

    def _add_up(self, told: list[Told], target: NDArray[Any]) -> None:
        """Where the C++ does not: sums in f16."""
        parts = self._parts()
        answers = []
        for n, (server, part) in enumerate(zip(self._servers, parts, strict=True)):
            answers.append(server.lend(told[n][0], self._sent(n), part.request, self._desk.answer(n)))
        join([Sum(part.rows, answer.output) for part, answer in zip(parts, answers, strict=True)], target)
        for answer in answers:
            answer.release()

    def _sent(self, number: int) -> Sent:
        """A part as a request that was sent."""
        hidden_size, out_dtype, tokens = (
            self._call.host.hidden_states.shape[1],
            self._call.host.dtypes[0],
            self._servers[number].tokens,
        )
        room = Tensors(out_bytes=tokens * hidden_size * DTYPE_BYTES[out_dtype])
        return Sent(self._desk.submission(number), room, (), out_dtype, (tokens, hidden_size))

    # ---- out of the ordinary -----------------------------------------------------------------------------------------

    def hand_over(self, landed: Callable[[Flight], object]) -> Flight:
        """The call as a Flight, with what was answered, what failed and what is under way."""
        try:
            parts = self._parts()
        except BaseException:
            self._abandon()
            raise
        flight = Flight(self._around, self._call, self._deadline, landed, self._begin_s)
        told, sent = self._desk.told(), []
        for n, (server, part) in enumerate(zip(self._servers, parts, strict=True)):
            leg = server.leg(part)
            flight.add(leg)
            if told[n][0]:
                sent.append((told[n], n, flight.sent(leg, server.member)))
            else:
                server.member.dropped(server.tokens)
        flight.take_off()
        sent.sort(key=lambda one: one[0][1])  # first what is in flight
        for (ticket, state, _, sent_ns, answered_ns, *_), n, attempt in sent:
            server, answer = self._servers[n], self._desk.answer(n)
            if attempt.traced is not None:
                attempt.traced.sent_ns, attempt.traced.transport = sent_ns, server.member.exchange.transport_name
            server.tell(flight, attempt, self._deadline, ticket, state, answered_ns * 1e-9, self._sent(n), answer)
        self._leave()
        return flight

    def _abandon(self) -> None:
        tickets = [one[0] for one in self._desk.told()]
        for n, server in enumerate(self._servers):
            server.abandon(tickets[n] if tickets else 0)
        self._leave()

    def _parts(self) -> list[Part]:
        """What each server was sent, gathered once more."""
        request, found = self._call.host, self._found
        ids = request.topk_ids
        owner = np.where(ids < 0, -1, self._assigned.owner_of_group[self._table.group_of[ids]])
        parts = []
        servers = iter(self._servers)
        for n, (tokens, begin) in enumerate(zip(found.tokens, found.begins, strict=True)):
            if tokens:
                rows = found.rows[begin : begin + tokens].copy()  # the desk's
                parts.append(Part(n, rows, part_of(request, rows, owner[rows] == n), next(servers).routes))
        return parts


def _reports(servers: Sequence[Asked], told: Sequence[Told], layer: int, begin_s: float) -> tuple[Answered, ...]:
    """Who answered what.  Not a method: an answer that is kept shall not keep the call's tensors."""
    return tuple(
        server.report(layer, one[4] * 1e-9 - begin_s, one[8]) for server, one in zip(servers, told, strict=True)
    )
