"""Exact percentiles: every measurement is kept (8 bytes), none is put into a bucket."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

__all__ = ["Durations", "Summary", "percentile"]


def percentile(ascending: array[float], percent: float) -> float:
    """The nearest-rank percentile: the smallest value that at least `percent` % of the values do not exceed.

    It is always one of the values.  percent is > 0 and <= 100; `ascending` is not empty."""
    if not ascending or not 0.0 < percent <= 100.0:
        raise ValueError(
            f"percentile: got {percent} % of {len(ascending)} values, want 0 < percent <= 100 of one at least"
        )
    rank = -(-len(ascending) * round(percent * 1000) // 100_000)  # ceil, in whole numbers: 99.9 is no exact float
    return ascending[rank - 1]


@dataclass(frozen=True, slots=True)
class Summary:
    """Of some durations, in seconds; all zero where there were none."""

    count: int = 0
    mean_s: float = 0.0
    min_s: float = 0.0
    p50_s: float = 0.0
    p90_s: float = 0.0
    p95_s: float = 0.0
    p99_s: float = 0.0
    p999_s: float = 0.0
    max_s: float = 0.0


class Durations:
    """Durations as they are measured, in seconds."""

    def __init__(self) -> None:
        self._values = array("d")

    def add(self, seconds: float) -> None:
        self._values.append(seconds)

    def __len__(self) -> int:
        return len(self._values)

    def summary(self) -> Summary:
        if not self._values:
            return Summary()
        v = array("d", sorted(self._values))
        return Summary(
            count=len(v),
            mean_s=sum(v) / len(v),
            min_s=v[0],
            p50_s=percentile(v, 50),
            p90_s=percentile(v, 90),
            p95_s=percentile(v, 95),
            p99_s=percentile(v, 99),
            p999_s=percentile(v, 99.9),
            max_s=v[-1],
        )
