"""The page at / of the metrics' address, for people who would rather look than read: what is held and by whom it is
computed and why, load, latencies, and how even the experts are hit, live.

page.html is one file that loads nothing from elsewhere; it asks for /page.json every two seconds.  Rates and quantiles
are made there, of what has changed between two answers.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from expertd.common.ranges import format_ranges, format_runs
from expertd.v1 import expert_service_pb2 as pb
from expertd_server.views.metrics import Metrics

__all__ = ["Page"]

_KEPT_S = 0.5
"""So long an answer serves everybody who asks."""
_SERIES = (
    "expertd_serving", "expertd_queued_tokens", "expertd_queued_requests", "expertd_predicted_wait_seconds",
    "expertd_device_bytes", "expertd_planned_bytes", "process_resident_memory_bytes",
)  # fmt: skip
_COUNTED = ("expertd_requests_total", "expertd_tokens_total")
_TIMES = ("expertd_queue_seconds_bucket", "expertd_kernel_seconds_bucket", "expertd_batch_tokens_bucket")


class Page:
    """describe: the answer of Describe, True = with the oracle's verdicts.  Answers from any thread."""

    def __init__(self, metrics: Metrics, describe: Callable[[bool], pb.DescribeResponse]) -> None:
        self._metrics, self._describe = metrics, describe
        self._lock = threading.Lock()
        self._kept: tuple[float, bytes] = (-_KEPT_S, b"")

    def html(self) -> tuple[bytes, str]:
        """The page, and the Content-Security-Policy that allows it its own script and style alone."""
        return _html()

    def facts(self) -> bytes:
        """What it shows, as JSON."""
        with self._lock:
            at_s, answer = self._kept
            if time.monotonic() - at_s >= _KEPT_S:
                answer = json.dumps(self._facts(), separators=(",", ":")).encode()
                self._kept = time.monotonic(), answer
            return answer

    def _facts(self) -> dict[str, Any]:
        described = self._describe(True)
        found = _samples(self._metrics)
        return {
            "at_s": time.time(),
            "version": described.version,
            "family": described.model.family,
            "hidden_size": described.model.hidden_size,
            "groups": _groups(described.layers),
            "experts": [
                {"layer": layer, "imbalance": imbalance, "recent": recent}
                for layer, (imbalance, recent) in sorted(self._metrics.experts().items())
            ],
            **found,
        }


def _samples(metrics: Metrics) -> dict[str, Any]:
    """now: series by name and labels; counts, times (histograms, by their bounds): the same of what only grows."""
    now: dict[str, float] = {}
    counts: dict[str, float] = {}
    times: dict[str, list[tuple[str, float]]] = {}
    for family in metrics.registry.collect():
        for s in family.samples:
            if s.name in _SERIES:
                now[_key(s.name, s.labels)] = s.value
            elif s.name in _COUNTED:
                counts[_key(s.name, s.labels)] = s.value
            elif s.name in _TIMES:
                labels = {k: v for k, v in s.labels.items() if k != "le"}
                times.setdefault(_key(s.name.removesuffix("_bucket"), labels), []).append((s.labels["le"], s.value))
    return {"now": now, "counts": counts, "times": times}


def _key(name: str, labels: Mapping[str, str]) -> str:
    return " ".join([name, *(v for v in labels.values() if v)])


def _groups(layers: Iterable[pb.Layer]) -> list[dict[str, Any]]:
    """Layers that are alike in all that is shown, together: a model has one or two kinds."""
    alike: dict[str, tuple[list[int], dict[str, Any]]] = {}
    for layer in layers:
        about = {
            "scheme": layer.weight_scheme,
            "activations": layer.activation_scheme,
            "backend": layer.backend,
            "chosen_by": layer.chosen_by,
            "experts": format_runs((r.first, r.first + r.count - 1) for r in layer.held),
            "num_experts": layer.num_experts,
            "top_k": layer.top_k,
            "intermediate_size": layer.intermediate_size,
            "from_cache": layer.from_cache,
            "advice": layer.advice.text if layer.HasField("advice") else "",
            "verdicts": [{"backend": v.backend, "refusals": list(v.refusals)} for v in layer.verdicts],
        }
        alike.setdefault(json.dumps(about), ([], about))[0].append(layer.layer)
    return [{"layers": format_ranges(numbers), **about} for numbers, about in alike.values()]


@cache
def _html() -> tuple[bytes, str]:
    text = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    allowed = {}
    for tag in ("script", "style"):
        inside = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert inside is not None
        digest = base64.b64encode(hashlib.sha256(inside[1].encode()).digest()).decode()
        allowed[tag] = f"'sha256-{digest}'"
    policy = (
        f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), policy
