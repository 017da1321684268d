"""What a batch adds to the metrics: tallies with one writer, and which expert served how many routes, a bincount a
batch, turned into samples only when somebody scrapes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from expertd_server.engine.report import BatchReport, RequestReport
from expertd_server.engine.request import Array
from expertd_server.views.tally import SECONDS, HistogramTally

__all__ = ["BatchMetrics"]

_HALF_S = 60.0
"""After which a route counts half for what is uneven now."""
_TOKENS = tuple(float(1 << i) for i in range(15))


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
        self._batch_tokens, self._batch_requests = HistogramTally(_TOKENS), HistogramTally(_TOKENS[:11])
        self._queue, self._copy_in, self._copy_out = (HistogramTally(SECONDS) for _ in range(3))
        self._kernel: dict[str, HistogramTally] = {}
        self._tokens: dict[int, int] = {}
        self._experts: dict[int, _Experts] = {}

    def add(self, b: BatchReport) -> None:
        """One batch was computed."""
        layer, backend = b.layer.layer, b.backend
        if layer not in self._tokens:
            self._experts[layer] = _Experts(b.layer.num_experts)
            self._tokens[layer] = 0
        if backend not in self._kernel:
            self._kernel.setdefault(backend, HistogramTally(SECONDS))
        self._tokens[layer] += b.tokens * b.batches
        self._experts[layer].add(b)
        self._batch_tokens.add(b.tokens, b.batches)
        self._batch_requests.add(b.requests, b.batches)
        self._queue.add_waits(b.waits)
        self._kernel[backend].add(b.stages.kernel_ns * 1e-9, b.batches)
        self._copy_in.add(b.stages.copy_in_ns * 1e-9, b.batches)
        self._copy_out.add(b.stages.copy_out_ns * 1e-9, b.batches)

    def exemplify(self, r: RequestReport, labels: Mapping[str, str]) -> None:
        """What was counted of `r` can be looked up under `labels`.  By one other thread."""
        if r.batch is None:
            return
        _, begin_ns, cut_ns = r.stages[0]
        self._queue.exemplify((cut_ns - begin_ns) * 1e-9, labels)
        self._batch_tokens.exemplify(r.batch_tokens, labels)
        self._batch_requests.exemplify(r.batch_requests, labels)
        self._copy_in.exemplify(r.batch.copy_in_ns * 1e-9, labels)
        self._copy_out.exemplify(r.batch.copy_out_ns * 1e-9, labels)
        kernel = self._kernel.setdefault(r.backend, HistogramTally(SECONDS))  # its batch may be counted only now
        kernel.exemplify(r.batch.kernel_ns * 1e-9, labels)

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
