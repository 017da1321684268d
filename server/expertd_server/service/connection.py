"""One connection's requests: values in, values out.  Knows neither a wire format nor how bytes travel.

A ClientConnection is what every transport has in common: ids of requests, how many may be in flight, cancels, draining,
the answer to an offer of transports, counting.  What it needs of a transport is an Outlet; transports/protocol.py
describes both sides.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Protocol

from expertd.codec import ForwardRequestView, StreamRequestView, peek_forward
from expertd.errors import (
    DeadlineExceededError,
    DrainingError,
    ExpertdError,
    OverloadedError,
    RequestCancelledError,
    TooManyRequestsError,
)
from expertd.v1 import expert_service_pb2 as pb
from expertd_server.engine.admission import State
from expertd_server.engine.refusal_texts import refusal
from expertd_server.engine.request import Answer, EngineRequest, Outcome
from expertd_server.service.age import Age
from expertd_server.service.response import error_of
from expertd_server.service.service import Service

__all__ = ["Outlet", "ClientConnection"]

_MOST_OFFERS, _OFFERS_S = 4, 10.0
_PRESSED_NS = 100_000_000
"""After a refusal for the time, so long the next ones are looked at before they are read."""


class Outlet(Protocol):
    """The way back of one connection.  None of these may block.  For every message that it is given, answers and
    others, it calls session.written() when that has left for good, with answer_bytes of its request where it was an
    answer: until then it counts against the caller's bounds."""

    def answer(self, request: EngineRequest, answer: Answer, /) -> None:
        """A computed request, on the engine's thread (one of no tokens: within take()).  `answer.output` is valid
        until this returns.  If it raises, the client gets that as an error."""

    def ready(self, message: bytes, answer_bytes: int, /) -> None:
        """A computed request that came by take_message(): the whole answer, on the engine's thread or within that."""

    def send(self, message: pb.RequestError | pb.SessionAnswer | pb.Load, /) -> None:
        """A small message, from any thread: an error of a request or of a message that had no id, the answer to an
        offer, or the server's load, unasked."""


