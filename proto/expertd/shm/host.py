"""The server's side of a region, for who carries its requests to a server elsewhere (expertd.nixl)."""

from __future__ import annotations

import ctypes as C

from expertd.shm.layout import Completion, Submission
from expertd.shm.library import library
from expertd.shm.region import Region

__all__ = ["Host"]


class Host:
    """Lays out a region whose memory is zeroed, and owns it.  For one thread.  Raises LibraryMissingError."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self._lib = library()
        self._port = self._lib.host(region.address, region.bytes, region.entries, region.bell)

    def take(self, request: Submission) -> bool:
        """The next request, copied to `request`; False: there is none now."""
        return bool(self._lib.host_take(self._port, C.byref(request)))

    def answer(self, answer: Completion) -> None:
        """Of the request taken that has the same id: once, and of none that was not taken."""
        self._lib.host_answer(self._port, C.byref(answer))

    def sleeps(self, now: bool) -> None:
        """Whether the client shall ring region.bell for its next request.  After True: one look more."""
        self._lib.host_sleeps(self._port, now)

    def end(self) -> None:
        """The client learns that the session is over."""
        self._lib.host_end(self._port)

    def close(self) -> None:
        """Unmaps the region."""
        port, self._port = self._port, None
        if port:
            self._lib.host_free(port)
            self.region.close()
