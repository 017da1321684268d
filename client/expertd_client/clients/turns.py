"""At most so many requests of a client under way: semaphores that cost next to nothing while nobody waits for a turn.

Turns        between threads
LoopTurns    between tasks of an event loop
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque

__all__ = ["LoopTurns", "Turns"]


class Turns:
    """From any thread."""

    def __init__(self, number: int) -> None:
        self._free: deque[None] = deque([None] * number)  # a turn is an element: taking and giving one is atomic
        self._waiting = 0
        self._given = threading.Condition()

    def acquire(self, timeout_s: float | None = None) -> bool:
        """Whether there was one within that time; None = however long it takes."""
        try:
            self._free.pop()
        except IndexError:
            return self._wait(timeout_s)
        return True

    def release(self) -> None:
        """One back."""
        self._free.append(None)
        if self._waiting:  # who waits has counted himself before his last look
            with self._given:
                self._given.notify()

    def _wait(self, timeout_s: float | None) -> bool:
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._given:
            self._waiting += 1
            try:
                while True:
                    try:
                        self._free.pop()
                        return True
                    except IndexError:
                        left_s = None if end_s is None else end_s - time.monotonic()
                    if left_s is not None and left_s <= 0:
                        return False
                    self._given.wait(left_s)
            finally:
                self._waiting -= 1


class LoopTurns:
    """Within one event loop, in the order of coming.

    free    turns to be had at once: whoever finds some takes one off
    """

    __slots__ = ("_waiting", "free")

    def __init__(self, number: int) -> None:
        self.free = number
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Returns when this caller has one."""
        mine = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if not mine.cancelled():  # it was given one at the same time
                self.release()
            raise

    def release(self) -> None:
        """One back."""
        while self._waiting:
            first = self._waiting.popleft()
            if not first.done():
                first.set_result(None)
                return
        self.free += 1
