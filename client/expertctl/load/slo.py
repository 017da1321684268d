"""The largest rate that keeps an SLO: "p99<20ms".

A trial sends at one rate in an open loop and counts the requests that took longer than the bound or failed.  The search
begins at the rate of a closed loop and doubles it while it passes, or halves it until one passes.  Rates are
halved towards each other on a logarithmic scale; then the largest rate that passed is tried again, several times, and
the SLO counts as kept where the upper end of the 95 % interval (Wilson's, one-sided) of the share of late ones lies
below what it allows.  Where it does not, the rate goes down by a step and is tried again, at last to the rates that
passed once.  The interval takes requests as independent; how much the repeats differ is told beside it."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Found", "Slo", "Trial", "parse_slo", "search", "upper_share"]

_Z = 1.6449
"""Of a one-sided 95 %."""
_CLOSE = 1.03
"""Rates that differ by less than this are the same."""
_STEP = 0.95
_MOST_STEPS = 8
_LOWEST = 16
"""Below this share of the peak no rate is tried: requests hardly wait for each other there, so a lower rate would not
be answered sooner, and its trial would take minutes."""
_HIGHEST = 16
"""Beyond so many times the peak no rate is tried."""
_LEAST_LATE = 5
"""A trial is to expect so many late requests where it just keeps the SLO."""


@dataclass(frozen=True, slots=True)
class Slo:
    """quantile of the latencies is below bound_s; text: as it was asked for"""

    quantile: float
    bound_s: float
    text: str

    @property
    def allowed(self) -> float:
        """Share of requests that may be late."""
        return 1.0 - self.quantile

    def requests(self, rate: float, seconds: float) -> int:
        """Of a trial: as many as fit into the time, or as many as say something."""
        return max(math.ceil(rate * seconds), math.ceil(_LEAST_LATE / self.allowed))


@dataclass(frozen=True, slots=True)
class Trial:
    """sent at rate requests a second; late: took longer than the bound, or failed.  behind: why the generator itself
    sent too late for the answer to mean something, "rate" = less than it was to send, "lateness" = its delay alone
    would break the SLO, "" = it did not."""

    rate: float
    sent: int
    late: int
    quantile_s: float
    behind: Literal["", "rate", "lateness"] = ""

    def keeps(self, slo: Slo) -> bool:
        return not self.behind and self.late <= slo.allowed * self.sent


@dataclass(frozen=True, slots=True)
class Found:
    """rate: None where no trial met the SLO; share, at_most: of late requests in `repeats`, and the upper end of the
    interval, None where there are none; repeats: at `rate`; trials: all, in order; limited: by the generator or the
    highest rate, not by the server; confirmed: the repetitions met the SLO, too, else `repeats` is the one trial that
    did, if there is one"""

    slo: Slo
    rate: float | None
    share: float | None = None
    at_most: float | None = None
    repeats: list[Trial] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    limited: bool = False
    confirmed: bool = False

    def sentence(self) -> str:
        if self.rate is None or self.share is None or self.at_most is None:
            last = self.trials[-1]
            if last.behind:
                return (
                    f"no answer to {self.slo.text}: the load generator sent too late even at"
                    f" {last.rate:,.1f} requests/s; give it a CPU core of its own, or allow a longer latency"
                )
            return f"no rate meets {self.slo.text}: it was not met at {last.rate:,.1f} requests/s"
        late = f"{self.share:.2%} of {sum(t.sent for t in self.repeats):,} requests were late"
        if not self.confirmed:
            return (
                f"{self.slo.text} was met at {self.rate:,.1f} requests/s in one trial, and no rate met it in all"
                f" repetitions: {late}; the machine is not steady, repeat the search with a longer --duration"
            )
        spread = [t.quantile_s * 1e3 for t in self.repeats]
        limit = "the load generator is the limit" if any(t.behind for t in self.trials) else "no more was tried"
        text = (
            f"{self.slo.text} is met {'at' if self.limited else 'up to'} {self.rate:,.1f} requests/s"
            f"{f' at least, and {limit}' if self.limited else ''}: {late},"
            f" {self.slo.allowed:.2%} are allowed; {len(spread)} repetitions: {min(spread):.3g} to"
            f" {max(spread):.3g} ms"
        )
        return (
            f"{text}; sampling error: at most {self.at_most:.2%} late with 95 % confidence, if requests are"
            " independent; other runs may differ by more"
        )


def parse_slo(text: str) -> Slo:
    """ "p99<20ms", "p99.9<500us", as argparse's type."""
    m = re.fullmatch(r"p(\d{1,2}(?:\.\d+)?)\s*<\s*(\d+(?:\.\d*)?)\s*(us|ms|s)", text)
    if m is None or not 0 < float(m[1]) < 100 or not float(m[2]) > 0:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, want an objective, for example p99<20ms, p99.9<500us or p50<1s"
        )
    bound_s = float(m[2]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[m[3]]
    return Slo(round(float(m[1]) / 100, 10), bound_s, f"p{m[1]} < {m[2]} {m[3]}")


def upper_share(late: int, sent: int) -> float:
    """The upper end of the one-sided 95 % interval of a share, after Wilson."""
    if not sent:
        return 1.0
    p, z2 = late / sent, _Z * _Z
    middle, width = p + z2 / (2 * sent), _Z * math.sqrt(p * (1 - p) / sent + z2 / (4 * sent * sent))
    return min(1.0, (middle + width) / (1 + z2 / sent))


def _may_keep(slo: Slo, trials: list[Trial], repeats: int) -> bool:
    """Whether `repeats` trials may keep the SLO together, after these."""
    late, most = sum(t.late for t in trials), slo.allowed * repeats * max((t.sent for t in trials), default=0)
    return late <= most and not any(t.behind for t in trials)


async def search(slo: Slo, peak: float, measure: Callable[[float], Awaitable[Trial]], repeats: int = 3) -> Found:
    """peak: where the search begins, what the server answered in a closed loop.  measure: a trial at a rate."""
    trials: list[Trial] = []

    async def keeps(rate: float) -> bool:
        trials.append(await measure(rate))
        return trials[-1].keeps(slo)

    low, high = await _bracket(peak, keeps)
    while low and _CLOSE < high / low < math.inf:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if await keeps(middle) else (low, middle)
    for rate in _candidates(low, [t.rate for t in trials if t.keeps(slo)]):
        again: list[Trial] = []
        while len(again) < repeats and _may_keep(slo, again, repeats):
            again.append(await measure(rate))
        trials += again
        late, sent = sum(t.late for t in again), sum(t.sent for t in again)
        if len(again) == repeats and upper_share(late, sent) <= slo.allowed and not again[-1].behind:
            limited = high == math.inf or any(t.behind for t in trials if t.rate <= rate * 1.1)
            return Found(slo, rate, late / sent, upper_share(late, sent), again, trials, limited, confirmed=True)
    if passed := [t for t in trials if t.keeps(slo)]:
        best = min(passed, key=lambda t: t.rate)
        share = best.late / best.sent
        return Found(slo, best.rate, share, upper_share(best.late, best.sent), [best], trials)
    return Found(slo, None, trials=trials, limited=bool(trials[-1].behind))


async def _bracket(peak: float, keeps: Callable[[float], Awaitable[bool]]) -> tuple[float, float]:
    """A rate that keeps the SLO, 0 = none, and one that does not, infinite = none: from the peak, upwards or downwards
    by factors of two."""
    low, high, rate = 0.0, math.inf, peak
    if await keeps(peak):
        low = peak
        while high == math.inf and low < peak * _HIGHEST:
            rate = low * 2
            if await keeps(rate):
                low = rate
            else:
                high = rate
        return low, high
    high = peak
    while not low and rate > peak / _LOWEST:
        rate /= 2
        if await keeps(rate):
            low = rate
        else:
            high = rate
    return low, high


def _candidates(low: float, passed: Iterable[float]) -> list[float]:
    """Rates to repeat, falling: steps below `low`, then those below that passed once."""
    if not low:
        return []
    steps = [low * _STEP**n for n in range(_MOST_STEPS)]
    return steps + sorted({rate for rate in passed if rate < steps[-1]}, reverse=True)
