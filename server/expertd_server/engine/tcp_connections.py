"""Connections over TCP that the core serves (csrc/tcp_connections.cpp), through ctypes."""

from __future__ import annotations

import ctypes as C
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from expertd.errors import TABLE
from expertd_server.engine.core import REASONS, Core, TcpBoundsStruct, library

__all__ = ["TcpBounds", "TcpConnections"]

_AT_ONCE = 256
_FOR_EVER_MS = 1 << 40


@dataclass(frozen=True)
class TcpBounds:
    """Of sessions over TCP.

    most_message      bytes of one message
    most_bytes        of messages and answers of all sessions together
    most_in_flight    requests of one session
    half_s            until a message that began must have grown; a whole one may take six times as long
    unread_s          until an answer must have been read further
    """

    most_message: int
    most_bytes: int = 1 << 30
    most_in_flight: int = 1024
    half_s: float = 10.0
    unread_s: float = 60.0


class TcpConnections:
    """From any thread.  number_of: a caller's number in the core; bell: an eventfd that is readable when gone() has
    something to say."""

    def __init__(self, core: Core, bounds: TcpBounds, number_of: Callable[[str], int]) -> None:
        self._lib, self._number_of = library(), number_of
        self._handles = itertools.count(1)
        rows = [TABLE[reason] if reason else None for reason in REASONS]
        told = TcpBoundsStruct(
            bounds.most_message,
            bounds.most_bytes,
            bounds.most_in_flight,
            int(bounds.half_s * 1000),
            int(bounds.unread_s * 1000),
        )
        told.codes[:] = [0 if row is None else int(row.code) for row in rows]
        told.retryable[:] = [row is not None and row.retryable for row in rows]
        self._tcp_connections = self._lib.expertd_tcp_connections(core.address, C.byref(told))
        self.bell: int = self._lib.expertd_tcp_connections_bell(self._tcp_connections)
        weakref.finalize(self, _free, self._tcp_connections, core).atexit = False
        self._gone = (C.c_uint64 * _AT_ONCE)()

    def add(self, fd: int, caller: str) -> int:
        """Serve a session whose client has entered; fd is theirs from now on.  Its handle."""
        handle = next(self._handles)
        self._lib.expertd_tcp_connections_add(self._tcp_connections, handle, fd, self._number_of(caller))
        return handle

    def remove(self, handle: int) -> None:
        """Serve it no more."""
        self._lib.expertd_tcp_connections_remove(self._tcp_connections, handle)

    def gone(self) -> Sequence[int]:
        """Handles of sessions that ended since the last call."""
        n = self._lib.expertd_tcp_connections_gone(self._tcp_connections, self._gone, _AT_ONCE)
        return self._gone[:n]

    @property
    def unwritten(self) -> int:
        """Answers that their callers have not read."""
        return int(self._lib.expertd_tcp_connections_unwritten(self._tcp_connections))

    def stop(self, timeout_s: float | None = None) -> bool:
        """Nothing is read or written any more.  False: after timeout_s a kernel has not ended that their thread called;
        then nobody may let go of them, because it reads what is theirs."""
        wait_ms = _FOR_EVER_MS if timeout_s is None else int(1000 * timeout_s)
        return bool(self._lib.expertd_tcp_connections_stop(self._tcp_connections, wait_ms))


def _free(connections: int, core: Core) -> None:
    """core: must outlive them."""
    del core
    library().expertd_tcp_connections_free(connections)
