"""The seam of the client: how requests reach a server and answers come back.

A transport never sees who waits for an answer: that is the business of exchange/exchange.py.  It gets Requests,
whose tensors lie where the caller has them, and delivers values of `expertd.codec`.  Two kinds:

    Transport           one server: opens connections, calls unary RPCs (gRPC, a server in this process, a function)
    MainConnection      its connection: an ordered stream of requests, and offers of faster transports
    SessionTransport    a faster transport to the same server, which client and server agree on over a MainConnection
                        (expertd_client.exchange.session): shared memory, TCP.  One is a folder and an entry of table.py
    SessionConnection   its connection

Answers come in any order through `deliver`.

A connection says `closed(error)` exactly once, from its own thread or loop, and delivers nothing afterwards.
`deliver` and `closed` never block and never raise.  ExpertClient calls from any thread; AsyncExpertClient calls from
its event loop, and wants `deliver` and `closed` called there.

A plain function can stand for a server: FunctionTransport.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from expertd.codec import ForwardRequestView, RawAnswer, StreamResponseView
from expertd.errors import ExpertdError, RequestCancelledError, UnimplementedError
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.requests.request import Request

if TYPE_CHECKING:
    from expertd.shm.layout import Completion
    from expertd_client.requests.deadline import Deadline
    from expertd_client.requests.result import ForwardResult
    from expertd_client.tracing import TracedCall
    from expertd_client.transports.message import Sent

__all__ = [
    "CallingConnection",
    "SessionTransport",
    "SessionConnection",
    "ConnectionFullError",
    "Closed",
    "Connection",
    "Deliver",
    "Delivered",
    "FunctionTransport",
    "MainConnection",
    "Ready",
    "Transport",
    "Waiter",
    "no_session",
]

_T = TypeVar("_T", contravariant=True)

Delivered: TypeAlias = "StreamResponseView | RawAnswer"
Deliver = Callable[[Delivered], None]
"""Takes one message that the server sent.  What it holds belongs to the receiver from then on; where the memory of an
output is lent, until the receiver calls its `give_back` (see expertd_client.requests.lent)."""
Closed = Callable[[ExpertdError], None]
"""Takes the reason why nothing more will be delivered."""
Ready: TypeAlias = "Callable[[SessionConnection | Exception], None]"
"""Takes the connection of a SessionTransport, or the reason why there is none."""


class ConnectionFullError(Exception):
    """A SessionConnection cannot take a request now, and nothing was sent: it goes over the MainConnection."""


class Waiter(Protocol[_T]):
    """Somebody who waits for one answer; exactly one of the two is called, once."""

    def answer(self, value: _T, /) -> None: ...

    def fail(self, error: ExpertdError, /) -> None: ...


class Connection(Protocol):
    """One ordered stream of requests to a server.  After `closed` its methods do nothing."""

    def takes(self, request: Request) -> bool:
        """Whether this connection can carry a request; what a SessionConnection cannot goes over the MainConnection."""
        ...

    def forward(self, request_id: int, timeout_us: int, request: Request) -> None:
        """Sends a request; never waits for the server.  The tensors are read before this returns, or, within a process,
        may be read until the answer is delivered.  Raises where it cannot be sent, and then nothing was.

        request_id   never used before on this connection
        timeout_us   what is left of its time; 0 = no limit
        """

    def cancel(self, request_id: int) -> None:
        """Takes a request back; its answer, if one still comes, is not wanted."""

    def close(self) -> None:
        """Ends the connection; `closed` is called with RequestCancelledError unless it has been called already."""


class MainConnection(Connection, Protocol):
    """A connection that a Transport opened."""

    def offer(self, offer: pb.SessionOffer) -> None:
        """Asks for a faster transport; a pb.SessionAnswer is delivered."""


class SessionConnection(Connection, Protocol):
    """A connection that a SessionTransport opened.  Its forward() may raise ConnectionFullError."""

    @property
    def blocking(self) -> CallingConnection | None:
        """This connection, where a calling thread can send its request and wait for the answer itself, without a thread
        that reads; None: requests go through forward() alone."""
        ...

    def broke(self, error: ExpertdError) -> None:
        """close(), because the MainConnection ended with `error`: what is in flight here fails with that."""


class CallingConnection(Connection, Protocol):
    """A SessionConnection on which a calling thread sends its request, and waits for the answer, itself.

    session      address of its expertd.shm.layout.ConnectionHandle, of use between use() and unuse(): for C++ that
                 sends and waits by it
    most_bytes   of a message; 0 = no bound
    """

    session: int
    most_bytes: int

    def call(self, request: Request, deadline: Deadline | None, traced: TracedCall | None = None) -> ForwardResult:
        """Sends a request and waits for its answer.  Raises ConnectionFullError, and then nothing was sent; else the
        server's error, or DeadlineExceededError.  traced: its last part gets to know when it was sent."""
        ...

    def expect(self) -> None:
        """A call comes soon: the server may wake up meanwhile."""

    def slot(self, tokens: int, hidden_size: int, top_k: int, dtype: int) -> Any:
        """A batch's tensors where the server reads them (expertd_client.clients.slot); None: there is no such place."""

    def use(self) -> None:
        """Its memory stays until unuse().  Raises ConnectionFullError where the session is over: it may be gone."""

    def unuse(self) -> None:
        """Once for each use()."""

    # What follows is for who sends and waits by `session`.  ticket: the session's number of a request in flight.

    def lend(self, ticket: int, sent: Sent, request: Request, answer: Completion) -> ForwardResult:
        """An answer that was not refused.  A use() goes with it."""
        ...

    def release(self, ticket: int) -> None:
        """Of an answer that is not read any more."""

    def abandon(self, ticket: int) -> None:
        """Of a request in flight that nobody wants any more."""

    def adopt(self, request_id: int, ticket: int, sent: Sent) -> None:
        """A request in flight that nobody waits for any more: it is delivered as if forward() had sent it.  Raises
        ConnectionFullError where the session is over."""

    def lost(self) -> ExpertdError:
        """What becomes of requests in flight when the session is over."""
        ...


