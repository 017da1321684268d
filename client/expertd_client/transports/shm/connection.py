"""Requests through memory that client and server share (expertd.shm): for servers on this host.

Tensors are copied into a block of the region, or lie there already where the caller made them in a slot; the server
writes the output into the same block, which is lent to the caller until the last array over it is gone.  What does not
fit (rows grouped by expert, values that the server draws, digests, more bytes than the region has free) travels inline.
Tensors on a GPU of the caller's are copied by it (transports/shm/device.py) where ExpertClient.forward waits for them.

    ShmTransport       ExpertClient: a caller waits for its own answer; a thread reads those that nobody waits for
    AsyncShmTransport    AsyncExpertClient: everything in its event loop
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from expertd.common.dtypes import DTYPE_BYTES
from expertd.errors import BadResponseError, UnavailableError
from expertd.shm.client import Client
from expertd.shm.in_flight import SPIN_NS
from expertd.shm.layout import FORWARD, Completion, Submission
from expertd.shm.library import LibraryMissingError
from expertd.shm.region import Region, RegionError, supported
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.requests.deadline import Deadline
from expertd_client.requests.lent import Lent
from expertd_client.requests.request import Request
from expertd_client.requests.result import ForwardResult, require_version
from expertd_client.requests.tensors import device_of, over_memory
from expertd_client.tracing import TracedCall
from expertd_client.transports.core_connection import AsyncConnection, BlockingConnection, end_ns
from expertd_client.transports.core_transport import AsyncTransport, BlockingTransport
from expertd_client.transports.message import ALIGN, Prepared, refusal, result_with, submission_of, timing_of
from expertd_client.transports.protocol import Closed, ConnectionFullError, Deliver
from expertd_client.transports.shm.device import Pinned, on_gpu
from expertd_client.transports.shm.entry import entered

__all__ = ["AsyncShmTransport", "AsyncShmConnection", "ShmTransport", "ShmConnection", "enter_session"]

log = logging.getLogger(__name__)


_Entered: TypeAlias = tuple[socket.socket, Client]


class ShmTransport(BlockingTransport[_Entered]):
    """For ExpertClient."""

    name = "shm"

    def _enter(self, answer: pb.SessionAnswer) -> _Entered:
        return enter_session(answer)

    def _connection(self, entered: _Entered, deliver: Deliver, closed: Closed) -> ShmConnection:
        return ShmConnection(entered, deliver, closed)


class AsyncShmTransport(AsyncTransport[_Entered]):
    """For AsyncExpertClient, whose event loop opens it."""

    name = "shm"

    def _enter(self, answer: pb.SessionAnswer) -> _Entered:
        return enter_session(answer)

    def _leave(self, entered: _Entered) -> None:
        sock, client = entered
        client.end()
        client.close()
        sock.close()

    def _connection(
        self, entered: _Entered, deliver: Deliver, closed: Closed, loop: asyncio.AbstractEventLoop
    ) -> AsyncShmConnection:
        return AsyncShmConnection(entered, deliver, closed, loop)


def enter_session(answer: pb.SessionAnswer) -> _Entered:
    """The session's socket and region.  Raises UnavailableError."""
    if missing := supported():
        raise UnavailableError(f"shared memory: {missing}")
    try:
        sock = entered(answer.endpoint, answer.token)
    except OSError as e:
        raise UnavailableError(f"shared memory: {e}") from e
    try:
        region = Region.receive(sock)
        try:
            client = Client(region)
        except BaseException:
            region.close()
            raise
        sock.setblocking(False)
        return sock, client
    except (OSError, RegionError, LibraryMissingError) as e:
        sock.close()
        raise UnavailableError(f"shared memory: {e}") from e


