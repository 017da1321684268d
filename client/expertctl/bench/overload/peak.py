"""The saturation point: the largest rate of an open loop that a server answers in time."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

__all__ = ["IN_TIME", "STEP", "Peak", "Trial", "largest"]

IN_TIME = 0.98
"""Share of a trial's requests that are to be answered by their deadline."""
STEP = 1.06
"""The search ends between rates that differ by less than this."""
_GROWS, _MOST = 1.5, 24


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
    halved in on, in steps of 6 % at last.  A rate that is not kept is tried twice, and once more before it bounds what
    was found: whatever disturbed those trials may be over.  If it is kept then, higher ones that failed are tried once
    more, too, and the search goes on from there.  Raises ValueError where no rate is kept."""
    low, rate = 0.0, first
    failed: list[Trial] = []  # above `low`, the lowest last
    for _ in range(_MOST):
        trial = await measure(rate)
        if not trial.kept:  # twice, before it counts: a neighbour's burst is no bound
            trial = await measure(rate)
        if trial.kept:
            low = rate
        else:
            failed.append(trial)
        refuted = False
        while low and failed and (refuted or failed[-1].rate < STEP * low):
            bound = await measure(failed[-1].rate)
            if bound.kept:
                low, refuted = failed.pop().rate, True
            elif bound.rate < STEP * low:
                return Peak(low, bound.behind)
            else:
                break
        high = failed[-1].rate if failed else math.inf
        rate = low * _GROWS if high == math.inf else math.sqrt(low * high) if low else rate / _GROWS
    if not low:
        raise ValueError(
            f"peak: got no rate from {first:,.0f} down to {rate:,.0f}/s that is answered in time, want one"
        )
    return Peak(low, bool(failed) and failed[-1].behind)
