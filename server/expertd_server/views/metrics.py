"""Prometheus metrics, over HTTP on their own port.

What is counted a message costs a tenth of a microsecond each; what is counted a batch is in batch_metrics.py.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

import expertd
from expertd_server.engine.report import BatchReport, LoadNow, RequestReport
from expertd_server.views.batch_metrics import BatchMetrics
from expertd_server.views.call_metrics import Calls
from expertd_server.views.tally import Count
from expertd_server.views.update_metrics import UpdateMetrics

__all__ = ["BackendFacts", "Metrics"]

VERSION = expertd.__version__


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
        self.calls = Calls(r, self.count)
        self.requests = Counter(
            "expertd_requests",
            "Requests answered, by status code and reason (OK: none).",
            ("code", "reason"),
            registry=r,
        )
        self._reloads = Counter(
            "expertd_reloads", "Certificates or callers were read again, by outcome.", ("what", "outcome"), registry=r
        )
        self._broken = Gauge(
            "expertd_files_broken",
            "1 while changed files cannot be used, and certificates or callers from before stay in effect.",
            ("what",),
            registry=r,
        )
        for what in ("tls", "callers"):
            self._broken.labels(what).set(0)
        self.certificate_until = Gauge(
            "expertd_certificate_expiry_timestamp_seconds",
            "When the certificate that new connections get expires, as Unix time; 0 without TLS.",
            registry=r,
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
        self.is_serving = False
        self._state = Gauge("expertd_serving", "1 while the server takes requests.", registry=r)
        self._state.set(0)
        self._faults = Counter(
            "expertd_faults",
            "Batches computed in halves for want of memory (split), batches that failed (failed), ends of the computing"
            " (lost).",
            ("kind",),
            registry=r,
        )
        for kind in ("split", "failed", "lost"):
            self._faults.labels(kind)
        self.untraced = Counter(
            "expertd_untraced_requests", "Traced requests of which no spans were made: too many at once.", registry=r
        )
        self.updates = UpdateMetrics(r)
        self._batches = batches = BatchMetrics(each_expert)
        r.register(batches)
        self.batch: Callable[[BatchReport], None] = batches.add
        self.experts: Callable[[], dict[int, tuple[float, list[tuple[int, float]]]]] = batches.experts
        self._requests: dict[tuple[str, str], Callable[[float], None]] = {}
        self._backends: set[tuple[str, ...]] = set()
        self.bytes_in = self.count(self.bytes.labels("in").inc).add
        self.computed = self.count(self.requests.labels("OK", "").inc).add
        self.bytes_out = self.count(self.bytes.labels("out").inc).add

        """computed: a request of a stream was answered at once.  All three are its thread's."""

    def count(self, inc: Callable[[float], None]) -> Count:
        """A count that `inc` is told whenever somebody scrapes."""
        out = Count(inc)
        self._first.counts.append(out)
        return out

    def exemplify(self, r: RequestReport, trace_id: str, span_id: str) -> None:
        """What was counted of `r` can be looked up under these.  By one thread at a time."""
        labels = {"trace_id": trace_id, "span_id": span_id}
        self._batches.exemplify(r, labels)
        if r.call is not None:
            self.calls.exemplify(r.call, labels)

    def reloaded(self, what: str, good: bool) -> None:
        """Files of `what` ("tls", "callers") have changed and are good, or broken."""
        self._reloads.labels(what, "ok" if good else "broken").inc()
        self._broken.labels(what).set(not good)

    def connection_cut(self, why: str) -> None:
        """See transports/grpc/half_sent.py."""
        self._cut.labels(why).inc()

    def trouble(self, kind: str) -> None:
        """See Worker."""
        self._faults.labels(kind).inc()

    def serving(self, yes: bool) -> None:
        self.is_serving = yes
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


class _First(Collector):
    """Has no series of its own."""

    def __init__(self) -> None:
        self.refresh: Callable[[], None] = lambda: None
        self.counts: list[Count] = []

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        self.refresh()
        for count in self.counts:
            count.tell()
        return ()
