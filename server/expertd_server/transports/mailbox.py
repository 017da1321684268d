"""From other threads to an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable

__all__ = ["Mailbox"]


class Mailbox:
    """Has its loop call things; one wake-up for as many as come together.  Made on the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._thread = loop, threading.get_ident()
        self._items: deque[Callable[[], None]] = deque()
        self._armed = False

    def post(self, call: Callable[[], None]) -> None:
        """Have the loop call it: at once where this is its thread, else soon.  Forgotten when the loop is closed."""
        if threading.get_ident() == self._thread:
            call()
            return
        self._items.append(call)
        if not self._armed:
            self._armed = True
            try:
                self._loop.call_soon_threadsafe(self._empty)
            except RuntimeError:
                if not self._loop.is_closed():
                    raise

    def _empty(self) -> None:
        self._armed = False  # before the items: whoever appends after this wakes the loop again
        while self._items:
            self._items.popleft()()
