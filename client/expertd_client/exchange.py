"""All forward requests of one client: many in flight on one connection, answered in any order, each until its deadline.

An Exchange connects with the first request, and again after the connection broke.  Both clients share it: what differs
between threads and an event loop is the alarm that watches the deadlines (expertd_client.deadline), and who waits.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

from expertd.errors import RequestCancelledError
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.beside import CallConnection
from expertd_client.deadline import Alarm, Deadline
from expertd_client.link import Link
from expertd_client.request import Request
from expertd_client.result import ForwardResult
from expertd_client.session import INLINE, Session
from expertd_client.shm_message import Sent
from expertd_client.tracing import TracedCall
from expertd_client.transport import ChannelFullError, Transport, Waiter

__all__ = ["Exchange"]

_SLACK = 64
"""Deadlines of answered requests that are kept before they are looked for."""


class Exchange:
    """Thread-safe."""

    def __init__(self, transport: Transport, alarm: Callable[[Callable[[], None]], Alarm]) -> None:
        self._load: pb.Load | Callable[[], pb.Load] | None = None
        self._transport = transport
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._closed = False
        self._alarm = alarm(self._end_what_is_due)
        self._due: list[tuple[float, int, Link]] = []  # a heap: (end_s, request_id, where it is in flight)
        self._due_lock = threading.Lock()

    def submit(self, request: Request, deadline: Deadline | None, waiter: Waiter[ForwardResult]) -> int:
        """Sends `request` and returns its id; `waiter` gets its answer, or DeadlineExceededError in time."""
        link = self._open()
        request_id = next(self._ids)
        link.forward(request_id, request, deadline, waiter)
        if deadline is not None and request_id in link.pending:
            self._watch(deadline.end_s, request_id, link)
        return request_id

    def call(
        self, request: Request, deadline: Deadline | None, traced: TracedCall | None = None
    ) -> ForwardResult | None:
        """The answer, waited for by the calling thread itself; None: nothing was sent, because there is no channel that
        can do so now."""
        way = self._open().direct(request)
        if way is None:
            return None
        try:
            answer: ForwardResult = way.call(request, deadline, traced)
        except ChannelFullError:
            return None
        if traced is not None:
            traced.parts[-1].transport = self.way
        self._load = answer.lazy_load  # not the answer, whose memory is lent
        return answer

    def slot(self, tokens: int, hidden_size: int, top_k: int, dtype: int) -> Any:
        """A channel's slot, as in expertd_client.slot; None: there is no channel that has one."""
        return self._open().slot(tokens, hidden_size, top_k, dtype)

    @property
    def load(self) -> pb.Load | None:
        """What the server last said about itself, on an answer or unasked; None until then."""
        load = self._load
        return load() if callable(load) else load

    def direct(self) -> tuple[Link, CallConnection] | None:
        """For who sends and waits by a session's own functions; None: there is no such session now."""
        link = self._link
        way = None if link is None or not link.alive else link.beside
        return (link, way) if link is not None and isinstance(way, CallConnection) else None

    def adopt(
        self,
        link: Link,
        way: CallConnection,
        ticket: int,
        sent: Sent,
        request: Request,
        deadline: Deadline | None,
        waiter: Waiter[ForwardResult],
    ) -> int:
        """As submit(), of a request that is on its way: its caller does not wait for it any more."""
        request_id = next(self._ids)
        link.adopt(request_id, way, ticket, sent, request, deadline, waiter)
        if deadline is not None and request_id in link.pending:
            self._watch(deadline.end_s, request_id, link)
        return request_id

    def cancel(self, request_id: int) -> bool:
        """Forgets the waiter of a request and tells the server.  False: it has been answered, or is being answered."""
        link = self._link
        return link is not None and link.cancel(request_id)

    def session(self, waiter: Waiter[Session]) -> None:
        """`waiter` gets how messages travel on the present connection."""
        self._open().session(waiter)

    @property
    def way(self) -> str:
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

    def _open(self) -> Link:
        with self._lock:
            if self._closed:
                raise RequestCancelledError(f"{self._transport.target}: this client is closed; make a new one")
            link = self._link
            if link is None or not link.alive:
                link = self._link = Link(self._transport, self._told)
            return link

    def _told(self, load: pb.Load | Callable[[], pb.Load]) -> None:
        self._load = load

    def _watch(self, end_s: float, request_id: int, link: Link) -> None:
        """Most requests are answered long before their deadline, which then stays in the heap until it is the first, or
        until there are many of its kind: so an answer costs nothing here, and a request a comparison."""
        with self._due_lock:
            if len(self._due) > _SLACK + 4 * len(link.pending):
                self._due = [entry for entry in self._due if entry[1] in entry[2].pending]
                heapq.heapify(self._due)
            heapq.heappush(self._due, (end_s, request_id, link))
        self._alarm.set(end_s)

    def _end_what_is_due(self) -> None:
        """For the alarm."""
        now_s, over = time.monotonic(), []
        with self._due_lock:
            while self._due and (self._due[0][0] <= now_s or self._due[0][1] not in self._due[0][2].pending):
                over.append(heapq.heappop(self._due))
            next_s = self._due[0][0] if self._due else None
        for _, request_id, link in over:
            link.expire(request_id)
        if next_s is not None:
            self._alarm.set(next_s)
