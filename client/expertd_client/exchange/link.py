"""One connection, the channel that its session may open beside it, and the requests in flight on both.

Every request is remembered with the way that carried it.  When a way ends, the requests on it fail, with an error that
may be retried unless the server said otherwise; nothing is ever sent twice from here.  The end of a channel is not the
end of the link: what comes later travels inline.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeAlias

from expertd.codec import ForwardResponseView, UsualAnswer
from expertd.errors import (
    ExpertdError,
    PermissionDeniedError,
    RequestCancelledError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
    from_request_error,
)
from expertd.shm.region import host_id
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.exchange.session import INLINE, Session
from expertd_client.requests.deadline import Deadline
from expertd_client.requests.request import Request
from expertd_client.requests.result import ForwardResult, result_of
from expertd_client.transports.message import Sent
from expertd_client.transports.protocol import (
    ChannelConnection,
    ChannelFullError,
    Connection,
    Delivered,
    Transport,
    Waiter,
)

__all__ = ["Link", "blame"]


_Pending: TypeAlias = tuple[Waiter[ForwardResult], Request, "Deadline | None", Connection]
"""A request in flight: who waits, for what, until when, and the way that carries it."""


class Link:
    """Thread-safe.  told: gets what the server says of its load.

    alive    whether it takes requests
    beside   the channel; None: there is none
    """

    def __init__(self, transport: Transport, told: Callable[[pb.Load | Callable[[], pb.Load]], None]) -> None:
        self.pending: dict[int, _Pending] = {}
        self.alive = True
        self._told = told
        self._target = transport.target
        # `alive`, `beside` and `_session` change together, and `pending` with a channel's end
        self._lock = threading.Lock()
        self._error: ExpertdError = UnavailableError(f"{transport.target}: the connection is closed")
        self._channels = {channel.name: channel for channel in transport.channels}
        self._session = None if self._channels else Session()
        self._asking: list[Waiter[Session]] = []
        self._opening = False
        self.beside: ChannelConnection | None = None
        self._direct: Any = None  # that, where callers can wait themselves
        self._broken: ExpertdError | None = None
        self._inline: Connection = transport.connect(self._deliver, self._close)
        if self._channels:
            self._inline.offer(pb.SessionOffer(transports=list(self._channels), host_id=host_id()))

    def forward(
        self,
        request_id: int,
        request: Request,
        deadline: Deadline | None,
        waiter: Waiter[ForwardResult],
    ) -> None:
        """Sends a request.  Raises where it cannot be sent; otherwise `waiter` gets to know."""
        way = self._inline
        if self.beside is None:
            self.pending[request_id] = (waiter, request, deadline, way)
        else:
            with self._lock:  # what is on a channel when it ends is failed under this lock
                if self.beside is not None and self.beside.takes(request):
                    way = self.beside
                self.pending[request_id] = (waiter, request, deadline, way)
        self._send(way, request_id, request, deadline, waiter)

    def _send(
        self,
        way: Connection,
        request_id: int,
        request: Request,
        deadline: Deadline | None,
        waiter: Waiter[ForwardResult],
    ) -> None:
        """Sends a request that is in `pending`; whoever takes it out there, and nobody else, tells its waiter."""
        if not self.alive:  # it broke between the choice of this link and now: nothing was sent
            if self.pending.pop(request_id, None) is not None:  # else _close() found it there
                waiter.fail(self._error.copy())
            return
        try:
            way.forward(request_id, 0 if deadline is None else deadline.left_us(), request)
        except ChannelFullError:
            if self.pending.pop(request_id, None) is None:
                return  # the channel has ended, and the request with it
            self.pending[request_id] = (waiter, request, deadline, self._inline)
            self._send(self._inline, request_id, request, deadline, waiter)
        except Exception:  # a number that its field cannot hold, memory that cannot be read: nothing was sent
            if self.pending.pop(request_id, None) is not None:
                raise

    def direct(self, request: Request) -> Any:
        """The channel on which the caller of this request can wait for the answer itself."""
        way = self._direct
        return way if way is not None and way.takes(request) else None

    def slot(self, tokens: int, hidden_size: int, top_k: int, dtype: int) -> Any:
        """The channel's slot; None: there is no channel, or it has no room."""
        way = self._direct
        return None if way is None else way.slot(tokens, hidden_size, top_k, dtype)

    def adopt(
        self,
        request_id: int,
        way: Any,
        ticket: int,
        sent: Sent,
        request: Request,
        deadline: Deadline | None,
        waiter: Waiter[ForwardResult],
    ) -> None:
        """Takes over a request that its caller sent by himself on `way`, beside: `waiter` gets to know."""
        with self._lock:
            alive = self.alive
            if alive:
                self.pending[request_id] = (waiter, request, deadline, way)
        try:
            if not alive:
                raise ChannelFullError
            way.adopt(request_id, ticket, sent)
        except ChannelFullError:  # the session is over
            if not alive or self.pending.pop(request_id, None) is not None:
                waiter.fail((self._broken or self._error).copy())

    def cancel(self, request_id: int) -> bool:
        """Forgets the waiter of a request and tells the server.  False: it has been answered, or is being answered."""
        return self._take_back(request_id) is not None

    def expire(self, request_id: int) -> None:
        """Ends a request whose time is over, unless it has been answered."""
        found = self._take_back(request_id)
        if found is not None:
            waiter, request, deadline, _ = found
            assert deadline is not None
            waiter.fail(deadline.expired(request.layer, request_id))

    def session(self, waiter: Waiter[Session]) -> None:
        """`waiter` gets what was agreed on, as soon as the server has answered the offer."""
        with self._lock:
            agreed, alive = self._session, self.alive
            if agreed is None and alive:
                self._asking.append(waiter)
                return
        if agreed is not None and alive:
            waiter.answer(agreed)
        else:
            waiter.fail(self._error.copy())

    @property
    def agreed(self) -> Session | None:
        """The session; None until the server has answered the offer."""
        return self._session

    def close(self) -> None:
        """Fails what is in flight with RequestCancelledError."""
        self._inline.close()

    def _take_back(self, request_id: int) -> _Pending | None:
        found = self.pending.pop(request_id, None)
        if found is not None and self.alive:
            found[3].cancel(request_id)
        return found

    def _deliver(self, message: Delivered) -> None:
        """An id that nobody waits for is that of a cancelled or expired request: its answer is not wanted any more."""
        if isinstance(message, UsualAnswer | ForwardResponseView):
            if isinstance(message, UsualAnswer):
                self._told(message.told.load)
            elif message.load is not None:
                self._told(message.load)
            found = self.pending.pop(message.request_id, None)
            if found is not None:
                waiter, request, _, _ = found
                try:
                    result = result_of(message, request)
                except ExpertdError as misfit:
                    waiter.fail(_addressed(misfit, message.request_id))
                else:
                    waiter.answer(result)
            elif isinstance(message, ForwardResponseView) and message.give_back is not None:
                message.give_back()
        elif isinstance(message, pb.RequestError):
            error = from_request_error(message)
            if message.request_id == 0:  # the server could not read whose it was
                self._fail(error, None)
            elif (found := self.pending.pop(message.request_id, None)) is not None:
                found[0].fail(error)
        elif isinstance(message, pb.SessionAnswer):
            self._settle(message)
        elif isinstance(message, pb.Load):
            self._told(message)

    def _settle(self, answer: pb.SessionAnswer) -> None:
        """The server has answered the offer: open what it accepted."""
        if self._session is not None or self._opening:
            return  # to an offer that was never made
        reasons = {v.transport: v.reason or "refused without a reason" for v in answer.verdicts if not v.accepted}
        channel = next((self._channels.get(v.transport) for v in answer.verdicts if v.accepted), None)
        if channel is None:
            self._agree(None, INLINE, reasons)
        else:
            self._opening = True
            name = channel.name
            channel.open(
                answer, self._deliver, self._channel_closed, lambda outcome: self._opened(name, outcome, reasons)
            )

    def _opened(self, name: str, outcome: ChannelConnection | Exception, reasons: dict[str, str]) -> None:
        if isinstance(outcome, Exception):
            self._agree(None, INLINE, {**reasons, name: str(outcome)})
        else:
            self._agree(outcome, name, reasons)

    def _agree(self, way: ChannelConnection | None, name: str, reasons: dict[str, str]) -> None:
        """The session is this: `way`, or without one inline."""
        with self._lock:
            unwanted = way
            if way is not None and self._broken is None and self.alive:
                self.beside, unwanted = way, None
                self._direct = way if hasattr(way, "call") else None
            elif self._broken is not None:
                reasons = {**reasons, name: _broke(self._broken)}
            opened = name if self.beside is not None else INLINE
            agreed = Session(opened, {n: reasons[n] for n in self._channels if n in reasons})
            self._session = agreed
            asking, self._asking = self._asking, []
        if unwanted is not None:
            unwanted.close()
        for waiter in asking:
            waiter.answer(agreed)

    def _channel_closed(self, error: ExpertdError) -> None:
        with self._lock:
            self._broken = error
            way, self.beside, self._direct = self.beside, None, None
            if way is None or self._session is None:
                return  # it never opened, and _settle() says why, or this link has ended
            self._session = Session(INLINE, {**self._session.refused, self._session.transport: _broke(error)})
        self._fail(error, way)

    def _close(self, error: ExpertdError) -> None:
        """The connection ended, and the session with it."""
        with self._lock:
            self._error = blame(error, self._target, 2)
            self.alive = False  # from here on whoever adds to `pending` sees it, or is in it below
            way, self.beside, self._direct = self.beside, None, None
            asking, self._asking = self._asking, []
        self._fail(error, None)
        for waiter in asking:
            waiter.fail(self._error.copy())
        if way is not None:
            way.broke(self._error)

    def _fail(self, error: ExpertdError, way: Connection | None) -> None:
        """Fails what is in flight on `way`; None = everything."""
        with self._lock:
            there = self.pending.copy()  # at once: others add, and take answered ones out, meanwhile
            lost = [n for n, found in there.items() if way is None or found[3] is way]
            taken = [(n, found[0]) for n in lost if (found := self.pending.pop(n, None)) is not None]
        for request_id, waiter in taken:
            waiter.fail(_addressed(blame(error, self._target, len(taken)), request_id))


def blame(error: ExpertdError, target: str, in_flight: int) -> ExpertdError:
    """What each of `in_flight` requests fails with when their connection ended with `error`.

    An error that may be retried, one that holds for the whole server, and the end that this client made are
    everybody's.  Any other one was the fault of one request (a message too large, for one): with several in flight
    nobody knows whose, so each may be tried again; the only one in flight gets it as it is.
    """
    if error.retryable or isinstance(error, _EVERYBODYS) or in_flight == 1:
        return error.copy()
    lost = UnavailableError(
        f"{target}: the connection broke with {in_flight} requests in flight: {error.reason}: {error.message};"
        " each may be sent again"
    )
    lost.__cause__ = error
    return lost


_EVERYBODYS = (UnimplementedError, RequestCancelledError, UnauthenticatedError, PermissionDeniedError)


def _broke(error: ExpertdError) -> str:
    return f"it broke: {error.message}"


def _addressed(error: ExpertdError, request_id: int) -> ExpertdError:
    error.request_id = request_id
    return error
