"""The one seam of the client: how messages reach a server and come back.

A transport moves values of `expertd.wire`, never arrays and never futures; which answer belongs to which request is
the business of `expertd_client.exchange`.  Adding one (a shared-memory ring, a framed TCP channel, CUDA IPC) is one
file with these two classes:

    Transport     one server: opens connections, asks Describe
    Connection    one ordered stream of requests; answers come in any order through `deliver`

A connection says `closed(error)` exactly once, from its own thread or loop, and delivers nothing afterwards.
`deliver` and `closed` never block and never raise.  ExpertClient calls from any thread; AsyncExpertClient calls from
its event loop, and wants `deliver` and `closed` called there.

A plain function can stand for a server: FunctionTransport.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from expertd.errors import ExpertdError, RequestCancelledError, UnimplementedError
from expertd.v1 import expert_service_pb2 as pb
from expertd.wire import StreamRequestView, StreamResponseView

__all__ = ["Closed", "Connection", "Deliver", "FunctionTransport", "Transport", "Waiter"]

_T = TypeVar("_T", contravariant=True)

Deliver = Callable[[StreamResponseView], None]
"""Takes one message that the server sent; what it holds belongs to the receiver from then on."""
Closed = Callable[[ExpertdError], None]
"""Takes the reason why nothing more will be delivered."""


class Waiter(Protocol[_T]):
    """Somebody who waits for one answer; exactly one of the two is called, once."""

    def answer(self, value: _T, /) -> None: ...

    def fail(self, error: ExpertdError, /) -> None: ...


class Connection(Protocol):
    """One ordered stream of messages to a server."""

    def send(self, message: StreamRequestView) -> None:
        """Queues one message; never waits for the server.  The tensors in it are read before this returns, or, within
        a process, may be read until the answer is delivered.  After `closed` it does nothing."""

    def close(self) -> None:
        """Ends the connection; `closed` is called with RequestCancelledError unless it has been called already."""


class Transport(Protocol):
    """The way to one server."""

    target: str
    """What errors and reports call the server: its address."""

    def connect(self, deliver: Deliver, closed: Closed) -> Connection:
        """A new connection, without waiting for it: where the server cannot be reached, `closed` says so."""
        ...

    def describe(
        self, request: pb.DescribeRequest, timeout_s: float, wait_for_ready: bool, waiter: Waiter[pb.DescribeResponse]
    ) -> None:
        """Asks what the server holds.  wait_for_ready: keep trying to connect until the time is over."""

    def close(self) -> None:
        """Gives back channel and threads.  Connections are closed before."""


class FunctionTransport:
    """A function that stands for a server: takes a request, returns its answer or raises a row of the error table.

    Answers are delivered before `send` returns, in the caller's thread; a cancel finds nothing to cancel.
    """

    def __init__(
        self,
        serve: Callable[[StreamRequestView], StreamResponseView],
        describe: Callable[[pb.DescribeRequest], pb.DescribeResponse] | None = None,
        target: str = "function",
    ) -> None:
        self.target = target
        self._serve = serve
        self._describe = describe

    def connect(self, deliver: Deliver, closed: Closed) -> Connection:
        return _FunctionConnection(self._serve, deliver, closed)

    def describe(
        self, request: pb.DescribeRequest, timeout_s: float, wait_for_ready: bool, waiter: Waiter[pb.DescribeResponse]
    ) -> None:
        del timeout_s, wait_for_ready
        if self._describe is None:
            waiter.fail(UnimplementedError(f"{self.target}: Describe: this function answers forward requests alone"))
            return
        try:
            answer = self._describe(request)
        except ExpertdError as error:
            waiter.fail(error)
        else:
            waiter.answer(answer)

    def close(self) -> None:
        """Nothing to give back."""


class _FunctionConnection:
    def __init__(
        self, serve: Callable[[StreamRequestView], StreamResponseView], deliver: Deliver, closed: Closed
    ) -> None:
        self._serve = serve
        self._deliver = deliver
        self._closed: Closed | None = closed

    def send(self, message: StreamRequestView) -> None:
        if self._closed is None or isinstance(message, pb.CancelRequest):
            return
        try:
            answer = self._serve(message)
        except ExpertdError as error:
            answer = error.to_request_error(getattr(message, "request_id", 0))
        self._deliver(answer)

    def close(self) -> None:
        closed, self._closed = self._closed, None
        if closed is not None:
            closed(RequestCancelledError("connection: closed by this client"))
