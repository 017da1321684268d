"""The client's side of a region: blocks of the arena, and requests whose tensors lie there."""

from __future__ import annotations

import ctypes as C

from expertd.shm.in_flight import SPIN_NS, RequestsInFlight
from expertd.shm.layout import Completion, Submission
from expertd.shm.library import library
from expertd.shm.region import Region, RegionError

__all__ = ["Client"]


class Client(RequestsInFlight):
    """Owns the region.  send() and call() copy the tensors into the arena."""

    full = "the session's memory is in use, by requests and by answers that were not released"

    def __init__(self, region: Region) -> None:
        """region: with its bell.  Raises RegionError, LibraryMissingError."""
        self.region = region
        lib = library()
        client = lib.client(region.address, region.bytes, region.entries, region.bell)
        if not client:
            raise RegionError("session: the shared memory is of another version")
        self._arena = region.arena
        super().__init__(lib, client, region.entries, self._arena)

    def take(self, nbytes: int) -> int | None:
        """A block of the arena: its offset, a multiple of 256; None: there is no room now."""
        offset = self._lib.take(self._client, nbytes)
        return None if offset < 0 else int(offset)

    def give(self, offset: int) -> None:
        """Gives a block back that no request owns."""
        self._lib.give(self._client, offset)

    def submit(self, request: Submission, block: int | None = None, announced: bool = False) -> int:
        """Sends a copy of `request`, whose tensors lie in the arena.  block: goes back there together with the
        ticket.  announced: as in send().  Returns the ticket; 0: as many requests are in flight as the rings hold, or
        the session is over."""
        offset = -1 if block is None else block
        return int(self._lib.submit(self._client, C.byref(request), offset, announced))

    def exchange(self, request: Submission, answer: Completion, timeout_ns: int, spin_ns: int = SPIN_NS) -> int:
        """Sends a request whose tensors lie in the arena, and waits.  0: `answer` is filled and its ticket given back;
        else the time was over first, and this is the ticket.  Raises NoRoomError, SessionEndedError."""
        ticket = C.c_uint64()
        how = self._lib.exchange(self._client, C.byref(request), timeout_ns, spin_ns, C.byref(answer), C.byref(ticket))
        return 0 if self._answered(how) else ticket.value

    def output(self, ticket: int, request: Submission) -> int:
        del ticket
        address: int = self._arena + request.out
        return address

    def recall(self, ticket: int) -> None:
        """Asks the server not to compute a request in flight.  Its answer comes all the same, and is wanted."""
        self._lib.recall(self._client, ticket)

    def wake(self) -> None:
        """A call from a device comes soon (see layout.DeviceCalls), which cannot ring."""
        self._lib.wake(self._client)

    def expect(self) -> None:
        """A request comes soon: the server wakes up meanwhile, and spins for it for a moment.  Where that lately took
        this thread's core from it nothing is done."""
        self._lib.expect(self._client)

    @property
    def blocks(self) -> int:
        """Blocks of the arena that are taken."""
        return int(self._lib.blocks(self._client))

    def _close(self) -> None:
        self.region.close()