class ClientConnection:
    """One connection of the client `caller`, an address or a name.  It is open from here until close().

    name, traceparent   the client's for it; "" = none
    transport           what traces call the connection; "inline" = gRPC

    take(), refuse(), end(), finished() and close() are called by one thread at a time, the transport's; the rest by
    any.

    A request is in flight from take() until its outcome is handed to the outlet, and counts until the transport says
    written(): a caller that does not read its answers is bounded, too.
    """

    def __init__(
        self,
        service: Service,
        outlet: Outlet,
        caller: str,
        name: str = "",
        traceparent: str = "",
        transport: str = "inline",
    ) -> None:
        self._service, self._outlet, self._caller, self._name = service, outlet, caller, name
        self._traceparent, self._transport = traceparent, transport
        self._lock = threading.Lock()
        self._in_flight: dict[int, EngineRequest | None] = {}  # None: not handed to the engine yet
        self._unwritten = 0
        self._held_bytes = 0  # answers, from their request's taking until they have left
        self._outbox_bytes = 0  # of them those that the outlet has
        self._ended = self._closed = False
        self._age = Age()
        self._offers: list[float] = []
        self._pressed_until_ns = 0
        self._messages = service.engine.messages
        self._looked = None if self._messages is None else self._messages.looked()
        service.remember(self)

    # ---- the transport's thread --------------------------------------------------------------------------------------

    def take(self, message: StreamRequestView | None, arrival_ns: int) -> Future[None] | None:
        """One message of the caller; it is answered through the outlet, whatever it is.

        arrival_ns: when it was read; a request's time began before, where its caller says when it left.
        A Future: read nothing more from this caller until it is done.
        """
        if isinstance(message, ForwardRequestView):
            try:
                begun_ns = arrival_ns - self._age.of(message.sent_us, arrival_ns)
                return self._forward(message, begun_ns)
            except Exception as e:
                error = error_of(e, "a request")
                if isinstance(error, OverloadedError | DeadlineExceededError):
                    self._pressed_until_ns = arrival_ns + _PRESSED_NS
                self.refuse(error, message.request_id)
        elif isinstance(message, pb.CancelRequest):
            self._cancel(message.request_id)
        elif isinstance(message, pb.SessionOffer):
            self._send(self._offered(message))
        else:
            self.refuse(refusal("no_kind", want="forward, cancel or session"), 0)
        return None

    def _offered(self, offer: pb.SessionOffer) -> pb.SessionAnswer:
        """A stream has few tokens that nobody has used: as long as one is valid, so few can be asked for."""
        now_s = time.monotonic()
        self._offers = [at_s for at_s in self._offers if now_s - at_s < _OFFERS_S]
        if len(self._offers) >= _MOST_OFFERS:
            why = f"{_MOST_OFFERS} offers of this stream came within {_OFFERS_S:.0f} s; try again later"
            return pb.SessionAnswer(verdicts=[pb.TransportVerdict(transport=t, reason=why) for t in offer.transports])
        self._offers.append(now_s)
        return self._service.offer(offer, self._caller)

    def take_message(self, data: bytes, arrival_ns: int) -> tuple[bytes, int] | bool:
        """Take a stream's message that holds a usual request, without decoding it, or refuse it for want of time or of
        room.  The answer, with its answer_bytes, where it is there at once; else it goes to the outlet.  False: the
        message is to be read; nothing was done with it."""
        service, messages, looked = self._service, self._messages, self._looked
        if messages is None or looked is None:
            return False
        if not looked.look(data) or service.engine.state is not State.SERVING:
            return False
        m = looked.message
        layer = service.engine.holding.find(m.layer)
        if layer is None or (service.traced is not None and (m.traced or self._traceparent)):
            return False
        number, timeout_us, nbytes = m.request_id, m.timeout_us, m.output_bytes
        # Others only take out of these: what looks full may not be, and is looked at with the lock then.
        if number in self._in_flight or len(self._in_flight) + self._unwritten >= service.limits.max_in_flight:
            return False
        begun_ns = arrival_ns - self._age.of(m.sent_us, arrival_ns)
        deadline_ns = begun_ns + 1000 * timeout_us if timeout_us else 0

        def under_way() -> EngineRequest:
            r = looked.request(layer, self._reply, self._caller, begun_ns, arrival_ns, deadline_ns)
            r.ready = self._settle
            with self._lock:
                self._in_flight[number] = r
                self._held_bytes += nbytes
            return r

        try:
            service.reserve(self._held_bytes, nbytes)
        except TooManyRequestsError:
            return False
        try:
            taken = messages.submit(looked, data, self._caller, begun_ns, deadline_ns, under_way)
        except ExpertdError as e:
            service.give_back(nbytes)
            if isinstance(e, OverloadedError | DeadlineExceededError):
                self._pressed_until_ns = arrival_ns + _PRESSED_NS
            self.refuse(e, number)
            return True
        if taken is None:
            return True
        with self._lock:
            closed = self._closed
            if not closed:
                self._unwritten += 1
                self._held_bytes += nbytes
                self._outbox_bytes += nbytes
        if closed:
            service.give_back(nbytes)
            return True
        service.metrics.computed()
        return taken, nbytes

    def turn_away(self, data: bytes, arrival_ns: int) -> bool:
        """Answer a stream's message that holds a request for which there is no time, without reading more of it than
        that.  False: it is to be read; always where nobody was refused for that lately, so that who is taken does not
        pay for it."""
        if arrival_ns > self._pressed_until_ns or self._service.engine.state is not State.SERVING:
            return False
        head = peek_forward(data)
        if head is None or not head.timeout_us or not head.request_id or head.request_id in self._in_flight:
            return False
        begun_ns = arrival_ns - self._age.of(head.sent_us, arrival_ns)
        error = self._service.engine.hopeless(head, self._caller, begun_ns + 1000 * head.timeout_us)
        if error is None:
            return False
        self._pressed_until_ns = arrival_ns + _PRESSED_NS
        self.refuse(error, head.request_id)
        return True

    def refuse(self, error: ExpertdError, request_id: int) -> None:
        """Answer a message with `error`.  request_id: 0 = it could not be read."""
        self._refused(error, request_id)
        self._send(error.to_request_error(request_id))

    def end(self) -> None:
        """The caller has sent everything."""
        self._ended = True

    @property
    def busy(self) -> bool:
        """Whether something of the caller's is in flight or not written."""
        return bool(self._in_flight or self._unwritten)

    def finished(self) -> bool:
        """Whether the caller has sent everything and got every answer.  Raises DrainingError where the server drains
        and everything that it took from this caller is answered."""
        with self._lock:
            if self._in_flight or self._unwritten:
                return False
        if not self._ended and self._service.engine.state is State.DRAINING:
            raise DrainingError("server: it drains, and every request that it had taken from this stream is answered")
        return self._ended

    def close(self) -> None:
        """The connection is gone: what is in flight is not wanted any more."""
        self._service.forget(self)
        with self._lock:
            self._closed = True
            nbytes, self._outbox_bytes = self._outbox_bytes, 0
            for r in self._in_flight.values():
                if r is not None:
                    r.cancelled = True
        self._give_back(nbytes)

    # ---- any thread --------------------------------------------------------------------------------------------------

    def written(self, answer_bytes: int = 0) -> None:
        """One message that the outlet was given has left.  answer_bytes: of its request, where it was an answer."""
        with self._lock:
            self._unwritten -= 1
            if self._closed or not answer_bytes:
                return
            self._outbox_bytes -= answer_bytes
            self._held_bytes -= answer_bytes
        self._service.give_back(answer_bytes)

    def drain(self) -> None:
        """The server drains from now on: say so."""
        self._send(self._service.load_message())

    def _forward(self, v: ForwardRequestView, arrival_ns: int) -> Future[None] | None:
        service, number = self._service, v.request_id
        service.ensure_open()
        self._register(number)
        try:
            timeout_ns = v.timeout_us * 1000
            more = {"traceparent": self._traceparent, "transport": self._transport}
            r, drawing = service.check(v, self._reply, self._caller, arrival_ns, timeout_ns, **more)
            service.reserve(self._held_bytes, r.answer_bytes)
            with self._lock:
                self._in_flight[number] = r
                self._held_bytes += r.answer_bytes
            try:
                return service.submit(r, drawing)
            except Exception:
                self._give_back(r.answer_bytes)
                raise
        except Exception:
            with self._lock:
                self._in_flight.pop(number, None)
            raise

    def _register(self, number: int) -> None:
        """Make `number` a request in flight.  Raises the row that says why it cannot be."""
        if number == 0:
            raise refusal("missing_request_id")
        with self._lock:
            if number in self._in_flight:
                raise refusal("duplicate_request_id", number=number)
            most = self._service.limits.max_in_flight
            if len(self._in_flight) + self._unwritten >= most:
                in_flight, unread = len(self._in_flight), self._unwritten
                raise refusal("too_many_in_flight", requests=in_flight, unread=unread, most=most)
            self._in_flight[number] = None

    def _cancel(self, number: int) -> None:
        with self._lock:
            r = self._in_flight.pop(number, None)
            if r is None:
                return  # answered before the cancel came
            r.cancelled = True
        self.refuse(RequestCancelledError("request: cancelled by its caller"), number)

    def _reply(self, r: EngineRequest, outcome: Outcome) -> None:
        try:
            self._settle(r, outcome)
        finally:
            self._service.tell(self._service.report(r, outcome))

    def _settle(self, r: EngineRequest, outcome: Outcome | bytes) -> None:
        """bytes: the whole answer."""
        answered = not isinstance(outcome, ExpertdError)
        nbytes = r.answer_bytes
        with self._lock:
            wanted = not (r.cancelled or self._closed)
            if wanted:
                del self._in_flight[r.request_id]
                self._unwritten += 1
                if answered:
                    self._outbox_bytes += nbytes
        if not (wanted and answered):
            self._give_back(nbytes)
        if wanted:
            self._hand_over(r, outcome, nbytes)

    def _hand_over(self, r: EngineRequest, outcome: Outcome | bytes, nbytes: int) -> None:
        """Give the outlet an outcome, which counts as unwritten already."""
        if not isinstance(outcome, ExpertdError):
            try:
                if isinstance(outcome, bytes):
                    self._outlet.ready(outcome, nbytes)
                else:
                    self._outlet.answer(r, outcome)
            except Exception as e:
                outcome = error_of(e, f"the answer of layer {r.layer.layer}")
                self._unhand(nbytes)
            else:
                self._service.metrics.answered()
                return
        self._refused(outcome, r.request_id)
        self._outlet.send(outcome.to_request_error(r.request_id))

    def _refused(self, error: ExpertdError, request_id: int) -> None:
        """Counted and logged: a request is what its caller calls it, or the connection."""
        number = str(request_id) if request_id else ""
        self._service.refused(error, self._caller, f"{self._name}/{number}" if self._name else number)

    def _unhand(self, answer_bytes: int) -> None:
        """The outlet was to have an answer, and has not."""
        with self._lock:
            if self._closed:
                return
            self._outbox_bytes -= answer_bytes
        self._give_back(answer_bytes)

    def _give_back(self, answer_bytes: int) -> None:
        if answer_bytes:
            with self._lock:
                self._held_bytes -= answer_bytes
            self._service.give_back(answer_bytes)

    def _send(self, message: pb.RequestError | pb.SessionAnswer | pb.Load) -> None:
        with self._lock:
            self._unwritten += 1
        self._outlet.send(message)
