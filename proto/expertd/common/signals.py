"""How a program's main thread waits until it is to end."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["MainWait", "ended_by_signals"]


class MainWait:
    """What a main thread waits for: ring() by any thread, and every signal that has a handler in Python.

    Not an Event or a Queue: CPython runs a handler between two steps of the main thread, and a signal that comes after
    the last step before the thread sleeps wakes nobody.  With other threads at work, one of ten was lost so.  A byte in
    a pipe (signal.set_wakeup_fd) is not.

    Made and closed on the main thread: ValueError elsewhere.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        try:
            self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        except ValueError:
            self._close()
            raise

    def ring(self, *_: object) -> None:
        """wait() returns once more.  Takes and ignores what a callback is given; does nothing after close()."""
        with self._lock:
            if self._write >= 0:
                os.write(self._write, b"\0")

    def wait(self) -> None:
        """Until one ring() or signal that no wait() has taken."""
        os.read(self._read, 1)

    @property
    def rung(self) -> bool:
        """Whether wait() would return at once."""
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Signals wake what they woke before."""
        signal.set_wakeup_fd(self._before)
        self._close()

    def _close(self) -> None:
        with self._lock:
            os.close(self._read)
            os.close(self._write)
            self._read = self._write = -1


_FIRST_PROCESS = 1
"""The kernel ignores for it what has no handler, all but SIGKILL from outside."""


def _end(number: int, _: object) -> None:
    os._exit(128 + number)


@contextmanager
def ended_by_signals() -> Iterator[MainWait]:
    """The first SIGTERM or SIGINT makes wait() return; the second ends the process at once, as if it had no handler.

    A container's first process ends with 128 + the signal's number then, between two steps of Python: signals that have
    no handler do not reach it.  Raises ValueError where it is not the main thread.
    """
    numbers = (signal.SIGTERM, signal.SIGINT)

    second = _end if os.getpid() == _FIRST_PROCESS else signal.SIG_DFL

    def first(*_: object) -> None:
        for number in numbers:
            signal.signal(number, second)

    waiting = MainWait()
    before = [signal.signal(number, first) for number in numbers]
    try:
        yield waiting
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        waiting.close()
