"""A call that the calling thread carries out itself, where every server of it has a session that lets it: parts are
gathered where the servers read them, sent, waited for together and added up, in C++ (csrc/ask.cpp).

Nothing but the ordinary is done here.  A part that fails, is late, cannot be sent or does not fit makes a Flight of the
call, with what was answered and what is under way: hand_over().
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expertd.common.dtypes import DTYPE_BYTES
from expertd.shm.layout import Completion, Tensors
from expertd_client.cluster import native
from expertd_client.cluster.assignment import Assignment
from expertd_client.cluster.call import Call
from expertd_client.cluster.call_memory import CallMemory, Told
from expertd_client.cluster.flight import Flight
from expertd_client.cluster.join import Sum, adds_up, join
from expertd_client.cluster.policy import choose
from expertd_client.cluster.result import Answered, ClusterResult
from expertd_client.cluster.server_call import ServerCall, server_call
from expertd_client.cluster.shared import ClusterState
from expertd_client.cluster.split import Shares, SubBatch, part_of, scanned
from expertd_client.cluster.table import LayerTable
from expertd_client.requests.deadline import Deadline
from expertd_client.requests.request import Request
from expertd_client.requests.result import FIRST_VERSION
from expertd_client.requests.tensors import numpy_dtype
from expertd_client.tracing import TracedCall
from expertd_client.transports.core_connection import SLICE_S
from expertd_client.transports.message import Sent, load_of, timing_of

__all__ = ["FastCall", "fast_call"]

_DONE, _TIME_OVER = 0, 1


def fast_call(state: ClusterState, call: Call, deadline: Deadline | None) -> FastCall | None:
    """None: not every part of it can go so.  Raises what start() raises."""
    library, table = native.library(), state.members.table(call.layer)
    if library is None or not call.host.tokens or not _has_sessions(state, table):
        return None
    call_memory, made = _call_memory(state), None
    try:
        made = _made(library, state, call, deadline, table, call_memory)
    finally:
        if made is None:
            state.call_memories.append(call_memory)
    return made


def _call_memory(state: ClusterState) -> CallMemory:
    """One that nobody uses."""
    try:
        return state.call_memories.pop()
    except IndexError:  # a look before could be too early: another thread may take the last one
        return CallMemory(state.usual_ns)


def _made(
    library: native.Library,
    state: ClusterState,
    call: Call,
    deadline: Deadline | None,
    table: LayerTable,
    call_memory: CallMemory,
) -> FastCall | None:
    request = call.host
    batch, kept = native.batch_of(request)
    call_memory.put_batch(batch)
    tokens, top_k = request.topk_ids.shape
    groups = table.groups
    if not table.single:
        _, groups, orphans = scanned(library, call_memory.batch, table, call.layer)
        if orphans:
            return None
    assigned = _assigned(state, table, groups, request)
    if assigned is None:
        return None
    count = len(assigned.servers)
    call_memory.put_owners(table.group_of_at, assigned.owner_of_group_at, table.num_experts, count)
    found = call_memory.count(library, tokens, top_k)
    if found is None:
        return None
    servers = _servers(state, assigned, request, found)
    if not servers:
        return None
    return FastCall(library, state, call, deadline, table, assigned, call_memory, kept, servers, found)


def _has_sessions(state: ClusterState, table: LayerTable) -> bool:
    """Whether it is worth a look: that one server has one."""
    member = state.members.by_address.get(table.replicas[0][0]) if table.replicas else None
    return member is not None and member.exchange.blocking() is not None


def _assigned(state: ClusterState, table: LayerTable, groups: tuple[int, ...], request: Request) -> Assignment | None:
    """Who computes which group; None: one of them has nobody who can be asked now, or there is none."""
    if table.single:
        return table.assignment(groups, table.addresses) if groups else None
    chosen = []
    for group in groups:
        there = state.members.usable(table.replicas[group], version=request.weights_version, layer=request.layer)
        if not there:
            return None
        chosen.append(choose(there, request.tokens, state.clock(), state.rng).address)
    return table.assignment(groups, tuple(chosen)) if chosen else None


def _servers(state: ClusterState, assigned: Assignment, request: Request, found: Shares) -> list[ServerCall] | None:
    """Those that get something; None: one of them cannot be asked so now."""
    servers: list[ServerCall] = []
    now_s = state.clock()
    for one, tokens, routes in zip(assigned.servers, found.tokens, found.routes, strict=False):
        if not tokens:
            continue
        server = server_call(state, one, request, tokens, routes, now_s)
        if server is None:
            for other in servers:
                other.leave()
            return None
        servers.append(server)
    return servers


class FastCall:
    """answer(), and then hand_over() where that said None.

    found    which server gets which tokens
    """

    def __init__(
        self,
        library: native.Library,
        state: ClusterState,
        call: Call,
        deadline: Deadline | None,
        table: LayerTable,
        assigned: Assignment,
        call_memory: CallMemory,
        kept: Any,
        servers: list[ServerCall],
        found: Shares,
    ) -> None:
        self._library, self._state, self._call, self._deadline = library, state, call, deadline
        self._table, self._assigned, self._call_memory, self._kept = table, assigned, call_memory, kept
        self._servers, self._found = servers, found
        self._adds = False
        self._void = False
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
        self._begin_s = self._state.clock()
        try:
            for server in self._servers:
                server.member.begun(server.tokens)
            due_s = self._due_s()
            how = self._library.ask(self._call_memory.call, self._until_ns(due_s))
            while how == _TIME_OVER and self._state.clock() < due_s:
                how = self._library.wait(self._call_memory.call, self._until_ns(due_s))
        except BaseException:  # an interrupt
            self._abandon()
            raise
        if how != _DONE:
            return None
        try:
            answer = self._result(target)
            self._void = self._unsaid(answer.weights_version or FIRST_VERSION)
        except BaseException:
            self._leave()
            raise
        if self._void:
            return None
        self._leave()
        return answer

    def _unsaid(self, version: int) -> bool:
        """Whether sums were added of a version that a server has not named in a Describe, see Flight."""
        unsaid = [s.member for s in self._servers if version not in s.member.said] if len(self._servers) > 1 else []
        for member in unsaid:
            self._state.wake(member)
        return bool(unsaid)

    # ---- the ordinary ------------------------------------------------------------------------------------------------

    def _fill(self) -> NDArray[Any] | None:
        """What the C++ is told.  Returns the array where the sum comes; None: the only answer is lent."""
        request = self._call.host
        end_s = math.inf if self._deadline is None else self._deadline.end_s
        servers = iter(self._servers)
        sessions = [next(servers).connection.session if tokens else 0 for tokens in self._found.tokens]
        sums = numpy_dtype(request.dtypes[0])
        if self._servers[0].tokens == request.tokens and len(self._servers) == 1 and self._call.lends(sums):
            self._call_memory.put_call(request, end_s, sessions, 0, 0, False, False)
            return None
        target = self._call.target()
        self._adds = adds_up(sums, target)
        address = native.at(target) if self._adds else 0
        widths = sums.itemsize == 2, target.itemsize == 2
        self._call_memory.put_call(request, end_s, sessions, address, target.strides[0], *widths)
        return target

    def _due_s(self) -> float:
        """When somebody else is to be asked, or the time is over."""
        due_s = math.inf if self._deadline is None else self._deadline.end_s
        if not self._assigned.raced:
            return due_s
        return min(due_s, *(server.late_at_s(self._state, self._begin_s) for server in self._servers))

    def _until_ns(self, due_s: float) -> int:
        return int(min(due_s, self._state.clock() + SLICE_S) * 1e9)

    def _leave(self) -> None:
        for server in self._servers:
            server.leave()
        self._state.call_memories.append(self._call_memory)

    def _result(self, target: NDArray[Any] | None) -> ClusterResult:
        """All parts were answered, and added up where the C++ does that.  target: of _fill()."""
        call, told = self._call, self._call_memory.told()
        begin_s, last, last_ns = self._begin_s, 0, 0
        for n, (_, _, late, _, answered_ns, inside_ns, queued_tokens, token_ns, _) in enumerate(told):
            if answered_ns > last_ns:
                last, last_ns = n, answered_ns
            seconds = answered_ns * 1e-9 - begin_s
            self._servers[n].answered(self._state, seconds, inside_ns, queued_tokens, token_ns, late > 0)
        answer = self._call_memory.answer(last)
        output, give_back = self._lent(told[0][0], answer) if target is None else (self._summed(told, target), None)
        timing, load = partial(timing_of, answer), partial(load_of, answer)
        parts = partial(_reports, self._servers, told, call.layer, begin_s)
        routes = sum(server.routes for server in self._servers)
        version, epoch = answer.weights_version, self._state.members.epoch
        result = ClusterResult(output, None, routes, timing, load, epoch, give_back, version, parts=parts)
        if call.traced is not None:
            self._record(call.traced, told, last_ns)
        return result

    def _record(self, traced: TracedCall, told: list[Told], last_ns: int) -> None:
        """For a trace: when each part was sent and answered.  Its own time is not in it."""
        end_ns = time.monotonic_ns()
        for n, (server, one) in enumerate(zip(self._servers, told, strict=True)):
            server.record(traced, self._begin_s, one[3], self._call_memory.answer(n), one[4])
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
            answers.append(server.lend(told[n][0], self._sent(n), part.request, self._call_memory.answer(n)))
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
        return Sent(self._call_memory.submission(number), room, (), out_dtype, (tokens, hidden_size))

    # ---- out of the ordinary -----------------------------------------------------------------------------------------

    def hand_over(self, landed: Callable[[Flight], object]) -> Flight:
        """The call as a Flight, with what was answered, what failed and what is under way."""
        try:
            parts = self._parts()
        except BaseException:
            self._abandon()
            raise
        flight = Flight(self._state, self._call, self._deadline, landed, self._begin_s)
        if self._void:
            self._ask_again(flight, parts)
            return flight
        told, sent = self._call_memory.told(), []
        for n, (server, part) in enumerate(zip(self._servers, parts, strict=True)):
            sub = server.sub(part)
            flight.add(sub)
            if told[n][0]:
                sent.append((told[n], n, flight.sent(sub, server.member)))
            else:
                server.member.dropped(server.tokens)
        flight.take_off()
        sent.sort(key=lambda one: one[0][1])  # first what is in flight
        for (ticket, state, _, sent_ns, answered_ns, *_), n, attempt in sent:
            server, answer = self._servers[n], self._call_memory.answer(n)
            if attempt.traced is not None:
                attempt.traced.sent_ns, attempt.traced.transport = sent_ns, server.member.exchange.transport_name
            server.tell(flight, attempt, self._deadline, ticket, state, answered_ns * 1e-9, self._sent(n), answer)
        self._leave()
        return flight

    def _ask_again(self, flight: Flight, parts: Sequence[SubBatch]) -> None:
        """All parts were answered, and the sum is of no use: they are asked for the version that all servers hold."""
        version = self._call.own_version or self._state.members.agree(self._call.layer)
        for server, part in zip(self._servers, parts, strict=True):
            flight.add(server.sub(replace(part, request=part.request.pinned(version))))
        self._leave()
        flight.take_off()

    def _abandon(self) -> None:
        tickets = [one[0] for one in self._call_memory.told()]
        for n, server in enumerate(self._servers):
            server.abandon(tickets[n] if tickets else 0)
        self._leave()

    def _parts(self) -> list[SubBatch]:
        """What each server was sent, gathered once more."""
        request, found = self._call.host, self._found
        ids = request.topk_ids
        owner = np.where(ids < 0, -1, self._assigned.owner_of_group[self._table.group_of[ids]])
        parts = []
        servers = iter(self._servers)
        for n, (tokens, begin) in enumerate(zip(found.tokens, found.begins, strict=True)):
            if tokens:
                rows = found.rows[begin : begin + tokens].copy()  # their memory is the call's
                parts.append(SubBatch(n, rows, part_of(request, rows, owner[rows] == n), next(servers).routes))
        return parts


def _reports(servers: Sequence[ServerCall], told: Sequence[Told], layer: int, begin_s: float) -> tuple[Answered, ...]:
    """Who answered what.  Not a method: an answer that is kept shall not keep the call's tensors."""
    return tuple(
        server.report(layer, one[4] * 1e-9 - begin_s, one[8]) for server, one in zip(servers, told, strict=True)
    )
