"""What each device does of layers that several share: calls, routes and time, read when somebody scrapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from expertd_server.engine.joined import PartTimes

__all__ = ["PartMetrics"]


class PartMetrics(Collector):
    """devices: as in --device; times: of each of them, so far."""

    def __init__(self, devices: Sequence[str], times: Callable[[], Sequence[PartTimes]]) -> None:
        self._devices, self._times = tuple(devices), times

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        calls = CounterMetricFamily(
            "expertd_part_calls", "Batches in which a device of --device had experts to compute.", labels=("device",)
        )
        routes = CounterMetricFamily("expertd_part_routes", "Routes that it computed.", labels=("device",))
        seconds = CounterMetricFamily(
            "expertd_part_seconds",
            "Time that its part of batches took; of an accelerator at most: until the host had computed its own.",
            labels=("device",),
        )
        for name, t in zip(self._devices, self._times(), strict=True):
            calls.add_metric((name,), t.calls)
            routes.add_metric((name,), t.routes)
            seconds.add_metric((name,), t.ns * 1e-9)
        return [calls, routes, seconds]
