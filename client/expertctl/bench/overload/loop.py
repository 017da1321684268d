"""An event loop that knows how late it may be itself.

What a handler sees may have come while earlier handlers ran.  `since_s` is the earliest time at which it can have come:
an answer that is late by the clock, but not by `since_s`, is late because of this process.
"""

from __future__ import annotations

import selectors
import time

from expertctl.load.selector import ExactSelector

__all__ = ["LoopClock"]

_WAITED_S = 20e-6
"""A look for events that took longer has waited for them: nothing was there before."""


class LoopClock(ExactSelector):
    """gRPC's events take two turns of the loop: one that hears of them, and one in which whoever waits goes on."""

    def __init__(self) -> None:
        super().__init__()
        self._heard_s = self._before_s = time.monotonic()

    @property
    def since_s(self) -> float:
        """time.monotonic() before which nothing of what is handled now can have come."""
        return self._before_s

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        asked_s = time.monotonic()
        found = super().select(timeout)
        now_s = time.monotonic()
        # What the turn before began to hear of is handled now; where this one waited, nothing was left of that.
        waited = timeout != 0 and now_s - asked_s > _WAITED_S
        self._before_s = now_s if waited else self._heard_s
        self._heard_s = now_s
        return found
