"""One event loop for all gRPC servers of a process, on a thread of its own, as long as one of them wants it.

grpc.aio has one poller a process: with a second event loop every event wakes both, and on two cores an echo over two
servers fell from 3,200 to 2,200 messages a second.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

# Why it is so: decision 86 in DECISIONS.md.
__all__ = ["LoopThread", "OnLoop"]

_T = TypeVar("_T")


class OnLoop:
    """Has the running event loop call functions, from any thread.  Made on the loop's thread."""

    def __init__(self) -> None:
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()

    def __call__(self, function: Callable[[], object]) -> None:
        """At once where this is the loop's thread, else soon; never, once the loop is closed."""
        if threading.get_ident() == self._thread:
            function()
            return
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            if not self._loop.is_closed():
                raise


class LoopThread:
    """run() is called from any thread but the loop's own.  Every acquire() needs its release()."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """The loop runs from now on."""
        with self._lock:
            self._users += 1
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._run, args=(self._loop,), name="expertd-grpc", daemon=True)
                self._thread.start()

    def release(self) -> None:
        """The last one that wanted it ends it."""
        with self._lock:
            self._users -= 1
            if self._users or self._loop is None or self._thread is None:
                return
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop = self._thread = None

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """The result of `work`, done on the loop."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            loop.close()
