"""What Prometheus sees of new weights: bytes that came, time that they took, which version each layer serves."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge

__all__ = ["OUTCOMES", "UpdateMetrics"]

OUTCOMES = ("committed", "rolled_back", "aborted", "failed")


class UpdateMetrics:
    """The series of one server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._updates = Counter(
            "expertd_updates", "Updates of the weights that ended, by outcome.", ("outcome",), registry=registry
        )
        for outcome in OUTCOMES:
            self._updates.labels(outcome)
        self._bytes = Counter(
            "expertd_update_bytes", "Bytes of new weights that were put for experts held here.", registry=registry
        )
        self._packing = Counter(
            "expertd_update_packing_seconds",
            "Time of reading, quantizing, packing and checking layers of new weights.",
            registry=registry,
        )
        self._version = Gauge(
            "expertd_weights_version",
            "Number of the version of the weights that is served.",
            ("layer",),
            registry=registry,
        )
        self._layers: set[str] = set()

    def put(self, nbytes: int) -> None:
        """So many bytes came."""
        self._bytes.inc(nbytes)

    def ended(self, outcome: str, packing_s: float) -> None:
        """outcome: of OUTCOMES; packing_s: seconds of its layers."""
        self._updates.labels(outcome).inc()
        self._packing.inc(packing_s)

    def serve(self, versions: Mapping[int, int]) -> None:
        """These layers are served with these versions from now on, and no others."""
        now = {str(layer): version for layer, version in versions.items()}
        for layer in self._layers - set(now):
            self._version.remove(layer)
        for layer, version in now.items():
            self._version.labels(layer).set(version)
        self._layers = set(now)
