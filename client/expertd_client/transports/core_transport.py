"""Transports whose connections are those of core_connection.py.  Connecting takes a while, and no request waits for it.

BlockingTransport   ExpertClient: a thread connects, and reads for as long as the session lives
AsyncTransport      AsyncExpertClient: a thread of the event loop connects
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from expertd.errors import UnavailableError
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.transports.core_connection import AsyncConnection, BlockingConnection
from expertd_client.transports.credentials import Credentials
from expertd_client.transports.protocol import Closed, Deliver, Ready

__all__ = ["BlockingTransport", "AsyncTransport"]

_T = TypeVar("_T")

_JOIN_S = 5.0


class BlockingTransport(Generic[_T]):
    """A SessionTransport to the server of one gRPC target.  credentials: those of gRPC."""

    name: str

    def __init__(self, target: str = "", credentials: Credentials | None = None) -> None:
        self._target, self._credentials = target, credentials
        self._readers: list[threading.Thread] = []

    def _enter(self, answer: pb.SessionAnswer) -> _T:
        """What the server lets in.  Raises UnavailableError."""
        raise NotImplementedError

    def _connection(self, entered: _T, deliver: Deliver, closed: Closed) -> BlockingConnection:
        raise NotImplementedError

    def open(self, answer: pb.SessionAnswer, deliver: Deliver, closed: Closed, ready: Ready) -> None:
        def live() -> None:
            try:
                connection = self._connection(self._enter(answer), deliver, closed)
            except UnavailableError as e:
                ready(e)
            else:
                ready(connection)
                connection.read()

        self._readers = [t for t in self._readers if t.is_alive()]
        self._readers.append(threading.Thread(target=live, name=f"expertd-{self.name}-read", daemon=True))
        self._readers[-1].start()

    def close(self) -> None:
        for reader in self._readers:
            if reader is not threading.current_thread():
                reader.join(_JOIN_S)


class AsyncTransport(Generic[_T]):
    """A SessionTransport, opened by its event loop."""

    name: str

    def __init__(self, target: str = "", credentials: Credentials | None = None) -> None:
        self._target, self._credentials = target, credentials
        self._opening: set[asyncio.Task[None]] = set()

    def _enter(self, answer: pb.SessionAnswer) -> _T:
        """What the server lets in.  Raises UnavailableError."""
        raise NotImplementedError

    def _leave(self, entered: _T) -> None:
        """Nobody wants it any more."""
        raise NotImplementedError

    def _connection(
        self, entered: _T, deliver: Deliver, closed: Closed, loop: asyncio.AbstractEventLoop
    ) -> AsyncConnection:
        raise NotImplementedError

    def open(self, answer: pb.SessionAnswer, deliver: Deliver, closed: Closed, ready: Ready) -> None:
        loop = asyncio.get_running_loop()

        async def enter() -> None:
            entering = _Entering(lambda: self._enter(answer), self._leave)
            try:
                entered = await loop.run_in_executor(None, entering.run)
            except UnavailableError as e:
                ready(e)
            except asyncio.CancelledError:  # the loop ends; the thread may be about to come back with a session
                entering.abandon()
                raise
            else:
                ready(self._connection(entered, deliver, closed, loop))

        task = loop.create_task(enter())
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def close(self) -> None:
        """What is still opening closes itself."""


class _Entering(Generic[_T]):
    """enter() on a thread, whose result somebody takes, or nobody: then it is closed."""

    def __init__(self, enter: Callable[[], _T], close: Callable[[_T], None]) -> None:
        self._enter, self._close = enter, close
        self._lock = threading.Lock()
        self._entered: list[_T] = []
        self._abandoned = False

    def run(self) -> _T:
        """Raises what enter() raises."""
        entered = self._enter()
        with self._lock:
            self._entered.append(entered)
            if self._abandoned:
                self._close_all()
        return entered

    def abandon(self) -> None:
        """Close what has come, or is to come."""
        with self._lock:
            self._abandoned = True
            self._close_all()

    def _close_all(self) -> None:
        while self._entered:
            self._close(self._entered.pop())
