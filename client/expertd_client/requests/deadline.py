"""When a request's time is over, and the alarm that says so: one for all requests of a client, in a thread or in an
event loop."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from expertd.errors import DeadlineExceededError

__all__ = ["Alarm", "Deadline", "LoopAlarm", "ThreadAlarm", "deadline_in"]

_MAX_TIMEOUT_US = 2**64 - 1


class Deadline(NamedTuple):
    """The end of a request's time.

    timeout_s   as the caller gave it
    end_s       on time.monotonic()
    """

    timeout_s: float
    end_s: float

    def left_s(self) -> float:
        """Seconds left, >= 0."""
        return max(0.0, self.end_s - time.monotonic())

    def left_us(self) -> int:
        """What the wire carries: whole microseconds, >= 1, because 0 would mean no limit."""
        return min(_MAX_TIMEOUT_US, max(1, int((self.end_s - time.monotonic()) * 1e6)))

    def expired(self, layer: int, request_id: int) -> DeadlineExceededError:
        """The client's own end of a request that was sent."""
        return DeadlineExceededError.about(
            f"forward of layer {layer}",
            got=f"no answer within {self.timeout_s} s",
            want="one in time",
            remedy="give it more time, or ask a replica with less load",
            request_id=request_id,
        )

    def crowded(self, layer: int) -> DeadlineExceededError:
        """The end of one that could not be sent."""
        return DeadlineExceededError.about(
            f"forward of layer {layer}",
            got=f"max_in_flight requests under way for {self.timeout_s} s",
            want="one of them answered",
            remedy="raise max_in_flight, or send less",
        )


def deadline_in(timeout_s: float | None) -> Deadline | None:
    """The deadline that many seconds from now; None = none.  Raises ValueError for what is no time."""
    if timeout_s is None:
        return None
    if not 0 < timeout_s < math.inf:
        raise ValueError(f"timeout_s: got {timeout_s}, want finite seconds > 0, or None for no limit")
    return Deadline(timeout_s, time.monotonic() + timeout_s)


class Alarm(Protocol):
    """Calls the function that it was made with, once for each time that was set, never early."""

    def set(self, when_s: float) -> None:
        """Ring at `when_s` of time.monotonic(), unless it rings earlier anyway: whoever is rung sets the next time."""

    def close(self) -> None:
        """Rings no more."""


class LoopAlarm:
    """In the event loop that sets it."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._when_s = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def set(self, when_s: float) -> None:
        if when_s >= self._when_s:
            return
        self.close()
        self._when_s = when_s
        self._timer = asyncio.get_running_loop().call_later(when_s - time.monotonic(), self._run)

    def close(self) -> None:
        self._when_s = math.inf
        if self._timer is not None:
            self._timer.cancel()

    def _run(self) -> None:
        self._when_s = math.inf
        self._ring()


class ThreadAlarm:
    """In a thread of its own, which starts with the first time that is set."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._when_s = math.inf
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def set(self, when_s: float) -> None:
        if when_s >= self._when_s:
            return
        with self._changed:
            if self._closed or when_s >= self._when_s:
                return
            self._when_s = when_s
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="expertd-deadlines", daemon=True)
                self._thread.start()
            else:
                self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (left_s := self._when_s - time.monotonic()) > 0:
                    self._changed.wait(None if left_s == math.inf else min(left_s, threading.TIMEOUT_MAX))
                if self._closed:
                    return
                self._when_s = math.inf
            self._ring()
