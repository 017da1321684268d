"""What each device does of layers that several share: calls, routes and time, read when somebody scrapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from expertd_server.engine.joined import PartTimes
from expertd_server.engine.report import Moves

__all__ = ["PartMetrics"]


class PartMetrics(Collector):
    """devices: as in --device; times: of each of them, so far; moves: of experts among them."""

    def __init__(
        self,
        devices: Sequence[str],
        times: Callable[[], Sequence[PartTimes]],
        moves: Callable[[], Moves] = lambda: Moves(),
    ) -> None:
        self._devices, self._times, self._moves = tuple(devices), times, moves

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
        found = self._moves()
        moved = CounterMetricFamily("expertd_part_moves", "Experts that changed their device (--move-rate).")
        moved.add_metric((), found.experts)
        nbytes = CounterMetricFamily("expertd_part_moved_bytes", "Packed weights that were made for that.")
        nbytes.add_metric((), found.nbytes)
        failed = CounterMetricFamily("expertd_part_moves_failed", "Layers that could not be made; the log says why.")
        failed.add_metric((), found.failed)
        return [calls, routes, seconds, moved, nbytes, failed]
