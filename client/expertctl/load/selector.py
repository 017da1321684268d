"""The selector of loops that send at given times."""

from __future__ import annotations

import asyncio
import math
import select
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["ExactSelector", "run_precisely"]

_T = TypeVar("_T")

_MOST_OF_SELECT = 1024
"""FD_SETSIZE: descriptors from here on are beyond select()."""


class ExactSelector(selectors.SelectSelector):
    """select(), which takes waits of microseconds: epoll's are of whole milliseconds."""

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


def run_precisely(work: Coroutine[Any, Any, _T], selector: ExactSelector | None = None) -> _T:
    """asyncio.run() with timers of microseconds: the usual selector rounds every wait up to a millisecond, by which a
    request of the open loop would leave late."""
    loop = asyncio.SelectorEventLoop(selector or ExactSelector())
    try:
        return loop.run_until_complete(work)
    finally:
        try:
            if left := asyncio.all_tasks(loop):  # a session that is still being agreed on
                for task in left:
                    task.cancel()
                loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
        finally:
            loop.close()
