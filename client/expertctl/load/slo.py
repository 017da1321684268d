"""The largest rate that keeps an SLO: "p99<20ms".

A trial sends at one rate in an open loop and counts the requests that took longer than the bound or failed.  Rates are
halved towards each other on a logarithmic scale; then the largest rate that passed is tried again, several times, and
the SLO counts as kept where the upper end of the 95 % interval (Wilson's, one-sided) of the share of late ones lies
below what it allows.  Where it does not, the rate goes down by a step and is tried again.  The interval takes requests
as independent; how much the repeats differ is told beside it."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

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
    """sent at rate requests a second; late: took longer than the bound, or failed.  behind: the generator itself sent
    too late for the answer to mean something."""

    rate: float
    sent: int
    late: int
    quantile_s: float
    behind: bool = False

    def keeps(self, slo: Slo) -> bool:
        return not self.behind and self.late <= slo.allowed * self.sent


@dataclass(frozen=True, slots=True)
class Found:
    """rate: None where even the smallest one breaks the SLO; share, at_most: of late requests in `repeats`, and
    the upper end of the interval; trials: all, in order; limited: by the generator or the highest rate, not by the
    server"""

    slo: Slo
    rate: float | None
    share: float
    at_most: float
    repeats: list[Trial] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    limited: bool = False

    def sentence(self) -> str:
        if self.rate is None:
            last = self.trials[-1]
            if last.behind:
                return (
                    f"no answer to {self.slo.text}: the load generator sent too late even at"
                    f" {last.rate:,.1f} requests/s; give it a CPU core of its own, or allow a longer latency"
                )
            return f"no rate meets {self.slo.text}: it was not met at {last.rate:,.1f} requests/s"
        spread = [t.quantile_s * 1e3 for t in self.repeats]
        text = (
            f"{self.slo.text} is met up to {self.rate:,.1f} requests/s: {self.share:.2%} of"
            f" {sum(t.sent for t in self.repeats):,} requests were late (with 95 % confidence at most"
            f" {self.at_most:.2%};"
            f" {self.slo.allowed:.2%} are allowed); {len(spread)} repetitions: {min(spread):.3g} to"
            f" {max(spread):.3g} ms"
        )
        return text + ("; the load generator could not send more" if self.limited else "")


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
    """peak: the highest rate that is tried, what the server answered in a closed loop.  measure: a trial at a rate."""
    trials: list[Trial] = []

    async def keeps(rate: float) -> bool:
        trials.append(await measure(rate))
        return trials[-1].keeps(slo)

    low, high = 0.0, peak
    if await keeps(peak):
        low = peak
    rate = peak
    while not low and rate > peak / _LOWEST:
        rate /= 2
        if await keeps(rate):
            low = rate
        else:
            high = rate
    while low and high / low > _CLOSE:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if await keeps(middle) else (low, middle)
    for _ in range(_MOST_STEPS if low else 0):
        again: list[Trial] = []
        while len(again) < repeats and _may_keep(slo, again, repeats):
            again.append(await measure(low))
        trials += again
        late, sent = sum(t.late for t in again), sum(t.sent for t in again)
        if len(again) == repeats and upper_share(late, sent) <= slo.allowed and not again[-1].behind:
            limited = low >= peak or any(t.behind for t in trials if t.rate <= low * 1.1)
            return Found(slo, low, late / sent, upper_share(late, sent), again, trials, limited)
        low *= _STEP
    return Found(slo, None, 1.0, 1.0, [], trials)
