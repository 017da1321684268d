"""What callers noticed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["Outcome", "SimulationTally"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """goodput: calls a second that were answered in time; extra: parts that were computed for nothing, as a share of
    those that counted; seconds: of the run's own time."""

    calls: int
    failed: int
    goodput: float
    p50_ms: float
    p99_ms: float
    extra: float
    seconds: float


@dataclass(slots=True)
class SimulationTally:
    """begun_s, ended_s: [calls]; NaN until it ended; failed calls end, too.  progress: called with how many have ended,
    each time; None = nobody wants to know."""

    begun_s: NDArray[np.float64]
    ended_s: NDArray[np.float64]
    failed: NDArray[np.bool_]
    why: Counter[str] = field(default_factory=Counter)
    progress: Callable[[int], object] | None = None
    _answered: int = 0

    @classmethod
    def of(cls, calls: int, progress: Callable[[int], object] | None = None) -> SimulationTally:
        return cls(np.full(calls, np.nan), np.full(calls, np.nan), np.zeros(calls, bool), progress=progress)

    def ended(self, number: int, now_s: float, error: BaseException | None) -> None:
        self.ended_s[number] = now_s
        if error is not None:
            self.failed[number] = True
            self.why[type(error).__name__] += 1
        self._answered += 1
        if self.progress is not None:
            self.progress(self._answered)

    def outcome(self, parts: int, computed: int, seconds: float) -> Outcome:
        """parts: that counted; computed: all of them."""
        good = ~self.failed
        took_s = np.sort((self.ended_s - self.begun_s)[good])
        p50_s, p99_s = (float(took_s[int(q * len(took_s))]) if len(took_s) else 0.0 for q in (0.5, 0.99))
        span_s = float(np.nanmax(self.ended_s) - self.begun_s[0])
        extra = max(0.0, computed / max(1, parts) - 1.0)
        goodput = round(int(good.sum()) / span_s, 1)
        failed = int(self.failed.sum())
        return Outcome(
            len(good), failed, goodput, round(1e3 * p50_s, 3), round(1e3 * p99_s, 3), round(extra, 4), seconds
        )
