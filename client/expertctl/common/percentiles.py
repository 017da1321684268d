"""Exact percentiles: every measurement is kept (8 bytes), none is put into a bucket."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

__all__ = ["LEAST_FOR_P999", "Durations", "Summary"]

LEAST_FOR_P999 = 10_000
"""Durations from which on p99.9 is reported: ten of them are then above it.  Of fewer it says little more than the
maximum."""
_QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)


@dataclass(frozen=True, slots=True)
class Summary:
    """Of some durations, in seconds; all zero where there were none.

    Percentiles are by nearest rank: the smallest duration that at least that share of them does not exceed."""

    count: int = 0
    mean_s: float = 0.0
    min_s: float = 0.0
    p50_s: float = 0.0
    p90_s: float = 0.0
    p95_s: float = 0.0
    p99_s: float = 0.0
    p999_s: float = 0.0
    max_s: float = 0.0

    @property
    def known_p999_s(self) -> float | None:
        """p99.9, where there are enough durations for it."""
        return self.p999_s if self.count >= LEAST_FOR_P999 else None


class Durations:
    """Durations as they are measured, in seconds."""

    def __init__(self) -> None:
        self._values = array("d")

    def add(self, seconds: float) -> None:
        self._values.append(seconds)

    def values(self) -> list[float]:
        """All of them."""
        return list(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def summary(self, first: int = 0) -> Summary:
        """Of those from number `first` on."""
        if len(self._values) <= first:
            return Summary()
        v = np.array(self._values[first:])
        # Not percentile(99.9): 99.9 / 100 is no 0.999, and of 1000 durations it gives the largest.
        p50, p90, p95, p99, p999 = np.quantile(v, _QUANTILES, method="inverted_cdf").tolist()
        return Summary(
            count=len(v),
            mean_s=float(v.mean()),
            min_s=float(v.min()),
            p50_s=p50,
            p90_s=p90,
            p95_s=p95,
            p99_s=p99,
            p999_s=p999,
            max_s=float(v.max()),
        )
