"""The client's side of a session over TCP: requests in flight, waiting for answers.  Thread-safe."""

from __future__ import annotations

import ctypes as C
import socket
from collections.abc import Sequence

from expertd.shm.client import NoRoomError, SessionEndedError
from expertd.shm.layout import ENTRIES, Completion, Submission, Tensors
from expertd.tcp.library import library

__all__ = ["SPIN_NS", "Client"]

SPIN_NS = 50_000
"""How long a waiter spins before it sleeps."""
_ANSWERED, _TIMED_OUT, _NO_ROOM, _CROWDED = 0, 1, 3, 4


class Client:
    """Owns the socket, which has been entered.  The same methods as expertd.shm.client.Client."""

    def __init__(self, sock: socket.socket) -> None:
        """Raises LibraryMissingError."""
        self._lib = library()
        sock.setblocking(False)
        self.sock = sock
        self._client = self._lib.expertd_tcp_client(sock.fileno())
        self._ids = (C.c_uint64 * ENTRIES)()

    def send(self, request: Submission, tensors: Tensors, announced: bool = True) -> int:
        """Sends `request`: its tensors are read before this returns, and it does not wait for the server.  Returns the
        ticket.  announced: watch() or drain() names it, and nobody waits for it.  Raises NoRoomError, and then nothing
        was sent."""
        ticket = C.c_uint64()
        how = self._lib.expertd_tcp_send(self._client, C.byref(request), C.byref(tensors), announced, C.byref(ticket))
        if how:
            raise self._no_room(how)
        return ticket.value

    def call(self, request: Submission, tensors: Tensors, answer: Completion, timeout_ns: int, spin_ns: int) -> int:
        """send() and wait(), without announcing it.  Returns the ticket, negative where the time was over first.

        Raises NoRoomError, SessionEndedError."""
        ticket = C.c_uint64()
        how = self._lib.expertd_tcp_call(
            self._client, C.byref(request), C.byref(tensors), timeout_ns, spin_ns, C.byref(answer), C.byref(ticket)
        )
        if how == _ANSWERED:
            return ticket.value
        if how == _TIMED_OUT:
            return -ticket.value
        if how in (_NO_ROOM, _CROWDED):
            raise self._no_room(how)
        raise SessionEndedError

    def _no_room(self, how: int) -> Exception:
        if self.over:
            return NoRoomError("the session is over")
        if how == _CROWDED:
            return NoRoomError(f"{ENTRIES} requests are in flight, as many as a session holds")
        return NoRoomError("the server does not read what was sent before")

    def wait(self, ticket: int, answer: Completion, timeout_ns: int = -1, spin_ns: int = SPIN_NS) -> bool:
        """Fills `answer`.  False: the time was over first (negative: never).  Raises SessionEndedError."""
        how = self._lib.expertd_tcp_wait(self._client, ticket, timeout_ns, spin_ns, C.byref(answer))
        if how == _ANSWERED:
            return True
        if how == _TIMED_OUT:
            return False
        raise SessionEndedError

    def announce(self, ticket: int) -> bool:
        """Nobody waits for it any more: watch() or drain() names it.  True: its answer is there already, and they do
        not."""
        return bool(self._lib.expertd_tcp_announce(self._client, ticket))

    def watch(self, timeout_ns: int) -> Sequence[int]:
        """Waits, for one thread: announced tickets whose answers have come.  Empty: the time was over, or the session
        is."""
        n = self._lib.expertd_tcp_watch(self._client, self._ids, len(self._ids), timeout_ns)
        return self._ids[:n]

    def drain(self) -> Sequence[int]:
        """Announced tickets whose answers have come since, for an event loop that watches the socket.  Writes what
        waits, too."""
        n = self._lib.expertd_tcp_drain(self._client, self._ids, len(self._ids))
        return self._ids[:n]

    @property
    def waiting(self) -> int:
        """Bytes that the socket did not take yet."""
        return int(self._lib.expertd_tcp_waiting(self._client))

    def answer(self, ticket: int, answer: Completion) -> None:
        """Fills `answer` with that of a ticket that watch() or drain() named."""
        self._lib.expertd_tcp_answer(self._client, ticket, C.byref(answer))

    def output(self, ticket: int, request: Submission) -> int:
        """Address of the output of a ticket that was answered and not refused, until it is released."""
        del request
        return int(self._lib.expertd_tcp_output(self._client, ticket))

    def release(self, ticket: int) -> None:
        """After its answer was used: the ticket and the memory of its output are free."""
        self._lib.expertd_tcp_release(self._client, ticket)

    def abandon(self, ticket: int) -> None:
        """Nobody wants the answer any more: the server is told; the ticket is free once it has answered."""
        self._lib.expertd_tcp_abandon(self._client, ticket)

    def end(self) -> None:
        """Everybody who waits gets SessionEndedError, and nothing more is sent."""
        self._lib.expertd_tcp_end(self._client)

    @property
    def over(self) -> bool:
        """Whether either side has ended the session."""
        return bool(self._lib.expertd_tcp_over(self._client))

    @property
    def blocks(self) -> int:
        """Tickets, with the memory of their answers, that are taken."""
        return int(self._lib.expertd_tcp_taken(self._client))

    def close(self) -> None:
        """After end(), when no thread waits any more."""
        client, self._client = self._client, None
        if client:
            self._lib.expertd_tcp_free(client)
            self.sock.close()
