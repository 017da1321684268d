"""One main connection, the session connection that may be opened besides it, and the requests in flight on both.

Every request is remembered with the connection that carried it.  When a connection ends, the requests on it fail, with
an error that may be retried unless the server said otherwise; nothing is ever sent twice from here.  The end of the
session connection is not the end of the link: later requests go over the main connection.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeAlias

from expertd.codec import ForwardResponseView, RawAnswer
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
    CallingConnection,
    Connection,
    ConnectionFullError,
    Delivered,
    MainConnection,
    SessionConnection,
    Transport,
    Waiter,
)

__all__ = ["Link", "blame"]


_Pending: TypeAlias = tuple[Waiter[ForwardResult], Request, "Deadline | None", Connection]
"""A request in flight: who waits, for what, until when, and the connection that carries it."""


class Link:
    """Thread-safe.  on_load: gets what the server says of its load; on_close: called when it has ended.

    alive                whether it takes requests
    session_connection   the faster one; None: there is none
    blocking             that, where a calling thread can send what it takes, and wait for the answer itself
    """

    def __init__(
        self,
        transport: Transport,
        on_load: Callable[[pb.Load | Callable[[], pb.Load]], None],
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.pending: dict[int, _Pending] = {}
        self.alive = True
        self._on_load, self._on_close = on_load, on_close
        self._target = transport.target
        # `alive`, `session_connection`, `blocking` and `_session` change together, and `pending` with the session
        # connection's end
        self._lock = threading.Lock()
        self._error: ExpertdError = UnavailableError(f"{transport.target}: the connection is closed")
        self._offered = {offered.name: offered for offered in transport.offers}
        self._session = None if self._offered else Session()
        self._asking: list[Waiter[Session]] = []
        self._opening = False
        self.session_connection: SessionConnection | None = None
        self.blocking: CallingConnection | None = None
        self._broken: ExpertdError | None = None
        self._main: MainConnection = transport.connect(self._deliver, self._close)
        if self._offered:
            self._main.offer(pb.SessionOffer(transports=list(self._offered), host_id=host_id()))

    def forward(
        self,
        request_id: int,
        request: Request,
        deadline: Deadline | None,
        waiter: Waiter[ForwardResult],
    ) -> None:
        """Sends a request.  Raises where it cannot be sent; otherwise `waiter` gets to know."""
        connection: Connection = self._main
        if self.session_connection is None:
            self.pending[request_id] = (waiter, request, deadline, connection)
        else:
            with self._lock:  # what a session connection carries when it ends is failed under this lock
                if self.session_connection is not None and self.session_connection.takes(request):
                    connection = self.session_connection
                self.pending[request_id] = (waiter, request, deadline, connection)
        self._send(connection, request_id, request, deadline, waiter)

    def _send(
        self,
        connection: Connection,
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
            connection.forward(request_id, 0 if deadline is None else deadline.left_us(), request)
        except ConnectionFullError:
            if self.pending.pop(request_id, None) is None:
                return  # the connection has ended, and the request with it
            self.pending[request_id] = (waiter, request, deadline, self._main)
            self._send(self._main, request_id, request, deadline, waiter)
        except Exception:  # a number that its field cannot hold, memory that cannot be read: nothing was sent
            if self.pending.pop(request_id, None) is not None:
                raise

    def slot(self, tokens: int, hidden_size: int, top_k: int, dtype: int) -> Any:
        """A slot of the session connection's; None: there is none, or it has no room."""
        connection = self.blocking
        return None if connection is None else connection.slot(tokens, hidden_size, top_k, dtype)

    def adopt(
        self,
        request_id: int,
        connection: CallingConnection,
        ticket: int,
        sent: Sent,
        request: Request,
        deadline: Deadline | None,
        waiter: Waiter[ForwardResult],
    ) -> None:
        """Takes over a request that its calling thread sent on `connection`; `waiter` gets its answer."""
        with self._lock:
            alive = self.alive
            if alive:
                self.pending[request_id] = (waiter, request, deadline, connection)
        try:
            if not alive:
                raise ConnectionFullError
            connection.adopt(request_id, ticket, sent)
        except ConnectionFullError:  # the session is over
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
        self._main.close()

    def _take_back(self, request_id: int) -> _Pending | None:
        found = self.pending.pop(request_id, None)
        if found is not None and self.alive:
            found[3].cancel(request_id)
        return found

    def _deliver(self, message: Delivered) -> None:
        """An id that nobody waits for is that of a cancelled or expired request: its answer is not wanted any more."""
        if isinstance(message, RawAnswer | ForwardResponseView):
            if isinstance(message, RawAnswer):
                self._on_load(message.report.load)
            elif message.load is not None:
                self._on_load(message.load)
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
            self._on_load(message)

    def _settle(self, answer: pb.SessionAnswer) -> None:
        """The server has answered the offer: open what it accepted."""
        if self._session is not None or self._opening:
            return  # to an offer that was never made
        reasons = {v.transport: v.reason or "refused without a reason" for v in answer.verdicts if not v.accepted}
        accepted = next((self._offered.get(v.transport) for v in answer.verdicts if v.accepted), None)
        if accepted is None:
            self._agree(None, INLINE, reasons)
        else:
            self._opening = True
            name = accepted.name
            accepted.open(
                answer,
                self._deliver,
                self._session_connection_closed,
                lambda outcome: self._opened(name, outcome, reasons),
            )

    def _opened(self, name: str, outcome: SessionConnection | Exception, reasons: dict[str, str]) -> None:
        if isinstance(outcome, Exception):
            self._agree(None, INLINE, {**reasons, name: str(outcome)})
        else:
            self._agree(outcome, name, reasons)

    def _agree(self, connection: SessionConnection | None, name: str, reasons: dict[str, str]) -> None:
        """Requests go over `connection` from now on; None: over the main one."""
        with self._lock:
            unwanted = connection
            if connection is not None and self._broken is None and self.alive:
                self.session_connection, unwanted = connection, None
                self.blocking = connection.blocking
            elif self._broken is not None:
                reasons = {**reasons, name: _broke(self._broken)}
            opened = name if self.session_connection is not None else INLINE
            agreed = Session(opened, {n: reasons[n] for n in self._offered if n in reasons})
            self._session = agreed
            asking, self._asking = self._asking, []
        if unwanted is not None:
            unwanted.close()
        for waiter in asking:
            waiter.answer(agreed)

    def _session_connection_closed(self, error: ExpertdError) -> None:
        with self._lock:
            self._broken = error
            connection, self.session_connection, self.blocking = self.session_connection, None, None
            if connection is None or self._session is None:
                return  # it never opened, and _settle() says why, or this link has ended
            self._session = Session(INLINE, {**self._session.refused, self._session.transport: _broke(error)})
        self._fail(error, connection)

    def _close(self, error: ExpertdError) -> None:
        """The connection ended, and the session with it."""
        with self._lock:
            self._error = blame(error, self._target, 2)
            self.alive = False  # from here on whoever adds to `pending` sees it, or is in it below
            connection, self.session_connection, self.blocking = self.session_connection, None, None
            asking, self._asking = self._asking, []
        self._fail(error, None)
        for waiter in asking:
            waiter.fail(self._error.copy())
        if connection is not None:
            connection.broke(self._error)
        self._on_close()

    def _fail(self, error: ExpertdError, connection: Connection | None) -> None:
        """Fails what is in flight on `connection`; None = everything."""
        with self._lock:
            there = self.pending.copy()  # at once: others add, and take answered ones out, meanwhile
            lost = [n for n, found in there.items() if connection is None or found[3] is connection]
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
