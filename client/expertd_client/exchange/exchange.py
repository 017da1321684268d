"""All forward requests of one client: many in flight on one connection, answered in any order, each until its deadline.

An Exchange connects with the first request, and again after the connection broke.  Both clients share it: what differs
between threads and an event loop is the alarm that watches the deadlines (requests/deadline.py), and who waits.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from expertd.errors import RequestCancelledError, TooManyTokensError, UnavailableError
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.exchange.link import Link
from expertd_client.exchange.session import INLINE, Session
from expertd_client.requests.deadline import Alarm, Deadline
from expertd_client.requests.request import Request
from expertd_client.requests.result import ForwardResult
from expertd_client.tracing import TracedCall
from expertd_client.transports.message import Sent
from expertd_client.transports.protocol import CallingConnection, ConnectionFullError, Transport, Waiter

__all__ = ["Exchange"]

_REST = 20
"""Of the time between two looks at deadlines, to what one look took."""


class Exchange:
    """Thread-safe.

    reconnects   whether a request connects where there is no connection; else session() alone does
    broke        called when the connection ends
    most_tokens  of a request, as this server's Describe said since the connection was made; 0 = not known.  More are
                 refused before they are sent: gRPC refuses the message only when it has all arrived
    """

    def __init__(
        self, transport: Transport, alarm: Callable[[Callable[[], None]], Alarm], reconnects: bool = True
    ) -> None:
        self.broke: Callable[[], None] = lambda: None
        self.most_tokens = 0
        self._reconnects = reconnects
        self._load: pb.Load | Callable[[], pb.Load] | None = None
        self._transport = transport
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._closed = False
        self._alarm = alarm(self._end_what_is_due)

    def submit(self, request: Request, deadline: Deadline | None, waiter: Waiter[ForwardResult]) -> int:
        """Sends `request` and returns its id; `waiter` gets its answer, or DeadlineExceededError in time."""
        link = self._open(self._reconnects)
        if self.most_tokens and request.tokens > self.most_tokens:
            raise self._too_many(request)
        request_id = next(self._ids)
        link.forward(request_id, request, deadline, waiter)
        if deadline is not None:
            self._alarm.set(deadline.end_s)
        return request_id

    def call(
        self, request: Request, deadline: Deadline | None, traced: TracedCall | None = None
    ) -> ForwardResult | None:
        """The answer, waited for by the calling thread itself; None: nothing was sent, because there is no connection
        that can do so now."""
        link = self._link
        if link is None or not link.alive:
            link = self._open()
        connection = link.blocking
        if self.most_tokens and request.tokens > self.most_tokens:
            raise self._too_many(request)
        if connection is None or not connection.takes(request):
            return None
        try:
            answer = connection.call(request, deadline, traced)
        except ConnectionFullError:
            return None
        if traced is not None:
            traced.parts[-1].answered(answer.timing)
            traced.parts[-1].transport = self.transport_name
        self._load = answer.lazy_load  # not the answer, whose memory is lent
        return answer

    def expect(self) -> None:
        """A call comes soon: what sleeps may wake up meanwhile."""
        link = self._link
        connection = None if link is None else link.blocking
        if connection is not None:
            connection.expect()

    def slot(self, tokens: int, hidden_size: int, top_k: int, dtype: int) -> Any:
        """A slot of the session connection, as in expertd_client.clients.slot; None: there is none."""
        return self._open().slot(tokens, hidden_size, top_k, dtype)

    @property
    def load(self) -> pb.Load | None:
        """What the server last said about itself, on an answer or unasked; None until then."""
        load = self._load
        return load() if callable(load) else load

    def blocking(self) -> tuple[Link, CallingConnection] | None:
        """For C++ that sends and waits by a connection's own functions; None: there is no such connection now."""
        link = self._link
        connection = None if link is None else link.blocking
        return (link, connection) if link is not None and connection is not None else None

    def adopt(
        self,
        link: Link,
        connection: CallingConnection,
        ticket: int,
        sent: Sent,
        request: Request,
        deadline: Deadline | None,
        waiter: Waiter[ForwardResult],
    ) -> int:
        """As submit(), of a request that was sent already: its calling thread does not wait for it any more."""
        request_id = next(self._ids)
        link.adopt(request_id, connection, ticket, sent, request, deadline, waiter)
        if deadline is not None:
            self._alarm.set(deadline.end_s)
        return request_id

    def cancel(self, request_id: int) -> bool:
        """Forgets the waiter of a request and tells the server.  False: it has been answered, or is being answered."""
        link = self._link
        return link is not None and link.cancel(request_id)

    def session(self, waiter: Waiter[Session]) -> None:
        """`waiter` gets how messages travel on the present connection, which is made if there is none."""
        self._open().session(waiter)

    @property
    def alive(self) -> bool:
        """Whether there is a connection."""
        link = self._link
        return link is not None and link.alive

    @property
    def agreed(self) -> Session | None:
        """How messages travel on the present connection; None: there is none, or the offer was not answered yet."""
        link = self._link
        return link.agreed if link is not None and link.alive else None

    @property
    def transport_name(self) -> str:
        """Transport of the session; "inline" until one is agreed on."""
        link = self._link
        return INLINE if link is None or link.agreed is None else link.agreed.transport

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
        self._alarm.close()

    def _open(self, connects: bool = True) -> Link:
        """Raises UnavailableError where there is no connection, and none is to be made."""
        link = self._link
        if link is not None and link.alive:  # close() takes it away
            return link
        with self._lock:
            if self._closed:
                raise RequestCancelledError(f"{self._transport.target}: this client is closed; make a new one")
            link = self._link
            if link is None or not link.alive:
                if not connects:
                    raise UnavailableError(f"{self._transport.target}: the connection broke; it is being made again")
                link = self._link = Link(self._transport, self._on_load, self._on_broken)
            return link

    def _on_broken(self) -> None:
        self.most_tokens = 0  # the next connection may lead to another server
        self.broke()

    def _too_many(self, request: Request) -> TooManyTokensError:
        return TooManyTokensError(
            f"{self._transport.target}: hidden_states: got {request.tokens} tokens, want at most {self.most_tokens};"
            " split the batch"
        )

    def _on_load(self, load: pb.Load | Callable[[], pb.Load]) -> None:
        self._load = load

    def _end_what_is_due(self) -> None:
        """For the alarm.  It is set to the earliest deadline of those in flight or earlier: an answer changes nothing
        in it, and a request costs one comparison.  While many deadlines pass one after the other it rests between two
        looks, so that looking takes a twentieth of the time at most."""
        now_s, link, next_s = time.monotonic(), self._link, math.inf
        if link is None:
            return
        due = []
        for request_id, (_, _, deadline, _) in link.pending.copy().items():
            if deadline is None:
                continue
            if deadline.end_s <= now_s:
                due.append((deadline.end_s, request_id))
            elif deadline.end_s < next_s:
                next_s = deadline.end_s
        for _, request_id in sorted(due):
            link.expire(request_id)
        if next_s != math.inf:
            over_s = time.monotonic()
            self._alarm.set(max(next_s, over_s + _REST * (over_s - now_s)))