class SessionTransport(Protocol):
    """A faster transport to the server of one Transport."""

    name: str
    """As the contract calls it in SessionOffer: "shm", "cuda_ipc", "tcp"."""

    def open(self, answer: pb.SessionAnswer, deliver: Deliver, closed: Closed, ready: Ready) -> None:
        """Opens the connection that the server accepted: `answer` has its token and endpoint.  The token is valid until
        the MainConnection that carried the answer closes.  It does not wait: ready() is called once, now or later, on
        any thread of the transport's, with the connection, or with the reason why there is none."""
        ...

    def close(self) -> None:
        """Waits for threads of connections that are closed, or were closed as soon as they opened."""


class Transport(Protocol):
    """One server, and how it is reached."""

    target: str
    """What errors and reports call the server: its address."""
    offers: Sequence[SessionTransport]
    """What its connections can offer, best first."""

    def connect(self, deliver: Deliver, closed: Closed) -> MainConnection:
        """A new connection, without waiting for it: where the server cannot be reached, `closed` says so."""
        ...

    def unary(
        self, method: str, request: Any, answer: Any, timeout_s: float, wait_for_ready: bool, waiter: Waiter[Any]
    ) -> None:
        """Calls an RPC of ExpertService that is one message each way.

        method           its name in the contract: "Describe"
        request, answer  the message, and the class of the other one, which `waiter` gets
        wait_for_ready   keep trying to connect until the time is over
        """

    def close(self) -> None:
        """Begins to give back channel, threads and tasks.  Connections are closed before."""

    async def wait_closed(self) -> None:
        """Returns when everything is given back.  One that needs no event loop has done so in close()."""


def no_session(offer: pb.SessionOffer, reason: str) -> pb.SessionAnswer:
    """The answer of what has no sessions: `reason` for each transport."""
    return pb.SessionAnswer(verdicts=[pb.TransportVerdict(transport=t, reason=reason) for t in offer.transports])


class FunctionTransport:
    """A function that stands for a server: takes a request, returns its answer or raises a row of the error table.

    Answers are delivered before `forward` returns, in the caller's thread; a cancel finds nothing to cancel.
    """

    offers: Sequence[SessionTransport] = ()

    def __init__(
        self,
        serve: Callable[[ForwardRequestView], StreamResponseView],
        describe: Callable[[pb.DescribeRequest], pb.DescribeResponse] | None = None,
        target: str = "function",
    ) -> None:
        self.target = target
        self._serve = serve
        self._describe = describe

    def connect(self, deliver: Deliver, closed: Closed) -> MainConnection:
        return _FunctionConnection(self._serve, deliver, closed)

    def unary(
        self, method: str, request: Any, answer: Any, timeout_s: float, wait_for_ready: bool, waiter: Waiter[Any]
    ) -> None:
        del answer, timeout_s, wait_for_ready
        if method != "Describe" or self._describe is None:
            waiter.fail(UnimplementedError(f"{self.target}: {method}: this function answers forward requests alone"))
            return
        try:
            described = self._describe(request)
        except ExpertdError as error:
            waiter.fail(error)
        else:
            waiter.answer(described)

    def close(self) -> None:
        """Nothing to give back."""

    async def wait_closed(self) -> None:
        """Nothing to wait for."""


class _FunctionConnection:
    def __init__(
        self, serve: Callable[[ForwardRequestView], StreamResponseView], deliver: Deliver, closed: Closed
    ) -> None:
        self._serve = serve
        self._deliver = deliver
        self._closed: Closed | None = closed

    def takes(self, request: Request) -> bool:
        return True

    def forward(self, request_id: int, timeout_us: int, request: Request) -> None:
        if self._closed is None:
            return
        view = request.view(request_id, timeout_us)
        try:
            answer = self._serve(view)
        except ExpertdError as error:
            answer = error.to_request_error(request_id)
        self._deliver(answer)

    def cancel(self, request_id: int) -> None:
        """It has been answered."""

    def offer(self, offer: pb.SessionOffer) -> None:
        self._deliver(no_session(offer, "a function has no sessions"))

    def close(self) -> None:
        self.broke(RequestCancelledError("connection: closed by this client"))

    def broke(self, error: ExpertdError) -> None:
        closed, self._closed = self._closed, None
        if closed is not None:
            closed(error)
