"""docs/metrics.md: every series of a server, read from a registry that has seen one of everything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from prometheus_client.core import Metric

from expertd_server.engine.joined import PartTimes
from expertd_server.engine.report import BatchReport, LoadNow, RequestReport, Waits, stages_of
from expertd_server.engine.request import Stages
from expertd_server.engine.served import ServedLayer
from expertd_server.views.call_metrics import Rpc
from expertd_server.views.gpu_metrics import GpuFacts
from expertd_server.views.metrics import BackendFacts, Metrics
from expertd_server.views.part_metrics import PartMetrics

__all__ = ["Series", "markdown", "seen_everything", "table"]

_NO_KERNEL: Any = None
_UNITS: Mapping[str, str] = {"seconds": "s", "bytes": "bytes", "tokens": "tokens"}
_SUFFIXES: Mapping[str, Sequence[str]] = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",)}


@dataclass(frozen=True)
class Series:
    """One metric.  name: as it is queried, without a histogram's suffixes; labels: `le` left out; exemplars: it can
    have some."""

    name: str
    kind: str
    unit: str
    labels: tuple[str, ...]
    text: str
    exemplars: bool

    @property
    def names(self) -> set[str]:
        """All names under which samples come."""
        if self.kind == "histogram":
            return {self.name + s for s in _SUFFIXES["histogram"]}
        return {self.name}


def table() -> list[Series]:
    """In the order of a scrape; what the process itself tells comes last."""
    found = [_series(m) for m in seen_everything().registry.collect()]
    return sorted(found, key=lambda s: s.name.startswith("process_"))


def markdown(note: str) -> str:
    lines = list(_rows(table()))
    return f"""# Metrics

{note}

`expertd serve --metrics-listen HOST:PORT` serves these series at `/metrics` in Prometheus' text format.

- A histogram has the names `_bucket` (with the label `le`), `_sum` and `_count`.
- `expertd_expert_tokens_total` has a series for each expert of each layer, 6,000 to 23,000 for a large model. It needs
  `--expert-metrics yes`.
- `grpc_server_call_*` are the names of gRPC's OpenTelemetry plugins (proposal A66), as Prometheus spells them.
- `*_created` are the times at which series began.
- `expertd_gpu_*` needs an NVIDIA GPU and the extra `nvml`.
- With `--traces yes` and in OpenMetrics format, histograms with a star have exemplars (`trace_id`, `span_id`): the last
  traced request in each bucket.

| name | kind | unit | what | labels |
|---|---|---|---|---|
{chr(10).join(lines)}

[errors.md](errors.md) explains `code` and `reason`. Queries and alerts: [operations.md](operations.md),
[deploy/prometheus](../deploy/prometheus/alerts.yaml).
"""


def _rows(series: Sequence[Series]) -> Iterator[str]:
    for s in series:
        labels = ", ".join(s.labels) or "-"
        kind = rf"{s.kind} \*" if s.exemplars else s.kind
        yield f"| `{s.name}` | {kind} | {s.unit} | {s.text} | {labels} |"


def _series(m: Metric) -> Series:
    samples = [s for s in m.samples if not s.name.endswith("_created")]
    if not samples:
        raise ValueError(f"{m.name}: no sample was made of it; docs/metrics_page.py has to make one of everything")
    name = m.name + (_SUFFIXES["counter"][0] if m.type == "counter" else "")
    words = m.name.split("_")
    unit = next((_UNITS[w] for w in reversed(words) if w in _UNITS), "1")
    labels = tuple(label for label in samples[0].labels if label != "le")
    return Series(name, m.type, unit, labels, m.documentation, any(s.exemplar for s in samples))


class SeenGpu:
    """As much of the module pynvml as is read, of a GPU that tells everything."""

    NVMLError = RuntimeError
    NVML_TEMPERATURE_GPU = NVML_CLOCK_SM = NVML_CLOCK_MEM = NVML_VOLATILE_ECC = 0
    NVML_MEMORY_ERROR_TYPE_CORRECTED = NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0
    nvmlEventTypeXidCriticalError = 0  # noqa: N815 - NVML's name

    def __init__(self) -> None:
        self._xids = [79]

    def nvmlEventSetWait(self, events: Any, timeout_ms: int) -> Any:  # noqa: N802 - NVML's name
        if not self._xids:
            raise RuntimeError("timeout")
        return SimpleNamespace(eventData=self._xids.pop())

    def __getattr__(self, name: str) -> Any:
        facts = SimpleNamespace(gpu=1, memory=1, total=1, used=1, free=1)
        return lambda *_: facts if name in ("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetMemoryInfo") else 1


def seen_everything() -> Metrics:
    """Metrics with a sample of each series."""
    metrics = Metrics()
    rpc = Rpc(metrics.calls, "unary", "Forward")
    rpc.started()
    rpc.received()
    rpc.sent()
    rpc.ended("OK", 0.1, 1, 1)
    metrics.answered()
    layer = ServedLayer(0, 8, (0, 1), 2, 16, 32, _NO_KERNEL, "reference")
    stages = Stages(1, 1, 1)
    metrics.batch(BatchReport(layer, "reference", 1, 1, Waits.of([1]), stages, np.array([1, 1])))
    own = rpc.report("OK", 0.1, 1, 1)
    way = stages_of(0, 1, 1, 1, 4)
    metrics.exemplify(RequestReport(b"", "unary", 0, 1, 2, "", "reference", 1, 1, 0, 4, way, stages, own), "1", "2")
    metrics.updates.serve({3: 2})
    metrics.hold([BackendFacts(0, "reference", "int4_g128", "none", "cpu", "order", False)])
    metrics.booted({"plan": 1.0}, {"hit": 1})
    metrics.reloaded("tls", True)
    metrics.connection_cut("half-sent messages hold too much")
    metrics.plan({"weights": 1})
    metrics.registry.register(GpuFacts(SeenGpu(), None))
    metrics.watch_load(lambda: LoadNow(0, 0, 0.0, False))
    metrics.registry.register(PartMetrics(["cpu"], lambda: [PartTimes(1, 1, 1)]))
    metrics.untraced.inc(0)
    metrics.watch_device(lambda: {"free": 1, "reserved": 1, "allocated": 1})
    return metrics
