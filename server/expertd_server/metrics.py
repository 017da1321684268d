"""Prometheus metrics, over HTTP on their own port.

What is counted a message costs well under a microsecond each; what is counted a token (which expert served it) is a
bincount a batch, turned into samples only when somebody scrapes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from expertd_server.engine import BatchReport, LoadNow, ServedLayer
from expertd_server.request import Array

__all__ = ["BackendFacts", "Metrics", "MetricsHttp", "Rpc", "SERVICE"]

SERVICE = "expertd.v1.ExpertService"

_SECONDS = tuple(m * 10.0**e for e in range(-5, 1) for m in (1, 2, 5))
"""Bounds of the time histograms: 10 us to 5 s, three a decade."""
_TOKENS = tuple(float(1 << i) for i in range(15))


@dataclass(frozen=True)
class BackendFacts:
    """Labels of expertd_backend_info."""

    layer: int
    backend: str
    weight_scheme: str
    activation_scheme: str
    device: str


class Rpc:
    """The standard grpc_server_* series of one method, with their labels bound once."""

    def __init__(self, metrics: Metrics, kind: str, method: str) -> None:
        labels = (kind, SERVICE, method)
        self._handled, self._labels = metrics.handled, labels
        self.started: Callable[[], None] = metrics.started.labels(*labels).inc
        self.received: Callable[[], None] = metrics.received.labels(*labels).inc
        self.sent: Callable[[], None] = metrics.sent.labels(*labels).inc
        self.seconds: Callable[[float], None] = metrics.handling.labels(*labels).observe

    def finished(self, code: str) -> None:
        """code: gRPC's name, "OK", "UNAVAILABLE", ..."""
        self._handled.labels(*self._labels, code).inc()


class Metrics:
    """All series of one server, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = r = CollectorRegistry()
        rpc = ("grpc_type", "grpc_service", "grpc_method")
        self.started = Counter("grpc_server_started", "RPCs begun.", rpc, registry=r)
        self.handled = Counter("grpc_server_handled", "RPCs ended, by status code.", (*rpc, "grpc_code"), registry=r)
        self.received = Counter("grpc_server_msg_received", "Messages received.", rpc, registry=r)
        self.sent = Counter("grpc_server_msg_sent", "Messages sent.", rpc, registry=r)
        self.handling = Histogram(
            "grpc_server_handling_seconds", "Time from begin to end of an RPC.", rpc, registry=r, buckets=_SECONDS
        )
        self.requests = Counter(
            "expertd_requests",
            "Requests answered, by status code and reason (OK: none).",
            ("code", "reason"),
            registry=r,
        )
        self.tokens = Counter("expertd_tokens", "Tokens computed.", ("layer",), registry=r)
        self.bytes = Counter("expertd_bytes", "Bytes of messages, in and out.", ("direction",), registry=r)
        self.batch_tokens = Histogram("expertd_batch_tokens", "Tokens of a joined batch.", registry=r, buckets=_TOKENS)
        self.batch_requests = Histogram(
            "expertd_batch_requests", "Requests of a joined batch.", registry=r, buckets=_TOKENS[:11]
        )
        self.queue = Histogram(
            "expertd_queue_seconds", "Time a request waited for its batch.", registry=r, buckets=_SECONDS
        )
        self.kernel = Histogram(
            "expertd_kernel_seconds", "Time of a batch in the kernel.", ("backend",), registry=r, buckets=_SECONDS
        )
        self.copy = Histogram(
            "expertd_copy_seconds",
            "Time of a batch in copies, in or out.",
            ("direction",),
            registry=r,
            buckets=_SECONDS,
        )
        self.backend_info = Gauge(
            "expertd_backend_info",
            "1 for the backend that serves the layer.",
            ("layer", "backend", "weight_scheme", "activation_scheme", "device"),
            registry=r,
        )
        self._state = Gauge("expertd_serving", "1 while the server takes requests.", registry=r)
        self._state.set(0)
        self.experts = _ExpertTokens()
        r.register(self.experts)
        self._requests: dict[tuple[str, str], Callable[[], None]] = {}
        self._tokens: dict[int, Callable[[float], None]] = {}
        self.bytes_in: Callable[[float], None] = self.bytes.labels("in").inc
        self.bytes_out: Callable[[float], None] = self.bytes.labels("out").inc
        self._copy_in, self._copy_out = self.copy.labels("in"), self.copy.labels("out")

    def serving(self, yes: bool) -> None:
        self._state.set(1 if yes else 0)

    def watch_load(self, load: Callable[[], LoadNow]) -> None:
        """Export the queue's length; read when scraped."""
        tokens = Gauge("expertd_queued_tokens", "Tokens waiting or being computed.", registry=self.registry)
        requests = Gauge("expertd_queued_requests", "Requests waiting or being computed.", registry=self.registry)
        tokens.set_function(lambda: load().queued_tokens)
        requests.set_function(lambda: load().queued_requests)

    def backend(self, facts: BackendFacts) -> None:
        self.backend_info.labels(
            str(facts.layer), facts.backend, facts.weight_scheme, facts.activation_scheme, facts.device
        ).set(1)

    def answered(self, code: str = "OK", reason: str = "") -> None:
        """One request was answered."""
        inc = self._requests.get((code, reason))
        if inc is None:
            inc = self._requests[code, reason] = self.requests.labels(code, reason).inc
        inc()

    def batch(self, b: BatchReport) -> None:
        """One batch was computed.  Called on the engine's thread."""
        layer = b.layer.layer
        inc = self._tokens.get(layer)
        if inc is None:
            inc = self._tokens[layer] = self.tokens.labels(str(layer)).inc
        inc(b.tokens)
        self.batch_tokens.observe(b.tokens)
        self.batch_requests.observe(len(b.requests))
        for ns in b.queue_ns:
            self.queue.observe(ns * 1e-9)
        self.kernel.labels(b.layer.backend).observe(b.stages.kernel_ns * 1e-9)
        self._copy_in.observe(b.stages.copy_in_ns * 1e-9)
        self._copy_out.observe(b.stages.copy_out_ns * 1e-9)
        self.experts.add(b.layer, b.expert_tokens)


class _ExpertTokens(Collector):
    """expertd_expert_tokens_total{layer, expert}: routes that each expert served."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[int, tuple[Sequence[int], Array]] = {}

    def add(self, layer: ServedLayer, tokens: Array) -> None:
        with self._lock:
            found = self._counts.get(layer.layer)
            if found is None:
                self._counts[layer.layer] = (layer.held, tokens.astype(np.int64))
            else:
                np.add(found[1], tokens, out=found[1])

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily("expertd_expert_tokens", "Routes served, by expert.", labels=("layer", "expert"))
        with self._lock:
            now = {layer: (held, counts.tolist()) for layer, (held, counts) in self._counts.items()}
        for layer, (held, counts) in now.items():
            for expert, n in zip(held, counts, strict=True):
                family.add_metric((str(layer), str(expert)), n)
        yield family


class MetricsHttp:
    """The HTTP endpoint /metrics.  Raises OSError when the address is taken."""

    def __init__(self, metrics: Metrics, host: str, port: int) -> None:
        server: Any
        server, self._thread = start_http_server(port, host, metrics.registry)
        self._server = server
        self.port: int = server.server_address[1]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
