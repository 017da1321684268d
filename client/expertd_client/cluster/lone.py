"""A call of which one server gets all: its caller sends it, waits, and gets the server's memory, as with ExpertClient.

Nothing but the ordinary is done here, as in expertd_client.cluster.direct: hand_over().
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from numpy.typing import NDArray

from expertd.shm.layout import Completion
from expertd.shm.tickets import NoRoomError, SessionEndedError
from expertd_client.cluster import native
from expertd_client.cluster.asked import Asked
from expertd_client.cluster.call import Call
from expertd_client.cluster.flight import Flight
from expertd_client.cluster.join import Sum, join
from expertd_client.cluster.result import Answered, ClusterResult
from expertd_client.cluster.split import Part
from expertd_client.cluster.surroundings import Surroundings
from expertd_client.requests.deadline import Deadline
from expertd_client.requests.tensors import numpy_dtype
from expertd_client.transports.beside import SLICE_S, end_ns
from expertd_client.transports.message import Sent, load_of, timing_of

__all__ = ["LoneCall"]


class LoneCall:
    """answer(), and then hand_over() where that said None.  sent: the request as it travels."""

    def __init__(self, around: Surroundings, call: Call, deadline: Deadline | None, asked: Asked, sent: Sent) -> None:
        self._around, self._call, self._deadline, self._asked, self._sent = around, call, deadline, asked, sent
        self._answer = Completion()
        self._ticket = self._state = self._sent_ns = 0  # the state: one of native's
        self._begin_s = self._at_s = 0.0

    def answer(self) -> ClusterResult | None:
        """None: hand_over()."""
        call, asked = self._call, self._asked
        if call.traced is not None:
            call.traced.split()
        try:
            lends = call.lends(numpy_dtype(self._sent.out_dtype))
            target = None if lends else call.target()
        except BaseException:
            asked.leave()
            raise
        self._begin_s = self._around.clock()
        try:
            asked.member.begun(asked.tokens)
            self._send_and_wait()
        except BaseException:  # an interrupt
            self._abandon()
            raise
        if self._state != native.ANSWERED or self._answer.routes_computed != asked.routes:
            return None
        try:
            return self._result(target)
        finally:
            asked.leave()

    def _send_and_wait(self) -> None:
        """Until it is answered, or somebody else is to be asked, or the time is over."""
        way, sent, answer = self._asked.way, self._sent, self._answer
        sent.submission.deadline_ns = end_ns(self._deadline)
        due_s = self._asked.late_at_s(self._around, self._begin_s)
        if self._deadline is not None:
            due_s = min(due_s, self._deadline.end_s)
        try:
            if self._call.traced is None:
                ticket = way.ask(sent, answer, self._slice_ns(due_s))
            else:
                ticket = -way.send(sent)
                self._sent_ns = time.monotonic_ns()
            self._ticket, self._state = abs(ticket), native.IN_FLIGHT
            there = ticket > 0
            while not there and self._around.clock() < due_s:
                there = way.wait(self._ticket, answer, self._slice_ns(due_s))
            if there:
                self._state = native.REFUSED if answer.refused else native.ANSWERED
        except NoRoomError:
            pass
        except SessionEndedError:
            self._state = native.LOST
        self._at_s = self._around.clock()

    def _slice_ns(self, due_s: float) -> int:
        return max(0, int(min(due_s - self._around.clock(), SLICE_S) * 1e9))

    def _result(self, target: NDArray[Any] | None) -> ClusterResult:
        call, asked, answer = self._call, self._asked, self._answer
        seconds = self._at_s - self._begin_s
        inside_ns = answer.queue_ns + answer.collect_ns + answer.kernel_ns + answer.deliver_ns
        asked.answered(self._around, seconds, inside_ns, answer.queued_tokens, answer.token_ns)
        only = asked.lend(self._ticket, self._sent, call.host, answer)
        give_back = None
        if target is None:
            output, kept = call.lent(only.output)
            if kept:
                give_back = only.release
            else:
                only.release()
        else:
            join([Sum(None, only.output)], target)
            only.release()
            output = call.delivered(target)
        epoch = self._around.members.epoch
        timing, load = partial(timing_of, answer), partial(load_of, answer)
        parts = partial(_report, asked, call.layer, seconds, answer)
        result = ClusterResult(output, None, asked.routes, timing, load, epoch, give_back, parts=parts)
        if call.traced is not None:
            end_ns, answered_ns = time.monotonic_ns(), int(self._at_s * 1e9)
            asked.record(call.traced, self._begin_s, self._sent_ns, answer, answered_ns)
            call.traced.over_at(answered_ns, end_ns)
        return result

    # ---- out of the ordinary -----------------------------------------------------------------------------------------

    def hand_over(self, landed: Callable[[Flight], object]) -> Flight:
        """The call as a Flight, with what was answered, failed or is under way."""
        call, asked = self._call, self._asked
        flight = Flight(self._around, call, self._deadline, landed, self._begin_s)
        leg = asked.leg(Part(0, None, call.host, asked.routes))
        flight.add(leg)
        if self._state:
            attempt = flight.sent(leg, asked.member)
            flight.take_off()
            if attempt.traced is not None:
                attempt.traced.sent_ns, attempt.traced.transport = self._sent_ns, asked.member.exchange.way
            told = self._ticket, self._state, self._at_s
            asked.tell(flight, attempt, self._deadline, *told, self._sent, self._answer)
        else:
            asked.member.dropped(asked.tokens)
            flight.take_off()
        asked.leave()
        return flight

    def _abandon(self) -> None:
        self._asked.abandon(self._ticket)
        self._asked.leave()


def _report(asked: Asked, layer: int, seconds: float, answer: Completion) -> tuple[Answered, ...]:
    """Not a method: an answer that is kept shall not keep the call's tensors."""
    return (asked.report(layer, seconds, answer.name),)
