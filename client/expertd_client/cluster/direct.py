"""A call that the calling thread carries out itself, where every server of it has a session that lets it: parts are
gathered where the servers read them, sent, waited for together and added up, in C++ (csrc/ask.cpp).

Nothing but the ordinary is done here.  A part that fails, is late, cannot be sent or does not fit makes a Flight of the
call, with what was answered and what is under way: hand_over().
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from expertd.dtypes import DTYPE_BYTES
from expertd.shm.layout import Tensors
from expertd_client.beside import SLICE_S
from expertd_client.cluster import native
from expertd_client.cluster.asked import Asked, asked
from expertd_client.cluster.assign import Assignment, assignment
from expertd_client.cluster.call import Call
from expertd_client.cluster.desk import Desk, Told
from expertd_client.cluster.flight import Flight
from expertd_client.cluster.join import Sum, adds_up, join
from expertd_client.cluster.lone import LoneCall
from expertd_client.cluster.policy import choose
from expertd_client.cluster.result import Answered, ClusterResult
from expertd_client.cluster.split import Part, Shares, meant, part_of, scanned
from expertd_client.cluster.surroundings import Surroundings
from expertd_client.cluster.table import LayerTable
from expertd_client.deadline import Deadline
from expertd_client.request import Request
from expertd_client.result import ForwardResult
from expertd_client.shm_message import Sent, load_of, submission_of, timing_of
from expertd_client.tensors import numpy_dtype

__all__ = ["DirectCall", "direct_call"]

_DONE, _TIME_OVER = 0, 1


class _Share(NamedTuple):
    """number: of its place at the desk; owner: of the assignment."""

    number: int
    owner: int
    server: Asked


def direct_call(around: Surroundings, call: Call, deadline: Deadline | None) -> DirectCall | LoneCall | None:
    """None: not every part of it can go so.  Raises what start() raises."""
    library, table = native.library(), around.members.table(call.layer)
    if library is None or not call.host.tokens or not _has_sessions(around, table):
        return None
    if table.whole:
        routes, groups, _ = meant(call.host.topk_ids, table, call.layer)
        return _lone(around, call, deadline, _assigned(around, table, groups, call.host), routes)
    desk = around.desks.pop() if around.desks else Desk(around.usual_ns)
    made = None
    try:
        made = _made(library, around, call, deadline, table, desk)
    finally:
        if not isinstance(made, DirectCall):
            around.desks.append(desk)
    return made


def _made(
    library: native.Library,
    around: Surroundings,
    call: Call,
    deadline: Deadline | None,
    table: LayerTable,
    desk: Desk,
) -> DirectCall | LoneCall | None:
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
    found = desk.count(library, tokens, top_k, count)
    if found is None:
        return None
    if count == 1 and found.tokens[0] == tokens:
        return _lone(around, call, deadline, assigned, found.routes[0])
    servers = _servers(around, assigned, request, found)
    if not servers:
        return None
    return DirectCall(library, around, call, deadline, table, assigned, desk, kept, servers, found)


def _lone(
    around: Surroundings, call: Call, deadline: Deadline | None, to: Assignment | None, routes: int
) -> LoneCall | None:
    """Of the only server that gets something."""
    if to is None:
        return None
    sent = submission_of(call.host)
    server = asked(around, to.servers[0], call.host, call.host.tokens, routes)
    return None if server is None else LoneCall(around, call, deadline, server, sent)


def _has_sessions(around: Surroundings, table: LayerTable) -> bool:
    """Whether it is worth a look: that one server has one."""
    member = around.members.by_address.get(table.holders[0][0]) if table.holders else None
    return member is not None and member.exchange.direct() is not None


def _assigned(around: Surroundings, table: LayerTable, groups: tuple[int, ...], request: Request) -> Assignment | None:
    """Who computes which group; None: one of them has nobody who can be asked now, or there is none."""
    if table.single:
        return assignment(table, groups, table.addresses) if groups else None
    chosen = []
    for group in groups:
        there = around.members.usable(table.holders[group])
        if not there:
            return None
        chosen.append(choose(there, request.tokens, around.clock(), around.rng).address)
    return assignment(table, groups, tuple(chosen)) if chosen else None


def _servers(around: Surroundings, assigned: Assignment, request: Request, found: Shares) -> list[_Share] | None:
    """Those that get something; None: one of them cannot be asked so now."""
    shares: list[_Share] = []
    for owner, one in enumerate(assigned.servers):
        if not found.tokens[owner]:
            continue
        server = asked(around, one, request, found.tokens[owner], found.routes[owner])
        if server is None:
            for share in shares:
                share.server.leave()
            return None
        shares.append(_Share(len(shares), owner, server))
    return shares


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
        shares: list[_Share],
        found: Shares,
    ) -> None:
        self._library, self._around, self._call, self._deadline = library, around, call, deadline
        self._table, self._assigned, self._desk, self._kept = table, assigned, desk, kept
        self._shares, self._found = shares, found
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
            for share in self._shares:
                share.server.member.begun(share.server.tokens)
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

    def _fill(self) -> NDArray[Any]:
        """What the C++ is told.  Returns the array where the sum comes."""
        desk, request, begins = self._desk, self._call.host, self._found.begins
        end_s = math.inf if self._deadline is None else self._deadline.end_s
        desk.put_call(request, request.topk_ids.shape[1], end_s, len(self._shares))
        for number, owner, server in self._shares:
            desk.put_share(number, owner, server.way.session, begins[owner], server.tokens, server.routes)
        sums, target = numpy_dtype(request.dtypes[0]), self._call.target()
        self._adds = adds_up(sums, target)
        address = native.at(target) if self._adds else 0
        desk.put_sum(address, target.strides[0], sums.itemsize == 2, target.itemsize == 2)
        return target

    def _due_s(self) -> float:
        """When somebody else is to be asked, or the time is over."""
        due_s = math.inf if self._deadline is None else self._deadline.end_s
        return min(due_s, *(share.server.late_at_s(self._around, self._begin_s) for share in self._shares))

    def _until_ns(self, due_s: float) -> int:
        return int(min(due_s, self._around.clock() + SLICE_S) * 1e9)

    def _leave(self) -> None:
        for share in self._shares:
            share.server.leave()
        self._around.desks.append(self._desk)

    def _result(self, target: NDArray[Any]) -> ClusterResult:
        """All parts were answered, and added up where the C++ does that."""
        call, desk = self._call, self._desk
        told = [desk.told(share.number) for share in self._shares]
        last = max(range(len(told)), key=lambda n: told[n].answered_ns)
        answer = desk.answer(self._shares[last].number)
        parts = tuple([self._heard(share.server, one) for share, one in zip(self._shares, told, strict=True)])
        if call.traced is not None:
            self._record(told)
        if not self._adds:
            self._add_up(told, target)
        output = call.delivered(target)
        routes = sum(share.server.routes for share in self._shares)
        timing, load = partial(timing_of, answer), partial(load_of, answer)
        result = ClusterResult(output, None, routes, timing, load, self._around.members.epoch, None, parts=parts)
        if call.traced is not None:
            call.traced.end()
        return result

    def _heard(self, server: Asked, told: Told) -> Answered:
        seconds, late = told.answered_ns * 1e-9 - self._begin_s, bool(told.late)
        load = told.queued_tokens, told.token_ns
        return server.answered(self._around, self._call.layer, seconds, told.inside_ns, *load, told.name, late)

    def _record(self, told: list[Told]) -> None:
        """For a trace: when each part was sent and answered."""
        traced = self._call.traced
        assert traced is not None
        for share, one in zip(self._shares, told, strict=True):
            answer = self._desk.answer(share.number)
            share.server.record(traced, self._begin_s, one.sent_ns, answer, one.answered_ns)
        traced.joined_ns = max(one.answered_ns for one in told)

    def _add_up(self, told: list[Told], target: NDArray[Any]) -> None:
        """Where the C++ does not: sums in f16."""
        parts = self._parts()
        answers = [self._lent(*each) for each in zip(self._shares, told, parts, strict=True)]
        join([Sum(part.rows, answer.output) for part, answer in zip(parts, answers, strict=True)], target)
        for answer in answers:
            answer.release()

    def _lent(self, share: _Share, told: Told, part: Part) -> ForwardResult:
        return share.server.lend(told.ticket, self._sent(share), part.request, self._desk.answer(share.number))

    def _sent(self, share: _Share) -> Sent:
        """Its part as a request that was sent."""
        hidden_size, out_dtype, tokens = (
            self._call.host.hidden_states.shape[1],
            self._call.host.dtypes[0],
            share.server.tokens,
        )
        room = Tensors(out_bytes=tokens * hidden_size * DTYPE_BYTES[out_dtype])
        return Sent(self._desk.submission(share.number), room, (), out_dtype, (tokens, hidden_size))

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
        for share, part in zip(self._shares, parts, strict=True):
            leg = share.server.leg(part)
            flight.add(leg)
            told = self._desk.told(share.number)
            if told.ticket:
                sent.append((told, share, flight.sent(leg, share.server.member)))
            else:
                share.server.member.dropped(share.server.tokens)
        flight.take_off()
        for told, share, attempt in sorted(sent, key=lambda one: one[0].state):  # first what is in flight
            if attempt.traced is not None:
                attempt.traced.sent_ns, attempt.traced.transport = told.sent_ns, share.server.member.exchange.way
            how = told.ticket, told.state, told.answered_ns * 1e-9
            answer = self._desk.answer(share.number)
            share.server.tell(flight, attempt, self._deadline, *how, self._sent(share), answer)
        self._leave()
        return flight

    def _abandon(self) -> None:
        for share in self._shares:
            share.server.abandon(self._desk.told(share.number).ticket)
        self._leave()

    def _parts(self) -> list[Part]:
        """What each server was sent, gathered once more."""
        request, found = self._call.host, self._found
        ids = request.topk_ids
        owner = np.where(ids < 0, -1, self._assigned.owner_of_group[self._table.group_of[ids]])
        parts = []
        for _, n, server in self._shares:
            begin = found.begins[n]
            rows = found.rows[begin : begin + server.tokens].copy()  # the desk's
            parts.append(Part(n, rows, part_of(request, rows, owner[rows] == n), server.routes))
        return parts
