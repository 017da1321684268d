"""How long a message was on its way, where its caller says when it left on a clock of his own.

Nobody knows how far two clocks are apart, but it stays the same: what a message took longer than the quickest of the
last seconds, it has waited somewhere, in this process's buffers or before.
"""

from __future__ import annotations

__all__ = ["WINDOW_NS", "Age"]

WINDOW_NS = 10_000_000_000
"""The quickest message of this window and the one before it counts: clocks drift, and one may be set anew."""


class Age:
    """Of the messages of one connection."""

    def __init__(self) -> None:
        self._least: int | None = None
        self._least_before: int | None = None
        self._since_ns = 0

    def of(self, sent_us: int, now_ns: int) -> int:
        """Nanoseconds that a message has waited on its way, at least; 0 = its caller does not say when it left."""
        if not sent_us:
            return 0
        behind = now_ns - 1000 * sent_us
        if self._least is None or now_ns - self._since_ns >= WINDOW_NS:
            self._least_before = self._least if now_ns - self._since_ns < 2 * WINDOW_NS else None
            self._least, self._since_ns = behind, now_ns
        self._least = min(self._least, behind)
        least = self._least if self._least_before is None else min(self._least, self._least_before)
        return behind - least
