"""The memory of an entry that is served, and the eye on the file behind it.

A mapping shows the file as it is now, not as it was when it was checked: pages that nobody wrote to are the page
cache's, and that is what lets all servers of a host share one copy.  So whoever writes into the file in place (`cp`
over it, `rsync --inplace`, a restored disk) changes the weights of running servers, and whoever cuts it takes their
pages away.  A file that is renamed over, or removed, stays what it was for those who have it open.

    f = EntryFile(path)     opened once: what is mapped is the file that was asked for its size
    f.data                  its bytes, read and checked by file.py
    f.settle(damaged)       from now on they must stay as they are
    f.fault()               "" while they do; asked after each batch, before its answer goes out

An in-place write changes the file's times before its data, so a batch that read new data sees them.  The times also
change where the data does not (`touch`, a name less, another mode): then the checksums decide.
"""

from __future__ import annotations

import logging
import mmap
import os
import stat
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from expertd_kernels.native.guard import guard

__all__ = ["CacheError", "EntryFile"]

log = logging.getLogger(__name__)

SETTLE_S = 0.02
"""A write that comes this much later has another time of change, whatever the file system's clock (ticks of 10 ms)."""


class CacheError(Exception):
    """An entry that cannot be used; the text says which file and why."""


class _State(NamedTuple):
    """What fstat says of an open file; a write changes it, and nobody can set all of it back."""

    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, fd: int) -> _State:
        s = os.fstat(fd)
        return cls(s.st_size, s.st_mtime_ns, s.st_ctime_ns)


class EntryFile:
    """One entry, opened, its bytes in memory.

    data    the whole file in whole pages; nobody can change the file through it
    mapped  whether data is the file itself, mapped copy-on-write, so that processes share its pages
    """

    def __init__(self, path: Path, lasting: bool = True) -> None:
        """lasting: data will be served from, not just copied to a device: where a mapping cannot be guarded against the
        file's being cut (the native library is not there), data is a copy then.  Raises CacheError where the file is
        not there, not readable, no file, or empty."""
        self.path = path
        try:
            # Not blocking: a pipe in the file's place would wait for a writer.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as e:
            raise CacheError(f"{path}: cannot be opened: {e.strerror or e}") from e
        weakref.finalize(self, os.close, self._fd)
        self._state = _State.of(self._fd)
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            raise CacheError(f"{path}: is no file")
        if not self._state.size:
            raise CacheError(f"{path}: is empty")
        try:
            self.data = mmap.mmap(self._fd, self._state.size, access=mmap.ACCESS_COPY)
            self._lost = guard(self.data)
            self.mapped = self._lost is not None or not lasting
            if not self.mapped:
                self.data = _copied(self._fd, self._state.size)
        except (OSError, ValueError) as e:
            raise CacheError(f"{path}: cannot be mapped: {e}") from e
        self._damaged: Callable[[], str] = lambda: ""

    def settle(self, damaged: Callable[[], str]) -> None:
        """Everything was read and found good: from now on fault() tells of changes.  damaged(): reads everything again
        and says what is wrong with it.  Raises CacheError where the file changed while it was read."""
        if _State.of(self._fd) != self._state or (self._lost is not None and self._lost()):
            raise CacheError(f"{self.path}: changed while it was read")
        self._damaged = damaged

    def fault(self) -> str:
        """Why the data is no longer what was settled; "" while it is, and always for a copy."""
        if not self.mapped:
            return ""
        if self._lost is not None and self._lost():
            return f"{self.path}: was cut, or cannot be read any more, while it was mapped"
        now = _State.of(self._fd)
        return "" if now == self._state else self._judged(now)

    def _judged(self, now: _State) -> str:
        """What a change of the file's times or size means."""
        if now.size != self._state.size:
            return f"{self.path}: changed from {self._state.size} to {now.size} bytes while it was mapped"
        time.sleep(SETTLE_S)
        if _State.of(self._fd) != now:
            return f"{self.path}: is being written to while it is mapped"
        if damaged := self._damaged():
            return f"{self.path}: was overwritten while it was mapped: {damaged}"
        log.info("cache: %s: its times changed, its data did not", self.path)
        self._state = now
        return ""


def _copied(fd: int, size: int) -> mmap.mmap:
    """The first `size` bytes of a file in memory of this process alone; zeros where it has fewer."""
    own = mmap.mmap(-1, size)
    at = 0
    while at < size and (got := os.preadv(fd, [memoryview(own)[at:]], at)):
        at += got
    return own
