"""A coroutine that begins at once: its first step is taken before begin() returns, where a task's is taken in the next
turn of the event loop.  For a message that is to be on its way while the caller still computes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

__all__ = ["begin"]


def begin(work: Coroutine[Any, Any, None]) -> None:
    """In the running loop.  What `work` raises after its first wait goes to the loop's exception handler; before, to
    the caller.  It belongs to nobody: it is not cancelled, and asyncio.current_task() in it is no task of its own."""
    _Begun(work, asyncio.get_running_loop()).step()


class _Begun:
    """What a task does with a coroutine, without the turn before the first step."""

    __slots__ = ("_loop", "_work")

    def __init__(self, work: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop) -> None:
        self._work, self._loop = work, loop

    def step(self, _: object = None) -> None:
        try:
            waits_for = self._work.send(None)  # a future raises its own exception inside, when it is asked again
        except StopIteration:
            return
        if waits_for is None:  # asyncio.sleep(0)
            self._loop.call_soon(self.step)
        else:
            waits_for._asyncio_future_blocking = False  # what a future's __await__ wants to be told: it was waited for
            waits_for.add_done_callback(self.step)
