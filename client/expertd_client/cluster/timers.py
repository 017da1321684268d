"""Functions that are to be called at a time, on one alarm: a thread's or an event loop's."""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable
from typing import Protocol

from expertd_client.requests.deadline import Alarm

__all__ = ["Timer", "Timers"]


class Timer(Protocol):
    """Calls functions at their times."""

    def at(self, when_s: float, call: Callable[[], None]) -> None:
        """Calls it at `when_s`, or a little later; infinite = never."""
        ...

    def close(self) -> None:
        """Calls nothing more."""


class Timers:
    """Thread-safe.  alarm: makes the alarm for the function that it is to call."""

    def __init__(self, alarm: Callable[[Callable[[], None]], Alarm]) -> None:
        self._alarm = alarm(self._ring)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def at(self, when_s: float, call: Callable[[], None]) -> None:
        """Calls it at `when_s` of time.monotonic(), or a little later."""
        if when_s == math.inf:
            return
        with self._lock:
            heapq.heappush(self._due, (when_s, next(self._numbers), call))
        self._alarm.set(when_s)

    def close(self) -> None:
        """Calls nothing more."""
        self._alarm.close()
        with self._lock:
            self._due.clear()

    def _ring(self) -> None:
        now_s = time.monotonic()
        calls = []
        with self._lock:
            while self._due and self._due[0][0] <= now_s:
                calls.append(heapq.heappop(self._due)[2])
            next_s = self._due[0][0] if self._due else math.inf
        for call in calls:
            call()
        if next_s < math.inf:
            self._alarm.set(next_s)
