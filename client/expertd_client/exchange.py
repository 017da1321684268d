"""Which answer belongs to which request: many in flight on one connection, answered in any order.

An Exchange opens its connection with the first request and a new one after the old one broke.  When a connection
breaks, every request that was in flight on it fails, with an error that may be retried unless the server said
otherwise; nothing is ever sent twice from here.
"""

from __future__ import annotations

import threading

from expertd.errors import (
    ExpertdError,
    RequestCancelledError,
    UnavailableError,
    UnimplementedError,
    from_request_error,
)
from expertd.v1 import expert_service_pb2 as pb
from expertd.wire import ForwardRequestView, ForwardResponseView, StreamResponseView
from expertd_client.transport import Connection, Transport, Waiter

__all__ = ["Exchange", "blame"]


class Exchange:
    """All forward requests of one client.  Thread-safe.

    load    what the server last said about itself, on an answer or unasked; None until then
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._lock = threading.Lock()
        self._link: _Link | None = None
        self._closed = False
        self.load: pb.Load | None = None

    def submit(self, request: ForwardRequestView, waiter: Waiter[ForwardResponseView]) -> None:
        """Sends `request`, whose request_id is one that was never used on this exchange; `waiter` gets its answer."""
        with self._lock:
            if self._closed:
                raise RequestCancelledError(f"{self._transport.target}: this client is closed; make a new one")
            link = self._link
            if link is None or not link.alive:
                link = self._link = _Link(self, self._transport)
        link.submit(request, waiter)

    def cancel(self, request_id: int) -> bool:
        """Forgets the waiter of a request and tells the server.  False: it has been answered, or is being answered."""
        link = self._link
        return link is not None and link.cancel(request_id)

    @property
    def in_flight(self) -> int:
        """Requests that wait for an answer."""
        link = self._link
        return len(link.pending) if link is not None else 0

    def close(self) -> None:
        """Fails what is in flight; every later request is refused."""
        with self._lock:
            self._closed = True
            link, self._link = self._link, None
        if link is not None:
            link.close()


class _Link:
    """One connection and the requests in flight on it."""

    def __init__(self, exchange: Exchange, transport: Transport) -> None:
        self.pending: dict[int, Waiter[ForwardResponseView]] = {}
        self.alive = True
        self._exchange = exchange
        self._target = transport.target
        self._lock = threading.Lock()  # `alive` and `pending` change together
        self._error: ExpertdError = UnavailableError(f"{transport.target}: the connection is closed")
        self._connection: Connection = transport.connect(self._deliver, self._close)

    def submit(self, request: ForwardRequestView, waiter: Waiter[ForwardResponseView]) -> None:
        with self._lock:
            alive = self.alive
            if alive:
                self.pending[request.request_id] = waiter
        if not alive:  # it broke between the choice of this link and now: nothing was sent
            waiter.fail(_copy(self._error))
            return
        try:
            self._connection.send(request)
        except Exception:  # a number that its field cannot hold, memory that cannot be read: nothing was sent
            self.pending.pop(request.request_id, None)
            raise

    def cancel(self, request_id: int) -> bool:
        if self.pending.pop(request_id, None) is None:
            return False
        if self.alive:
            self._connection.send(pb.CancelRequest(request_id=request_id))
        return True

    def close(self) -> None:
        self._connection.close()

    def _deliver(self, message: StreamResponseView) -> None:
        """An id that nobody waits for is that of a cancelled or expired request: its answer is not wanted any more."""
        if isinstance(message, ForwardResponseView):
            if message.load is not None:
                self._exchange.load = message.load
            waiter = self.pending.pop(message.request_id, None)
            if waiter is not None:
                waiter.answer(message)
        elif isinstance(message, pb.RequestError):
            error = from_request_error(message)
            if message.request_id == 0:  # the server could not read whose it was
                self._fail_all(error)
            elif (waiter := self.pending.pop(message.request_id, None)) is not None:
                waiter.fail(error)
        elif isinstance(message, pb.Load):
            self._exchange.load = message

    def _close(self, error: ExpertdError) -> None:
        with self._lock:
            self.alive = False
            self._error = blame(error, self._target, 2)
        self._fail_all(error)

    def _fail_all(self, error: ExpertdError) -> None:
        with self._lock:
            pending = list(self.pending.items())
            self.pending.clear()
        for request_id, waiter in pending:
            waiter.fail(_addressed(blame(error, self._target, len(pending)), request_id))


def blame(error: ExpertdError, target: str, in_flight: int) -> ExpertdError:
    """What each of `in_flight` requests fails with when their connection ended with `error`.

    An error that may be retried, one that holds for the whole server, and the end that this client made are
    everybody's.  Any other one was the fault of one request (a message too large, for one): with several in flight
    nobody knows whose, so each may be tried again; the only one in flight gets it as it is.
    """
    if error.retryable or isinstance(error, UnimplementedError | RequestCancelledError) or in_flight == 1:
        return _copy(error)
    lost = UnavailableError(
        f"{target}: the connection broke with {in_flight} requests in flight: {error.reason}: {error.message};"
        " each may be sent again"
    )
    lost.__cause__ = error
    return lost


def _copy(error: ExpertdError) -> ExpertdError:
    """The same row as another object: each waiter raises its own, with its own traceback."""
    copy = type(error)(error.message, retry_after_us=error.retry_after_us)
    copy.code, copy.reason, copy.retryable = error.code, error.reason, error.retryable
    copy.__cause__ = error.__cause__
    return copy


def _addressed(error: ExpertdError, request_id: int) -> ExpertdError:
    error.request_id = request_id
    return error
