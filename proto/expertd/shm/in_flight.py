"""The client's side of a session, whichever way its messages travel: requests in flight, waiting for answers.
Thread-safe.

    expertd.shm.client.Client    through memory that both sides share
    expertd.tcp.client.Client    as frames on a socket
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Callable, Sequence
from ctypes import byref, c_uint64
from typing import Any

from expertd.shm.layout import Completion, ConnectionHandle, Submission, Tensors

__all__ = ["SPIN_NS", "NoRoomError", "SessionEndedError", "RequestsInFlight"]

SPIN_NS = 50_000
"""How long a waiter spins before it sleeps: longer than a small batch takes, short enough to cost nothing else."""
_ANSWERED, _TIMED_OUT, _NO_ROOM, _CROWDED = 0, 1, 3, 4


class SessionEndedError(Exception):
    """The other side ended the session, or this one did."""


class NoRoomError(Exception):
    """The session cannot take a request now."""


class RequestsInFlight:
    """A request in flight is a ticket, until its answer was used and it is released.

    session   the same for C++ that waits for several of them, until close()"""

    full: str
    """Why there is no room though tickets are free."""

    def __init__(self, library: Any, client: Any, entries: int, arena: int = 0) -> None:
        """client: what the library made; entries: tickets that there are; arena: address of that of a region."""
        self._lib, self._client, self._entries = library, client, entries
        self._ids = (C.c_uint64 * entries)()
        self.session = ConnectionHandle.of(client, arena, library)

    def send(self, request: Submission, tensors: Tensors, announced: bool = True) -> int:
        """Sends `request`: its tensors are read before this returns, and it does not wait for the server.  Returns the
        ticket.  announced: watch() or drain() names it, and nobody waits for it.  Raises NoRoomError, and then nothing
        was sent."""
        ticket = C.c_uint64()
        how = self._lib.send(self._client, C.byref(request), C.byref(tensors), announced, C.byref(ticket))
        if how:
            raise self._no_room(how)
        return ticket.value

    def call(self, request: Submission, tensors: Tensors, answer: Completion, timeout_ns: int, spin_ns: int) -> int:
        """send() and wait(), without announcing it.  Returns the ticket, negative where the time was over first.

        Raises NoRoomError, SessionEndedError."""
        ticket = c_uint64()
        try:
            how = self._lib.call(
                self._client, byref(request), byref(tensors), timeout_ns, spin_ns, byref(answer), byref(ticket)
            )
            if how == _ANSWERED:
                return ticket.value
            return ticket.value if self._answered(how) else -ticket.value
        except BaseException:  # a signal's handler, or the session is over: the caller will never know the ticket
            if ticket.value:
                self.abandon(ticket.value)
            raise

    def call_beside(
        self,
        request: Submission,
        tensors: Tensors,
        answer: Completion,
        timeout_ns: int,
        spin_ns: int,
        beside: Callable[[], object],
    ) -> int:
        """As call(), with beside() between the two steps: while the server computes.  timeout_ns is what remains then.
        The request's offsets in the arena are filled in before it."""
        ticket = c_uint64()
        try:
            how = self._lib.send(self._client, byref(request), byref(tensors), 0, byref(ticket))
            if how:
                raise self._no_room(how)
            beside()
            how = self._lib.wait(self._client, ticket.value, timeout_ns, spin_ns, byref(answer))
            return ticket.value if how == _ANSWERED or self._answered(how) else -ticket.value
        except BaseException:  # as in call(), or beside() raised
            if ticket.value:
                self.abandon(ticket.value)
            raise

    def wait(self, ticket: int, answer: Completion, timeout_ns: int = -1, spin_ns: int = SPIN_NS) -> bool:
        """Fills `answer`, its text only where it is refused.  False: the time was over first (negative:
        never).  Raises SessionEndedError."""
        return self._answered(self._lib.wait(self._client, ticket, timeout_ns, spin_ns, C.byref(answer)))

    def announce(self, ticket: int) -> bool:
        """Nobody waits for it any more: watch() or drain() names it.  True: its answer is there already, and they do
        not."""
        return bool(self._lib.announce(self._client, ticket))

    def watch(self, timeout_ns: int) -> Sequence[int]:
        """Waits, for one thread: announced tickets whose answers have come.  Empty: the time was over, or the session
        is."""
        n = self._lib.watch(self._client, self._ids, len(self._ids), timeout_ns)
        return self._ids[:n]

    def poll(self) -> Sequence[int]:
        """As drain(), for who looks again soon: nothing becomes readable with the next one."""
        n = self._lib.poll(self._client, self._ids, len(self._ids))
        return self._ids[:n]

    def drain(self) -> Sequence[int]:
        """Announced tickets whose answers have come since, for an event loop that watches the session's socket
        (of a region: `bell`).  An empty answer means that it becomes readable with the next one."""
        n = self._lib.drain(self._client, self._ids, len(self._ids))
        return self._ids[:n]

    def answer(self, ticket: int, answer: Completion) -> None:
        """Fills `answer` with that of a ticket that watch() or drain() named."""
        self._lib.answer(self._client, ticket, C.byref(answer))

    def output(self, ticket: int, request: Submission) -> int:
        """Address of the output of a ticket that was answered and not refused, until it is released."""
        raise NotImplementedError

    def release(self, ticket: int) -> None:
        """After its answer was used: the ticket and its memory are free."""
        self._lib.release(self._client, ticket)

    def abandon(self, ticket: int) -> None:
        """Nobody wants the answer any more: the server is told; the ticket is free once it has answered."""
        self._lib.abandon(self._client, ticket)

    def end(self) -> None:
        """Everybody who waits gets SessionEndedError, and nothing more is sent."""
        self._lib.end(self._client)

    @property
    def over(self) -> bool:
        """Whether either side has ended the session."""
        return bool(self._lib.over(self._client))

    @property
    def taken(self) -> int:
        """Tickets that are not free."""
        return int(self._lib.taken(self._client))

    def close(self) -> None:
        """After end(), when no thread waits any more."""
        client, self._client = self._client, None
        if client:
            self._lib.free(client)
            self._close()

    def _close(self) -> None:
        """What the messages travelled by."""
        raise NotImplementedError

    def _answered(self, how: int) -> bool:
        """False: the time was over first.  Raises NoRoomError, SessionEndedError."""
        if how == _ANSWERED:
            return True
        if how == _TIMED_OUT:
            return False
        if how in (_NO_ROOM, _CROWDED):
            raise self._no_room(how)
        raise SessionEndedError

    def _no_room(self, how: int) -> NoRoomError:
        if self.over:
            return NoRoomError("the session is over")
        if how == _CROWDED:
            return NoRoomError(f"{self._entries} requests are in flight, as many as a session holds")
        return NoRoomError(self.full)
