"""What a load generator is to send, and when."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice

__all__ = ["LoadPlan", "departures"]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What to send, and when to stop; `requests` and `duration_s` bound the run together, and one must be given.

    tokens        M of each request; 0 where they differ
    concurrency   closed loop: callers
    rate          open loop: requests a second; None = closed loop
    rate_to       open loop: the rate grows or falls evenly from `rate` to this one over duration_s; None = it stays
    poisson       open loop: exponential gaps instead of equal ones
    schedule      open loop: seconds after the start at which requests leave, ascending, instead of a rate
    requests      most requests to send
    duration_s    length of the schedule; of a late generator no request leaves more than a second after it
    warmup        requests sent before, one after the other, and not counted
    seed          of the Poisson process
    """

    tokens: int
    concurrency: int = 1
    rate: float | None = None
    rate_to: float | None = None
    poisson: bool = True
    schedule: Sequence[float] | None = field(default=None, repr=False)
    requests: int | None = None
    duration_s: float | None = None
    warmup: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (
            ("rate", self.rate),
            ("rate_to", self.rate_to),
            ("requests", self.requests),
            ("duration_s", self.duration_s),
        ):
            if value is not None and not value > 0:
                raise ValueError(f"{name}: got {value}, want > 0")
        if self.schedule is not None and self.rate is not None:
            raise ValueError("schedule: got a rate with it, want one of them")
        if self.requests is None and self.duration_s is None and self.schedule is None:
            raise ValueError("load: got no bound, want requests, duration_s or both")
        if self.rate_to is not None and (self.rate is None or self.duration_s is None):
            raise ValueError("rate_to: got no rate or no duration_s with it, want both: a ramp has two ends")
        if self.concurrency < 1 or self.tokens < 0 or self.warmup < 0:
            got = f"concurrency {self.concurrency}, tokens {self.tokens}, warmup {self.warmup}"
            raise ValueError(f"load: got {got}, want concurrency >= 1 and the others >= 0")

    @property
    def open(self) -> bool:
        """Whether requests leave on time, answered or not."""
        return self.rate is not None or self.schedule is not None


def departures(plan: LoadPlan) -> Iterator[float]:
    """Open loop: seconds after the start at which each request is meant to leave, as many as the plan allows."""
    if plan.schedule is not None:
        yield from islice(plan.schedule, plan.requests)
        return
    rng = random.Random(plan.seed)
    due = 0.0
    for n in count():
        if plan.requests is not None and n >= plan.requests:
            return
        at_s = _time_of(due, plan)
        if plan.duration_s is not None and at_s >= plan.duration_s:
            return
        yield at_s
        due = due + rng.expovariate(1.0) if plan.poisson else n + 1.0


def _time_of(due: float, plan: LoadPlan) -> float:
    """When so many requests are due; infinite where a falling rate never gets there."""
    assert plan.rate is not None
    if plan.rate_to is None or plan.rate_to == plan.rate or plan.duration_s is None:
        return due / plan.rate
    grows = (plan.rate_to - plan.rate) / plan.duration_s  # due = rate t + grows t^2 / 2
    under_root = plan.rate * plan.rate + 2 * grows * due
    return (math.sqrt(under_root) - plan.rate) / grows if under_root >= 0 else math.inf
