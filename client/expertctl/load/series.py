"""A run in slices of time, and its latencies as a histogram that other tools read."""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["NO_HDR", "Slice", "hdr_encoded", "hdr_text", "quantile_curve", "slices"]

NO_HDR = "it needs hdrhistogram, which is not installed: pip install hdrhistogram"
_LARGEST_US, _DIGITS = 3_600_000_000, 3
_US_PER_MS = 1000.0
_DEVIATION = re.compile(r"(StdDeviation +=) *[\d.]+\]")
_SLICES = 120


@dataclass(frozen=True, slots=True)
class Slice:
    """Answers that came between begin_s and end_s of the run; times in microseconds, 0 where nothing came."""

    begin_s: float
    end_s: float
    answered: int
    failed: int
    p50_us: float
    p99_us: float

    @property
    def rate(self) -> float:
        return self.answered / (self.end_s - self.begin_s)


def slices(ends_s: Sequence[float], latencies_s: Sequence[float], failures_s: Sequence[float]) -> list[Slice]:
    """Of a run: when each answer came and what it took, and when each failure did; at most _SLICES, of a round time."""
    at, took, failed = (np.asarray(x, np.float64) for x in (ends_s, latencies_s, failures_s))
    whole = max(at.max(initial=0.0), failed.max(initial=0.0))
    if whole <= 0:
        return []
    width = next(w for w in _widths() if whole / w <= _SLICES)
    edges = np.arange(0.0, whole + width, width)
    order = np.argsort(at, kind="stable")
    at, took = at[order], took[order]
    cuts, lost = np.searchsorted(at, edges), np.histogram(failed, edges)[0]
    out = []
    for n, (a, b) in enumerate(pairwise(cuts)):
        p50, p99 = np.quantile(took[a:b], (0.5, 0.99), method="inverted_cdf") * 1e6 if b > a else (0.0, 0.0)
        end_s = min(float(edges[n + 1]), whole)
        if end_s > edges[n]:
            out.append(Slice(float(edges[n]), end_s, int(b - a), int(lost[n]), float(p50), float(p99)))
    return out


def _widths() -> Any:
    width = 0.1
    while True:
        yield from (width, 2 * width, 5 * width)
        width *= 10


def quantile_curve(latencies_s: NDArray[np.float64]) -> tuple[list[float], list[float]]:
    """(1 / (1 - quantile), microseconds): the axis on which each nine takes as much room as the one before."""
    if not len(latencies_s):
        return [], []
    inverse = np.unique(np.geomspace(1.0, max(1.0, len(latencies_s)), 200))
    took = np.quantile(latencies_s, 1 - 1 / inverse, method="inverted_cdf")
    took[-1] = np.max(latencies_s)
    return inverse.tolist(), (took * 1e6).tolist()


def hdr_encoded(latencies_s: Sequence[float]) -> str | None:
    """HdrHistogram V2 compressed, base64, in microseconds with three digits; None where the package is not there."""
    return None if importlib.util.find_spec("hdrh") is None else _histogram(latencies_s).encode().decode("ascii")


def hdr_text(latencies_s: Sequence[float]) -> str:
    """The percentile distribution (.hgrm) in milliseconds, which HdrHistogram's plotters take."""
    out, histogram = io.BytesIO(), _histogram(latencies_s)
    histogram.output_percentile_distribution(out, _US_PER_MS)
    deviation_ms = histogram.get_stddev() / _US_PER_MS  # which hdrh writes without the scale of all other values
    return _DEVIATION.sub(rf"\g<1>{deviation_ms:12.{_DIGITS}f}]", out.getvalue().decode("ascii"))


def _histogram(latencies_s: Sequence[float]) -> Any:
    from hdrh.histogram import HdrHistogram

    histogram = HdrHistogram(1, _LARGEST_US, _DIGITS)
    for seconds in latencies_s:
        histogram.record_value(max(1, min(_LARGEST_US, round(seconds * 1e6))))
    return histogram