class ShmConnection(BlockingConnection):
    """One session, from any thread.  read(): for the thread that made it, until the session ends."""

    what = "shared memory"

    def __init__(self, entered: _Entered, deliver: Deliver, closed: Closed) -> None:
        self._sock, self._memory = entered
        self._pinned: Pinned | None = None  # made when it is needed first
        self._pinnable, self._pinning = True, threading.Lock()
        super().__init__(self._memory, deliver, closed)

    def call(self, request: Request, deadline: Deadline | None, traced: TracedCall | None = None) -> ForwardResult:
        if not request.plain and self._pinnable and on_gpu(request) and (pinned := self._pin()) is not None:
            return self._call_from_gpu(pinned, request, deadline, traced)
        prepared: list[Prepared] = []  # one, once the request is sent
        self.use()
        try:
            sent, answer = submission_of(request), Completion()

            def prepare() -> None:  # the output has its place now
                if traced is not None:
                    traced.parts[-1].sent()
                prepared.append(Prepared(answer, sent, request, self._memory.output(0, sent.submission)))

            ticket = self._send_and_wait(request, sent, answer, deadline, prepare)
        except BaseException:
            self.unuse()
            raise
        if answer.refused:
            raise self._refused(ticket, answer)
        return prepared[0].result(partial(self._back, ticket))

    def expect(self) -> None:
        try:
            self.use()
        except ConnectionFullError:
            return
        try:
            self._memory.expect()
        finally:
            self.unuse()

    def _pin(self) -> Pinned | None:
        """None: the driver does not take this memory."""
        with self._pinning:
            if self._pinned is None and self._pinnable:
                try:
                    self._pinned = Pinned(self._memory)
                except RuntimeError as e:
                    self._pinnable = False
                    log.warning("shared memory: tensors on a GPU are copied on the host, too: %s", e)
            return self._pinned

    def _call_from_gpu(
        self, pinned: Pinned, request: Request, deadline: Deadline | None, traced: TracedCall | None
    ) -> ForwardResult:
        """call() for tensors on a GPU, which copies them into the arena, and the output from there."""
        self.use()
        try:
            put = pinned.put(request)
            if put is None:
                raise ConnectionFullError("shared memory: the session's memory is in use")
            sent, block = put
            sent.submission.deadline_ns = end_ns(deadline)
            ticket = self._memory.submit(sent.submission, block)
            if not ticket:
                self._memory.give(block)
                raise ConnectionFullError(
                    "shared memory: as many requests are in flight as a session holds, or it is over"
                )
            if traced is not None:
                traced.parts[-1].sent()
            answer = Completion()
            self._wait(ticket, request.layer, answer, deadline, SPIN_NS)
        except BaseException:
            self.unuse()
            raise
        if answer.refused:
            raise self._refused(ticket, answer)
        try:
            require_version(answer.weights_version, request)
        except BadResponseError:
            self._back(ticket)
            raise
        output = pinned.get(sent, device_of(request.hidden_states), partial(self._back, ticket))
        if self._over:
            pinned.sweep(wait=True)
        return result_with(answer, output)

    def _release(self) -> None:
        _hang_up(self._sock)
        if self._pinned is not None:
            self._pinned.sweep(wait=True)

    def _close(self) -> None:
        if self._pinned is not None:
            self._pinned.close()
        super()._close()

    def slot(self, tokens: int, hidden_size: int, top_k: int, dtype: int) -> _Slot | None:
        """A batch's tensors in the arena; None: there is no room."""
        try:
            return _Slot(self, tokens, hidden_size, top_k, dtype)
        except ConnectionFullError:
            return None

    def exchange(self, s: Submission, answer: Completion, layer: int, deadline: Deadline | None) -> None:
        """Sends a submission whose tensors lie in the arena, and fills `answer`.  Raises as call() does."""
        self.use()
        try:
            s.layer, s.deadline_ns = layer, end_ns(deadline)
            ticket = self._guard(lambda wait_ns: self._memory.exchange(s, answer, wait_ns), deadline)
            if ticket:
                self._wait(ticket, layer, answer, deadline)
                self._client.release(ticket)
        finally:
            self.unuse()
        if answer.refused:
            raise refusal(answer)

    def take(self, nbytes: int) -> tuple[int, Lent]:
        """A block of the arena: its offset, and the memory, which goes back by itself.  Raises ConnectionFullError."""
        self.use()
        offset = self._memory.take(nbytes)
        if offset is None:
            self.unuse()
            raise ConnectionFullError("shared memory: the session's memory is in use")

        def give_back() -> None:
            self._memory.give(offset)
            self.unuse()

        return offset, Lent.at(self._memory.region.arena + offset, nbytes, give_back)


class _Slot:
    """A ChannelSlot."""

    def __init__(self, connection: ShmConnection, tokens: int, hidden_size: int, top_k: int, dtype: int) -> None:
        self._connection, self._answer = connection, Completion()
        tensor, routes = tokens * hidden_size * DTYPE_BYTES[dtype], 4 * tokens * top_k
        sizes = [tensor, routes, routes, tensor]
        room = [-(-n // ALIGN) * ALIGN for n in sizes]
        block, lent = connection.take(sum(room))
        at = [sum(room[:i]) for i in range(4)]
        memory = lent.array()
        parts = [memory[a : a + n] for a, n in zip(at, sizes, strict=True)]
        self.hidden_states = over_memory(parts[0], dtype, (tokens, hidden_size), None)
        self.topk_ids = over_memory(parts[1], pb.DATA_TYPE_I32, (tokens, top_k), None)
        self.topk_weights = over_memory(parts[2], pb.DATA_TYPE_F32, (tokens, top_k), None)
        self.output = over_memory(parts[3], dtype, (tokens, hidden_size), None)
        self.topk_ids[:], self.topk_weights[:] = -1, 0
        s = self._submission = Submission(kind=FORWARD, tokens=tokens, top_k=top_k, hidden_size=hidden_size)
        s.hidden, s.ids, s.weights, s.out = (block + a for a in at)
        s.hidden_dtype = s.out_dtype = dtype
        s.ids_dtype, s.weights_dtype = pb.DATA_TYPE_I32, pb.DATA_TYPE_F32

    def forward(self, layer: int, deadline: Deadline | None) -> tuple[int, Callable[[], pb.Timing]]:
        answer = self._answer
        self._connection.exchange(self._submission, answer, layer, deadline)
        return answer.routes_computed, partial(timing_of, answer)


class AsyncShmConnection(AsyncConnection):
    """One session, in an event loop."""

    what = "shared memory"

    def __init__(
        self,
        entered: _Entered,
        deliver: Deliver,
        closed: Closed,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._sock, client = entered
        super().__init__(client, deliver, closed, loop, client.region.bell)

    def _release(self) -> None:
        _hang_up(self._sock)


def _hang_up(sock: socket.socket) -> None:
    """The server sees it at once, also while answers that are lent keep the region, which has the socket, too."""
    with contextlib.suppress(OSError):  # it was faster
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
