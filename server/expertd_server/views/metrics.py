"""Prometheus metrics, over HTTP on their own port.

What is counted a message costs well under a microsecond each; what is counted a token (which expert served it) is a
bincount a batch, turned into samples only when somebody scrapes.
"""

from __future__ import annotations

import importlib.metadata
import platform
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from expertd_server.engine.report import WAIT_BOUNDS_NS, BatchReport, LoadNow, RequestReport, Waits
from expertd_server.engine.request import Array
from expertd_server.views.call_metrics import SERVICE, Calls, Rpc

__all__ = ["BackendFacts", "Metrics", "Rpc", "SERVICE"]

VERSION = importlib.metadata.version("expertd")

_SECONDS = tuple(ns * 1e-9 for ns in WAIT_BOUNDS_NS)
"""Bounds of the time histograms: 10 us to 5 s, three a decade."""
_HALF_S = 60.0
"""After which a route counts half for what is uneven now."""
_TOKENS = tuple(float(1 << i) for i in range(15))


@dataclass(frozen=True)
class BackendFacts:
    """Labels of expertd_backend_info."""

    layer: int
    backend: str
    weight_scheme: str
    activation_scheme: str
    device: str
    chosen_by: str
    from_cache: bool


class Metrics:
    """All series of one server, in a registry of its own.  each_expert: also one for each expert of each layer."""

    def __init__(self, each_expert: bool = True) -> None:
        self.registry = r = CollectorRegistry()
        self._first = _First()
        r.register(self._first)  # before all others: it brings them up to date
        rpc = ("grpc_type", "grpc_service", "grpc_method")
        self.started = Counter("grpc_server_started", "RPCs begun.", rpc, registry=r)
        self.handled = Counter("grpc_server_handled", "RPCs ended, by status code.", (*rpc, "grpc_code"), registry=r)
        self.received = Counter("grpc_server_msg_received", "Messages received.", rpc, registry=r)
        self.sent = Counter("grpc_server_msg_sent", "Messages sent.", rpc, registry=r)
        self.handling = Histogram(
            "grpc_server_handling_seconds", "Time from begin to end of an RPC.", rpc, registry=r, buckets=_SECONDS
        )
        self.calls = Calls()
        r.register(self.calls)
        self.requests = Counter(
            "expertd_requests",
            "Requests answered, by status code and reason (OK: none).",
            ("code", "reason"),
            registry=r,
        )
        self._reloads = Counter(
            "expertd_reloads", "Certificates or callers were read again, by outcome.", ("what", "outcome"), registry=r
        )
        self._cut = Counter(
            "expertd_connections_ended",
            "Connections that the server ended: half-sent messages held too much, or did not go on.",
            ("why",),
            registry=r,
        )
        self.bytes = Counter("expertd_bytes", "Bytes of messages, in and out.", ("direction",), registry=r)
        self.backend_info = Gauge(
            "expertd_backend_info",
            "1: who serves the layer.",
            ("layer", "backend", "weight_scheme", "activation_scheme", "device", "chosen_by", "from_cache"),
            registry=r,
        )
        self._boot = Gauge("expertd_boot_seconds", "Time of the boot, by stage.", ("stage",), registry=r)
        self._lookups = Counter(
            "expertd_cache_lookups",
            "Packed weights looked up in the cache: hit; miss, stale, damaged: made again.",
            ("outcome",),
            registry=r,
        )
        build = Gauge("expertd_build_info", "1, with versions.", ("version", "python", "torch", "grpc"), registry=r)
        build.labels(VERSION, platform.python_version(), *_versions("torch", "grpcio")).set(1)
        ProcessCollector(registry=r)
        self._planned = Gauge(
            "expertd_planned_bytes", "Memory by the plan that fits what is held now.", ("what",), registry=r
        )
        self._state = Gauge("expertd_serving", "1 while the server takes requests.", registry=r)
        self._state.set(0)
        self._faults = Counter(
            "expertd_faults",
            "Batches computed in halves for want of memory, batches that failed, ends of the computing.",
            ("kind",),
            registry=r,
        )
        for kind in ("split", "failed", "lost"):
            self._faults.labels(kind)
        self.untraced = Counter(
            "expertd_untraced_requests", "Traced requests of which no spans were made: too many at once.", registry=r
        )
        batches = _Batches(each_expert)
        r.register(batches)
        self.batch: Callable[[BatchReport], None] = batches.add
        self.exemplify: Callable[[RequestReport, str, str], None] = batches.exemplify
        self.experts: Callable[[], dict[int, tuple[float, list[tuple[int, float]]]]] = batches.experts
        self._requests: dict[tuple[str, str], Callable[[float], None]] = {}
        self._backends: set[tuple[str, ...]] = set()
        self.bytes_in: Callable[[float], None] = self.bytes.labels("in").inc
        self.bytes_out: Callable[[float], None] = self.bytes.labels("out").inc

    def reloaded(self, what: str, good: bool) -> None:
        """Files of `what` ("tls", "callers") have changed and are good, or broken."""
        self._reloads.labels(what, "ok" if good else "broken").inc()

    def connection_cut(self, why: str) -> None:
        """See transports/half_sent.py."""
        self._cut.labels(why).inc()

    def trouble(self, kind: str) -> None:
        """See Worker."""
        self._faults.labels(kind).inc()

    def serving(self, yes: bool) -> None:
        self._state.set(1 if yes else 0)

    def before_a_scrape(self, work: Callable[[], None]) -> None:
        """Call this first whenever somebody scrapes."""
        self._first.refresh = work

    def watch_load(self, load: Callable[[], LoadNow]) -> None:
        """Export the queue's length and what it takes; read when scraped."""
        tokens = Gauge("expertd_queued_tokens", "Tokens waiting or being computed.", registry=self.registry)
        requests = Gauge("expertd_queued_requests", "Requests waiting or being computed.", registry=self.registry)
        tokens.set_function(lambda: load().queued_tokens)
        requests.set_function(lambda: load().queued_requests)
        wait = Gauge(
            "expertd_predicted_wait_seconds",
            "Until what waits and runs now is computed, by what batches took.",
            registry=self.registry,
        )
        wait.set_function(lambda: load().wait_ns * 1e-9)

    def watch_device(self, read: Callable[[], Mapping[str, int]]) -> None:
        """Export an accelerator's memory, bytes by what they are; read when scraped."""
        gauge = Gauge(
            "expertd_device_bytes",
            "An accelerator's memory: free; reserved by torch in this process, and of that allocated.",
            ("what",),
            registry=self.registry,
        )
        for what in read():
            gauge.labels(what).set_function(lambda what=what: read()[what])  # type: ignore[misc]

    def plan(self, nbytes: Mapping[str, int]) -> None:
        """What is held takes so much, by what it is."""
        for what, n in nbytes.items():
            self._planned.labels(what).set(n)

    def hold(self, backends: Iterable[BackendFacts]) -> None:
        """What is held from now on, and who computes it."""
        now: set[tuple[str, ...]] = {
            (
                str(f.layer),
                f.backend,
                f.weight_scheme,
                f.activation_scheme,
                f.device,
                f.chosen_by,
                "true" if f.from_cache else "false",
            )
            for f in backends
        }
        for labels in self._backends - now:
            self.backend_info.remove(*labels)
        for labels in now - self._backends:
            self.backend_info.labels(*labels).set(1)
        self._backends = now

    def booted(self, seconds: Mapping[str, float], lookups: Mapping[str, int]) -> None:
        """What loading took, by stage, and what was found in the cache, by outcome."""
        for stage, s in seconds.items():
            self._boot.labels(stage).set(s)
        for outcome, n in lookups.items():
            self._lookups.labels(outcome).inc(n)

    def answered(self, code: str = "OK", reason: str = "", requests: int = 1) -> None:
        """Requests were answered."""
        inc = self._requests.get((code, reason))
        if inc is None:
            inc = self._requests[code, reason] = self.requests.labels(code, reason).inc
        inc(requests)


def _versions(*packages: str) -> list[str]:
    """Of installed packages, "" where one is not."""
    found = []
    for name in packages:
        try:
            found.append(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            found.append("")
    return found


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


class _First(Collector):
    """Has no series of its own."""

    def __init__(self) -> None:
        self.refresh: Callable[[], None] = lambda: None

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        self.refresh()
        return ()


class _Batches(Collector):
    """What a batch adds to the metrics.  add() is called by one thread at a time, collect() by whoever scrapes."""

    def __init__(self, each_expert: bool) -> None:
        self._each_expert = each_expert
        self._looking = threading.Lock()
        self._batch_tokens, self._batch_requests = _Tally(_TOKENS), _Tally(_TOKENS[:11])
        self._queue, self._copy_in, self._copy_out = _Tally(_SECONDS), _Tally(_SECONDS), _Tally(_SECONDS)
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
            self._kernel[backend] = _Tally(_SECONDS)
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

    def imbalance(self) -> dict[int, float]:
        """By layer."""
        return {layer: ratio for layer, (ratio, _) in self.experts().items()}

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
        for layer, ratio in self.imbalance().items():
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
