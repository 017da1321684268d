"""What batches take at a device by the experts that they reach and by their routes: between and beyond points.

surface = Surface(((1, 1, 60.0), (1, 64, 70.0), (8, 8, 90.0), (8, 512, 130.0)))     experts, routes, microseconds
surface(experts, routes)                                                            microseconds of batches
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Surface"]

Numbers = NDArray[Any]


@dataclass(frozen=True)
class Surface:
    """points: (experts hit, routes, microseconds), at least one."""

    points: tuple[tuple[int, int, float], ...]

    @cached_property
    def _columns(self) -> tuple[NDArray[np.float64], list[tuple[NDArray[np.float64], NDArray[np.float64]]]]:
        """Numbers of experts, ascending; of each, routes an expert and microseconds."""
        experts = sorted({e for e, _, _ in self.points})
        columns = []
        for e in experts:
            rows, us = zip(*sorted((routes / e, us) for n, routes, us in self.points if n == e), strict=True)
            columns.append((np.array(rows, np.float64), np.array(us, np.float64)))
        return np.array(experts, np.float64), columns

    def __call__(self, experts: Numbers, routes: Numbers) -> NDArray[np.float64]:
        """Microseconds of batches: 0 where nothing is hit, else between the points around, and in proportion beyond
        them."""
        counts, columns = self._columns
        rows = routes / np.maximum(experts, 1)
        each = np.array([_line(rows, *column) for column in columns])  # [counts, batches]
        out = each[0] if len(counts) > 1 else each[0] * np.maximum(experts / counts[0], 1.0)
        for i in range(1, len(counts)):
            part = (experts - counts[i - 1]) / (counts[i] - counts[i - 1])
            last = i == len(counts) - 1
            beyond = part >= 0 if last else (part >= 0) & (part <= 1)
            out = np.where(beyond, each[i - 1] + part * (each[i] - each[i - 1]), out)
        return np.where(experts > 0, np.maximum(out, 0.0), 0.0)


def _line(at: NDArray[np.float64], x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Between the points; before the first as at it; beyond the last as steep as before it."""
    inside: NDArray[np.float64] = np.interp(at, x, y)
    if len(x) == 1:
        return np.where(at > x[0], y[0] * at / x[0], inside)
    slope = max(0.0, (y[-1] - y[-2]) / (x[-1] - x[-2]))
    return np.where(at > x[-1], y[-1] + slope * (at - x[-1]), inside)
