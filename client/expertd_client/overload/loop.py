"""An event loop that knows how late it may be itself.

What a handler sees may have come while earlier handlers ran.  `since_s` is the earliest time at which it can have come:
an answer that is late by the clock, but not by `since_s`, is late because of this process.
"""

from __future__ import annotations

import asyncio
import math
import select
import selectors
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["LoopClock", "run_watched"]

_T = TypeVar("_T")
_MOST_OF_SELECT = 1024
"""FD_SETSIZE: descriptors from here on are beyond select()."""
_WAITED_S = 20e-6
"""A look for events that took longer has waited for them: nothing was there before."""


class LoopClock(selectors.SelectSelector):
    """select(), which takes waits of microseconds.

    gRPC's events take two turns of the loop: one that hears of them, and one in which whoever waits goes on.
    """

    def __init__(self) -> None:
        super().__init__()
        self._heard_s = self._before_s = time.monotonic()

    @property
    def since_s(self) -> float:
        """time.monotonic() before which nothing of what is handled now can have come."""
        return self._before_s

    def _select(self, readers: Any, writers: Any, others: Any, timeout: float | None) -> Any:
        """select(), whose timeout is exact; poll(), of whole milliseconds, where descriptors are too large for it."""
        if max((*readers, *writers), default=0) < _MOST_OF_SELECT:
            return select.select(readers, writers, others, timeout)
        poll = select.poll()
        for fd in {*readers, *writers}:
            poll.register(fd, (select.POLLIN if fd in readers else 0) | (select.POLLOUT if fd in writers else 0))
        found = poll.poll(None if timeout is None else math.ceil(timeout * 1e3))
        ended = select.POLLERR | select.POLLHUP | select.POLLNVAL
        return (
            [fd for fd, what in found if what & (select.POLLIN | ended) and fd in readers],
            [fd for fd, what in found if what & (select.POLLOUT | ended) and fd in writers],
            [],
        )

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        asked_s = time.monotonic()
        found = super().select(timeout)
        now_s = time.monotonic()
        # What the turn before began to hear of is handled now; where this one waited, nothing was left of that.
        waited = timeout != 0 and now_s - asked_s > _WAITED_S
        self._before_s = now_s if waited else self._heard_s
        self._heard_s = now_s
        return found


def run_watched(work: Coroutine[Any, Any, _T], clock: LoopClock) -> _T:
    """asyncio.run() on a loop that looks at `clock`."""
    loop = asyncio.SelectorEventLoop(clock)
    try:
        return loop.run_until_complete(work)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
