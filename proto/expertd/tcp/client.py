"""The client's side of a session over TCP: a socket, and requests in flight on it."""

from __future__ import annotations

import socket

from expertd.shm.in_flight import RequestsInFlight
from expertd.shm.layout import ENTRIES, Submission
from expertd.tcp.library import library

# Why it is so: decision 125 in DECISIONS.md.
__all__ = ["Client"]


class Client(RequestsInFlight):
    """Owns the socket, which has been entered.  send() and call() write the tensors from where they lie, and drain()
    writes what waits, too."""

    full = "the server does not read what was sent before"

    def __init__(self, sock: socket.socket) -> None:
        """Raises LibraryMissingError."""
        lib = library()
        sock.setblocking(False)
        self.sock = sock
        super().__init__(lib, lib.client(sock.fileno()), ENTRIES)

    @property
    def waiting(self) -> int:
        """Bytes that the socket did not take yet."""
        return int(self._lib.waiting(self._client))

    def output(self, ticket: int, request: Submission) -> int:
        del request
        return int(self._lib.output(self._client, ticket))

    def _close(self) -> None:
        self.sock.close()
