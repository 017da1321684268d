"""A value that is made from files and made again when they change: certificates, tokens.

What was good last is kept while the files are broken (half written, a key that does not fit its certificate); that is
said once in the log and counted.  Files that a link is swapped under, as Kubernetes does it, are other files.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from expertd.common.files import read_file

__all__ = ["MOST_BYTES", "FileError", "Reloading"]

log = logging.getLogger(__name__)

_T = TypeVar("_T")
MOST_BYTES = 8 << 20
"""Of each file: all authorities of a system have 0.2 MiB, 10,000 callers 2."""
_State = tuple[tuple[int, int, int], ...]


class FileError(Exception):
    """A file cannot be used.  The text says which, what was got and what is wanted, and nothing of its contents."""


class Reloading(Generic[_T]):
    """what: for the log and the metric.  load: makes the value from the bytes of `paths`, raises FileError.  told:
    called with whether it worked, each time the files changed.  From any thread.

    Raises FileError where they are not good to begin with.
    """

    def __init__(
        self,
        what: str,
        paths: Sequence[Path],
        load: Callable[[Sequence[bytes]], _T],
        told: Callable[[str, bool], None] = lambda what, good: None,
        every_s: float = 1.0,
    ) -> None:
        self._what, self._paths, self._load, self._told, self._every_s = what, paths, load, told, every_s
        self._lock = threading.Lock()
        self._state = self._look()
        self.value = self._made()
        self.generation = 1
        self._next_s = time.monotonic() + every_s

    def current(self) -> _T:
        """The value, of the files as they were at most every_s ago."""
        if time.monotonic() >= self._next_s:
            self.refresh()
        return self.value

    def refresh(self) -> bool:
        """Look now.  Whether there is a new value."""
        with self._lock:
            self._next_s = time.monotonic() + self._every_s
            try:
                state = self._look()
                if state == self._state:
                    if self._broken:  # the files from before are back
                        self._broken = ""
                        self._told(self._what, True)
                    return False
                value = self._made()
                if self._look() != state:
                    return False  # they change while they are read: next time
            except FileError as e:
                if self._broken != str(e):
                    self._broken = str(e)
                    log.error("%s: %s; keeping the last valid version", self._what, e)
                    self._told(self._what, False)
                return False
            self.value, self._state, self._broken = value, state, ""
            self.generation += 1
            log.info("%s: reloaded", self._what)
            self._told(self._what, True)
            return True

    _broken = ""

    def _look(self) -> _State:
        out = []
        for path in self._paths:
            try:
                s = os.stat(path)
            except OSError as e:
                raise FileError(f"{path}: {e.strerror}") from None
            out.append((s.st_mtime_ns, s.st_size, s.st_ino))
        return tuple(out)

    def _made(self) -> _T:
        data = self._read()
        try:
            return self._load(data)
        except FileError:
            raise
        except Exception as e:  # of a parser, for bytes that nobody wrote: a caller must not get it
            names = ", ".join(map(str, self._paths))
            raise FileError(f"{names}: cannot be used: {type(e).__name__}") from None

    def _read(self) -> list[bytes]:
        try:
            return [read_file(path, MOST_BYTES) for path in self._paths]
        except OSError as e:
            raise FileError(f"{e.filename}: {e.strerror}") from None
