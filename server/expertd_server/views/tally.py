"""A histogram with one writer: a tenth of the cost of one that locks, and exemplars that are added afterwards."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from expertd_server.engine.report import WAIT_BOUNDS_NS, Waits

__all__ = ["SECONDS", "Count", "HistogramTally"]

SECONDS = tuple(ns * 1e-9 for ns in WAIT_BOUNDS_NS)
"""Bounds of the time histograms: 10 us to 5 s, three a decade."""


class Count:
    """What happens for every message, counted by one thread, without a lock; any thread may tell().  inc: Prometheus's,
    which is told of it then."""

    def __init__(self, inc: Callable[[float], None]) -> None:
        self._inc = inc
        self._n = self._told = 0
        self._lock = threading.Lock()

    def add(self, n: int = 1) -> None:
        self._n += n

    def tell(self) -> None:
        with self._lock:
            n = self._n
            self._inc(n - self._told)
            self._told = n


class HistogramTally:
    """add() and exemplify() are called by one thread each, into() by whoever scrapes, who may miss what is being
    added.  bounds: upper ends of the buckets, ascending."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._exemplars: dict[int, Exemplar] = {}  # by bucket: of what is counted there, the last one

    def add(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def add_waits(self, waits: Waits) -> None:
        """Many at once, counted by the same bounds."""
        self._counts = [a + b for a, b in zip(self._counts, waits.counts, strict=True)]
        self._sum += waits.sum_ns * 1e-9

    def exemplify(self, value: float, labels: Mapping[str, str]) -> None:
        """`value`, which was added, can be looked up under `labels`."""
        self._exemplars[bisect_left(self._bounds, value)] = Exemplar(dict(labels), value, time.time())

    def into(self, family: HistogramMetricFamily, labels: Sequence[str] = ()) -> None:
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
        for i, (name, n) in enumerate(zip(names, accumulate(self._counts), strict=True)):
            exemplar = self._exemplars.get(i)
            buckets.append((name, n) if exemplar is None else (name, n, exemplar))
        family.add_metric(labels, buckets, self._sum)
