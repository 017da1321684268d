"""What a batch adds to the metrics: tallies with one writer, and which expert served how many routes, a bincount a
batch, turned into samples only when somebody scrapes."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from expertd_server.engine.report import WAIT_BOUNDS_NS, BatchReport, RequestReport, Waits
from expertd_server.engine.request import Array

__all__ = ["SECONDS", "BatchMetrics"]

SECONDS = tuple(ns * 1e-9 for ns in WAIT_BOUNDS_NS)
"""Bounds of the time histograms: 10 us to 5 s, three a decade."""
_HALF_S = 60.0
"""After which a route counts half for what is uneven now."""
_TOKENS = tuple(float(1 << i) for i in range(15))


class _Tally:
    """A histogram with one writer: a tenth of the cost of one that locks.  A scrape may miss what is being added."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._exemplars: dict[int, Exemplar] = {}  # by bucket: of a request in it, the last one

    def exemplify(self, value: float, labels: dict[str, str]) -> None:
        """A request that was counted here has a trace."""
        self._exemplars[bisect_left(self._bounds, value)] = Exemplar(labels, value, time.time())

    def add(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def add_waits(self, waits: Waits) -> None:
        """Many at once, counted by the same bounds."""
        self._counts = [a + b for a, b in zip(self._counts, waits.counts, strict=True)]
        self._sum += waits.sum_ns * 1e-9

    def into(self, family: HistogramMetricFamily, labels: Sequence[str] = ()) -> None:
        so_far = list(accumulate(self._counts))
        names = [*(f"{b:g}" for b in self._bounds), "+Inf"]
        buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
        for i, (name, n) in enumerate(zip(names, so_far, strict=True)):
            exemplar = self._exemplars.get(i)
            buckets.append((name, n) if exemplar is None else (name, n, exemplar))
        family.add_metric(labels, buckets, self._sum)


class _Experts:
    """Routes that each expert of one layer served, of all that were held here at some time.  It keeps nothing of the
    layer alive."""

    def __init__(self, num_experts: int) -> None:
        self._counts = np.zeros(num_experts, np.int64)
        self._recent = np.zeros(num_experts)
        self._before = np.zeros(num_experts, np.int64)
        self._looked_s = time.monotonic()
        self._ever = np.zeros(num_experts, bool)
        self._generation = 0
        self._ids: Array = np.empty(0, np.int64)

    def add(self, b: BatchReport) -> None:
        if b.layer.generation != self._generation:
            self._generation, self._ids = b.layer.generation, np.asarray(b.layer.held, np.int64)
            self._ever[self._ids] = True
        self._counts[self._ids] += b.expert_tokens

    def imbalance(self, now_s: float) -> float:
        """Routes of the hottest expert against the mean of those held, of about the last minute; 0 = there were none.
        One thread at a time."""
        counts = self._counts.copy()
        self._recent *= 0.5 ** ((now_s - self._looked_s) / _HALF_S)
        self._recent += counts - self._before
        self._before, self._looked_s = counts, now_s
        recent = self._recent[self._ids]
        return float(recent.max() / recent.mean()) if recent.sum() >= 1e-3 else 0.0

    @property
    def routes(self) -> int:
        return int(self._counts.sum())

    @property
    def recent(self) -> list[tuple[int, float]]:
        """(global id, routes of about the last minute before the last imbalance()) of those held."""
        return list(zip(self._ids.tolist(), self._recent[self._ids].tolist(), strict=True))

    def samples(self) -> list[tuple[int, int]]:
        """(global id, routes)."""
        ids = np.flatnonzero(self._ever)
        return list(zip(ids.tolist(), self._counts[ids].tolist(), strict=True))


class BatchMetrics(Collector):
    """What a batch adds to the metrics.  add() is called by one thread at a time, collect() by whoever scrapes."""

    def __init__(self, each_expert: bool) -> None:
        self._each_expert = each_expert
        self._looking = threading.Lock()
        self._batch_tokens, self._batch_requests = _Tally(_TOKENS), _Tally(_TOKENS[:11])
        self._queue, self._copy_in, self._copy_out = _Tally(SECONDS), _Tally(SECONDS), _Tally(SECONDS)
        self._kernel: dict[str, _Tally] = {}
        self._tokens: dict[int, int] = {}
        self._experts: dict[int, _Experts] = {}

    def add(self, b: BatchReport) -> None:
        """One batch was computed."""
        layer, backend = b.layer.layer, b.backend
        if layer not in self._tokens:
            self._experts[layer] = _Experts(b.layer.num_experts)
            self._tokens[layer] = 0
        if backend not in self._kernel:
            self._kernel[backend] = _Tally(SECONDS)
        self._tokens[layer] += b.tokens * b.batches
        self._experts[layer].add(b)
        self._batch_tokens.add(b.tokens, b.batches)
        self._batch_requests.add(b.requests, b.batches)
        self._queue.add_waits(b.waits)
        self._kernel[backend].add(b.stages.kernel_ns * 1e-9, b.batches)
        self._copy_in.add(b.stages.copy_in_ns * 1e-9, b.batches)
        self._copy_out.add(b.stages.copy_out_ns * 1e-9, b.batches)

    def exemplify(self, r: RequestReport, trace_id: str, span_id: str) -> None:
        """`r`, which was computed, can be looked up under these.  By one other thread."""
        labels = {"trace_id": trace_id, "span_id": span_id}
        took = {name: (end - begin) * 1e-9 for name, begin, end in r.stages}
        self._queue.exemplify(took["queue"], labels)
        kernel = self._kernel.get(r.backend)
        if kernel is not None:
            kernel.exemplify(took["kernel"], labels)

    def experts(self) -> dict[int, tuple[float, list[tuple[int, float]]]]:
        """layer -> imbalance, and (global id, routes of about the last minute) of those held."""
        with self._looking:
            now_s = time.monotonic()
            return {n: (counts.imbalance(now_s), counts.recent) for n, counts in list(self._experts.items())}

    def collect(self) -> Iterable[Metric]:
        tokens = CounterMetricFamily("expertd_tokens", "Tokens computed.", labels=("layer",))
        for layer, n in list(self._tokens.items()):
            tokens.add_metric((str(layer),), n)
        routes = CounterMetricFamily("expertd_routes", "Routes served.", labels=("layer",))
        uneven = GaugeMetricFamily(
            "expertd_expert_imbalance",
            "Routes of a layer's hottest expert against the mean of those held, of about the last minute.",
            labels=("layer",),
        )
        experts = CounterMetricFamily(
            "expertd_expert_tokens", "Routes served, by expert (--expert-metrics yes).", labels=("layer", "expert")
        )
        for layer, (ratio, _) in self.experts().items():
            uneven.add_metric((str(layer),), ratio)
        for layer, counts in list(self._experts.items()):
            routes.add_metric((str(layer),), counts.routes)
            for expert, n in counts.samples() if self._each_expert else ():
                experts.add_metric((str(layer), str(expert)), n)
        kernel = HistogramMetricFamily("expertd_kernel_seconds", "Time of a batch in the kernel.", labels=("backend",))
        for backend, tally in list(self._kernel.items()):
            tally.into(kernel, (backend,))
        copy = HistogramMetricFamily("expertd_copy_seconds", "Time of a batch in copies.", labels=("direction",))
        self._copy_in.into(copy, ("in",))
        self._copy_out.into(copy, ("out",))
        yield from (tokens, routes, uneven, *([experts] if self._each_expert else []), kernel, copy)
        for name, text, tally in (
            ("expertd_batch_tokens", "Tokens of a joined batch.", self._batch_tokens),
            ("expertd_batch_requests", "Requests of a joined batch.", self._batch_requests),
            ("expertd_queue_seconds", "Time a request waited for its batch.", self._queue),
        ):
            family = HistogramMetricFamily(name, text, labels=())
            tally.into(family)
            yield family
