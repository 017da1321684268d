"""Calls that failed in a benchmark: how many, and of the first ones why, when, and what had happened shortly before."""

from __future__ import annotations

import itertools
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath

from rich.console import Console

__all__ = ["Failure", "Failures"]

_EVENTS = 8
"""Of the timeline of a failure."""
_FRAMES = 6
"""Of the traceback, the innermost."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One call.

    why      what it raised, or what was wrong with its answer
    at_s     since this benchmark began; took_s: since the call began
    where    "file:line" of the traceback, innermost first; empty where nothing was raised
    before   (seconds before the failure, what happened), oldest first
    """

    why: str
    at_s: float
    took_s: float
    where: tuple[str, ...] = ()
    before: tuple[tuple[float, str], ...] = ()

    def text(self) -> str:
        """A line, and one for each event."""
        lines = [f"{self.at_s:.3f} s: {self.why} (the call took {self.took_s * 1e3:.1f} ms)"]
        lines += [f"    {seconds * 1e3:,.1f} ms before: {what}" for seconds, what in self.before]
        if self.where:
            lines.append(f"    raised at {' < '.join(self.where)}")
        return "\n".join(lines)


class Failures:
    """Thread-safe.  Its length is how many there were; iterating gives the texts of the first `most`.

    first    those; about: where it stood in each, to tell which part of a run it was of
    """

    def __init__(self, most: int = 20) -> None:
        self.first: list[Failure] = []
        self.about: list[str] = []
        self._most, self._lock = most, threading.Lock()
        self._begin_s = time.monotonic()
        self._events: deque[tuple[float, str]] = deque(maxlen=_EVENTS)

    def happened(self, what: str) -> None:
        """For the timeline of failures to come."""
        self._events.append((time.monotonic(), what))

    def failed(self, begin_s: float, why: str | BaseException, about: str = "") -> None:
        """A call failed now that began at begin_s, of time.monotonic()."""
        now_s = time.monotonic()
        with self._lock:
            self.about.append(about)
            if len(self.first) >= self._most:
                return
            before = tuple((now_s - at_s, what) for at_s, what in list(self._events))
            where: tuple[str, ...] = ()
            if isinstance(why, BaseException):
                frames = traceback.extract_tb(why.__traceback__)[-_FRAMES:]
                where = tuple(f"{PurePath(f.filename).name}:{f.lineno}" for f in reversed(frames))
                why = f"{type(why).__name__}: {why}"
            self.first.append(Failure(why, now_s - self._begin_s, now_s - begin_s, where, before))

    def show(self, out: Console) -> None:
        """The first ones."""
        for text in itertools.islice(self, 5):
            out.print(text, markup=False)

    def __len__(self) -> int:
        return len(self.about)

    def __iter__(self) -> Iterator[str]:
        return (failure.text() for failure in list(self.first))
