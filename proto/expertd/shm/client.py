"""The client's side of a region: blocks of the arena, requests in flight, waiting for answers.  Thread-safe."""

from __future__ import annotations

import ctypes as C
from collections.abc import Sequence

from expertd.shm.layout import Completion, Submission, Tensors
from expertd.shm.library import library
from expertd.shm.region import Region, RegionError

__all__ = ["SPIN_NS", "Client", "NoRoomError", "SessionEndedError"]

SPIN_NS = 50_000
"""How long a waiter spins before it sleeps: longer than a small batch takes, short enough to cost nothing else."""
_ANSWERED, _TIMED_OUT, _NO_ROOM, _CROWDED = 0, 1, 3, 4


class SessionEndedError(Exception):
    """The other side ended the session, or this one did."""


class NoRoomError(Exception):
    """The session cannot take a request now."""


class Client:
    """Owns the region."""

    def __init__(self, region: Region) -> None:
        """Raises RegionError, LibraryMissingError."""
        self.region = region
        self._lib = library()
        self._client = self._lib.expertd_shm_client(
            region.address, region.bytes, region.entries, region.server_bell, region.client_bell
        )
        if not self._client:
            raise RegionError("session: the shared memory is of another version")
        self._ids = (C.c_uint64 * region.entries)()

    def take(self, nbytes: int) -> int | None:
        """A block of the arena: its offset, a multiple of 256; None: there is no room now."""
        offset = self._lib.expertd_shm_take(self._client, nbytes)
        return None if offset < 0 else int(offset)

    def give(self, offset: int) -> None:
        """Gives a block back that no request owns."""
        self._lib.expertd_shm_give(self._client, offset)

    def submit(self, request: Submission, block: int | None = None, announced: bool = False) -> int:
        """Sends a copy of `request`.  block: goes back to the arena together with the ticket.  announced: watch() or
        drain() names it, and nobody waits for it.  Returns the ticket; 0: as many requests are in flight as the rings
        hold, or the session is over."""
        offset = -1 if block is None else block
        return int(self._lib.expertd_shm_submit(self._client, C.byref(request), offset, announced))

    def send(self, request: Submission, tensors: Tensors, announced: bool = True) -> int:
        """Copies the tensors into the arena, and submits `request` with their places.  Returns the ticket.  announced:
        as in submit().  Raises NoRoomError, and then nothing was sent."""
        ticket = C.c_uint64()
        how = self._lib.expertd_shm_send(self._client, C.byref(request), C.byref(tensors), announced, C.byref(ticket))
        if how:
            raise self._no_room(how)
        return ticket.value

    def call(self, request: Submission, tensors: Tensors, answer: Completion, timeout_ns: int, spin_ns: int) -> int:
        """send() and wait(), without announcing it.  Returns the ticket, negative where the time was over first.

        Raises NoRoomError, SessionEndedError."""
        ticket = C.c_uint64()
        how = self._lib.expertd_shm_call(
            self._client,
            C.byref(request),
            C.byref(tensors),
            timeout_ns,
            spin_ns,
            C.byref(answer),
            C.byref(ticket),
        )
        if how == _ANSWERED:
            return ticket.value
        if how == _TIMED_OUT:
            return -ticket.value
        if how in (_NO_ROOM, _CROWDED):
            raise self._no_room(how)
        raise SessionEndedError

    def exchange(self, request: Submission, answer: Completion, timeout_ns: int, spin_ns: int = SPIN_NS) -> int:
        """Sends a request whose tensors lie in the arena, and waits.  0: `answer` is filled and its ticket given back;
        else the time was over first, and this is the ticket.  Raises NoRoomError, SessionEndedError."""
        ticket = C.c_uint64()
        how = self._lib.expertd_shm_exchange(
            self._client, C.byref(request), timeout_ns, spin_ns, C.byref(answer), C.byref(ticket)
        )
        if how == _ANSWERED:
            return 0
        if how == _TIMED_OUT:
            return ticket.value
        if how == _CROWDED:
            raise self._no_room(how)
        raise SessionEndedError

    def _no_room(self, how: int) -> Exception:
        if self.over:
            return NoRoomError("the session is over")
        if how == _CROWDED:
            return NoRoomError(f"{self.region.entries} requests are in flight, as many as a session holds")
        return NoRoomError("the session's memory is in use, by requests and by answers that were not released")

    def wait(self, ticket: int, answer: Completion, timeout_ns: int = -1, spin_ns: int = SPIN_NS) -> bool:
        """Fills `answer`, its text only where it is refused.  False: the time was over first (negative:
        never).  Raises SessionEndedError."""
        how = self._lib.expertd_shm_wait(self._client, ticket, timeout_ns, spin_ns, C.byref(answer))
        if how == _ANSWERED:
            return True
        if how == _TIMED_OUT:
            return False
        raise SessionEndedError

    def announce(self, ticket: int) -> bool:
        """Nobody waits for it any more: watch() or drain() names it.  True: its answer is there already, and they do
        not."""
        return bool(self._lib.expertd_shm_announce(self._client, ticket))

    def drain(self) -> Sequence[int]:
        """Announced tickets whose answers have come since, for an event loop that watches region.client_bell.  An empty
        answer means that the bell will ring with the next one."""
        n = self._lib.expertd_shm_drain(self._client, self._ids, len(self._ids))
        return self._ids[:n]

    def watch(self, other: int, timeout_ns: int, spin_ns: int = SPIN_NS) -> Sequence[int]:
        """Waits, for one thread: announced tickets whose answers have come.  Empty: the time was over, `other` is
        readable (a socket that says when the other side is gone), or the session is over."""
        n = self._lib.expertd_shm_watch(self._client, other, self._ids, len(self._ids), timeout_ns, spin_ns)
        return self._ids[:n]

    def answer(self, ticket: int, answer: Completion) -> None:
        """Fills `answer` with that of a ticket that watch() or drain() named."""
        self._lib.expertd_shm_answer(self._client, ticket, C.byref(answer))

    def output(self, ticket: int, request: Submission) -> int:
        """Address of the output of a request that was answered, until its ticket is released."""
        del ticket
        return int(self.region.arena + request.out)

    def release(self, ticket: int) -> None:
        """After its answer was used: ticket and block are free."""
        self._lib.expertd_shm_release(self._client, ticket)

    def abandon(self, ticket: int) -> None:
        """Nobody wants the answer any more: the server is told; ticket and block are free once it has answered."""
        self._lib.expertd_shm_abandon(self._client, ticket)

    def wake(self) -> None:
        """A call from a device comes soon (see layout.DeviceCalls), which cannot ring."""
        self._lib.expertd_shm_wake(self._client)

    def end(self) -> None:
        """Everybody who waits gets SessionEndedError, and submit sends nothing more."""
        self._lib.expertd_shm_end(self._client)

    @property
    def over(self) -> bool:
        """Whether either side has ended the session."""
        return bool(self._lib.expertd_shm_over(self._client))

    @property
    def blocks(self) -> int:
        """Blocks of the arena that are taken."""
        return int(self._lib.expertd_shm_blocks(self._client))

    def close(self) -> None:
        """After end(), when no thread waits any more."""
        client, self._client = self._client, None
        if client:
            self._lib.expertd_shm_free(client)
            self.region.close()
