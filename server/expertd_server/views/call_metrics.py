"""Series of RPCs: the `grpc_server_*` that go-grpc-prometheus made usual, and beside them the names that gRPC's own
OpenTelemetry plugins have (proposal A66), as Prometheus spells them.

Both are filled from one look at a call's end: each method's by its Rpc, which belongs to the Calls of a server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from expertd_server.engine.report import CallReport
from expertd_server.views.tally import SECONDS, Count, HistogramTally

__all__ = ["SERVICE", "Calls", "Rpc"]

SERVICE = "expertd.v1.ExpertService"
_RPC = ("grpc_type", "grpc_service", "grpc_method")
"""Labels of the `grpc_server_*`."""

_A66_SECONDS = (
    *(0.00001, 0.00005, 0.0001, 0.0003, 0.0006, 0.0008, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01),
    *(0.013, 0.016, 0.02, 0.025, 0.03, 0.04, 0.05, 0.065, 0.08, 0.1, 0.13, 0.16, 0.2, 0.25, 0.3, 0.4, 0.5, 0.65),
    *(0.8, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0),
)
_A66_BYTES = (*(float(1 << i) for i in (10, 11)), *(float(1 << i) for i in range(12, 33, 2)))


class Rpc:
    """One method, with its labels bound once.  By one thread at a time."""

    def __init__(self, calls: Calls, kind: str, method: str, service: str = SERVICE) -> None:
        self.method, self._name = method, f"{service}/{method}"
        labels = (kind, service, method)
        self._handled, self._labels, self._calls = calls.counters.handled, labels, calls
        self._begun: Callable[[], None] = calls.counters.started.labels(*labels).inc
        self.received = calls.count(calls.counters.received.labels(*labels).inc).add
        self.sent = calls.count(calls.counters.sent.labels(*labels).inc).add
        self._handling = calls.handling(labels)

    def started(self) -> None:
        self._begun()
        self._calls.started(self._name)

    def ended(self, code: str, seconds: float, bytes_in: int, bytes_out: int) -> None:
        """code: gRPC's name, "OK", "UNAVAILABLE", ...; bytes: of all its messages."""
        self._handled.labels(*self._labels, code).inc()
        self._handling.add(seconds)
        self._calls.ended(self._name, code, seconds, bytes_in, bytes_out)

    def report(self, code: str, seconds: float, bytes_in: int, bytes_out: int) -> CallReport:
        """What ended() was told, for Calls.exemplify()."""
        return CallReport(*self._labels, code, seconds, bytes_in, bytes_out)


class _Sums:
    """Three histograms of the calls of one method and status."""

    def __init__(self) -> None:
        self.seconds, self.bytes_in, self.bytes_out = (
            HistogramTally(b) for b in (_A66_SECONDS, _A66_BYTES, _A66_BYTES)
        )


class _Counters:
    """The `grpc_server_*` but for the time."""

    def __init__(self, r: CollectorRegistry) -> None:
        self.started = Counter("grpc_server_started", "RPCs begun.", _RPC, registry=r)
        self.handled = Counter("grpc_server_handled", "RPCs ended, by status code.", (*_RPC, "grpc_code"), registry=r)
        self.received = Counter("grpc_server_msg_received", "Messages received.", _RPC, registry=r)
        self.sent = Counter("grpc_server_msg_sent", "Messages sent.", _RPC, registry=r)


class Calls(Collector):
    """All series of calls, in `registry`; itself collects histograms and the other series of A66.  started() and
    ended() by one thread, exemplify() by another, collect() by whoever scrapes.

    count: makes a Count that is told whenever somebody scrapes"""

    def __init__(self, registry: CollectorRegistry, count: Callable[[Callable[[float], None]], Count]) -> None:
        self.counters, self.count = _Counters(registry), count
        registry.register(self)
        self._handling: dict[tuple[str, str, str], HistogramTally] = {}
        self._started: dict[str, int] = {}
        self._ended: dict[tuple[str, str], _Sums] = {}

    def handling(self, labels: tuple[str, str, str]) -> HistogramTally:
        """Of a method, by its labels: seconds of its calls."""
        return self._handling.setdefault(labels, HistogramTally(SECONDS))

    def started(self, method: str) -> None:
        self._started[method] = self._started.get(method, 0) + 1

    def ended(self, method: str, code: str, seconds: float, bytes_in: int, bytes_out: int) -> None:
        sums = self._ended.get((method, code))
        if sums is None:
            sums = self._ended[method, code] = _Sums()
        sums.seconds.add(seconds)
        sums.bytes_in.add(bytes_in)
        sums.bytes_out.add(bytes_out)

    def exemplify(self, c: CallReport, labels: Mapping[str, str]) -> None:
        """`c`, which has ended, can be looked up under `labels`."""
        self._handling[c.kind, c.service, c.method].exemplify(c.seconds, labels)
        sums = self._ended[f"{c.service}/{c.method}", c.code]
        sums.seconds.exemplify(c.seconds, labels)
        sums.bytes_in.exemplify(c.bytes_in, labels)
        sums.bytes_out.exemplify(c.bytes_out, labels)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        handling = HistogramMetricFamily(
            "grpc_server_handling_seconds", "Time from begin to end of an RPC.", labels=_RPC
        )
        for labels, tally in list(self._handling.items()):
            tally.into(handling, labels)
        yield handling
        begun = CounterMetricFamily("grpc_server_call_started", "Calls begun.", labels=("grpc_method",))
        for method, n in list(self._started.items()):
            begun.add_metric((method,), n)
        yield begun
        for name, text, which in (
            ("duration_seconds", "Time of a call.", "seconds"),
            ("rcvd_total_compressed_message_size_bytes", "Bytes of a call's requests.", "bytes_in"),
            ("sent_total_compressed_message_size_bytes", "Bytes of a call's answers.", "bytes_out"),
        ):
            family = HistogramMetricFamily(f"grpc_server_call_{name}", text, labels=("grpc_method", "grpc_status"))
            for (method, code), sums in list(self._ended.items()):
                getattr(sums, which).into(family, (method, code))
            yield family
