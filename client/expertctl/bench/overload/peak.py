"""The saturation point: the largest rate of an open loop that a server answers in time."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

__all__ = ["IN_TIME", "Peak", "Trial", "largest"]

IN_TIME = 0.98
"""Share of a trial's requests that are to be answered by their deadline."""
_CLOSE, _GROWS, _MOST = 1.06, 1.5, 16


@dataclass(frozen=True, slots=True)
class Trial:
    """rate: requests a second; in_time: share of them answered by their deadline; behind: the generator sent them too
    late for the trial to say something of the server."""

    rate: float
    in_time: float
    behind: bool = False

    @property
    def kept(self) -> bool:
        return not self.behind and self.in_time >= IN_TIME


@dataclass(frozen=True, slots=True)
class Peak:
    """per_s: 0 = no rate was answered in time; limited: the generator could not offer more."""

    per_s: float
    limited: bool


async def largest(measure: Callable[[float], Awaitable[Trial]], first: float) -> Peak:
    """Rates grow from `first` by a half until one is not answered in time, or fall until one is; then the largest is
    halved in on, to 6 %.  A rate that is not kept is tried twice.  Raises ValueError where no rate is."""
    low, high, limited, rate = 0.0, math.inf, False, first
    for _ in range(_MOST):
        trial = await measure(rate)
        if not trial.kept:  # twice, before it counts: a neighbour's burst is no bound
            trial = await measure(rate)
        if trial.kept:
            low = rate
        else:
            high = rate
            limited = trial.behind
        if low and high / low < _CLOSE:
            return Peak(low, limited)
        rate = rate * _GROWS if high == math.inf else math.sqrt(low * high) if low else rate / _GROWS
    if not low:
        raise ValueError(
            f"peak: got no rate from {first:,.0f} down to {rate:,.0f}/s that is answered in time, want one"
        )
    return Peak(low, limited)
