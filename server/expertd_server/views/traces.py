"""The way of traced requests as OpenTelemetry's spans, and as exemplars of the histograms.

A request is traced when its caller records a trace and says so (`traceparent`, of the request or of the call): who
samples is the caller.  What is known of it is put into a queue when it is answered; a thread of its own makes spans
of that, so they cost the request a few microseconds, and nothing where they are off.

    expertd.v1.ExpertService/StreamForward     from the request's arrival until it is answered; one that is a call
                                               of its own has that call's name
      queue, collect, kernel, deliver          its batch's

Spans go where the process's OpenTelemetry SDK sends them: without one nobody sees them.
"""

from __future__ import annotations

import logging
import threading
import time
from queue import SimpleQueue
from typing import Any

from expertd_server.engine.report import RequestReport
from expertd_server.views.call_metrics import SERVICE
from expertd_server.views.metrics import VERSION, Metrics

# Why it is so: decision 136 in DECISIONS.md.
__all__ = ["Traces", "TracesMissingError"]

log = logging.getLogger(__name__)

_MOST_WAITING = 16_384
_END_S = 2.0


class TracesMissingError(ImportError):
    """opentelemetry-api is not installed."""


class Traces:
    """add() from any thread.  provider: OpenTelemetry's TracerProvider, None = that of this process.

    Raises TracesMissingError."""

    def __init__(self, metrics: Metrics, provider: Any = None) -> None:
        try:
            from opentelemetry import trace
        except ImportError as e:
            raise TracesMissingError(f"opentelemetry-api: {e}; pip install 'opentelemetry-api>=1.30,<2'") from e
        self._api: Any = trace
        self._tracer = trace.get_tracer("expertd", VERSION, tracer_provider=provider)
        self._metrics = metrics
        self._waiting: SimpleQueue[RequestReport | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="expertd-traces", daemon=True)
        self._thread.start()

    def add(self, r: RequestReport) -> None:
        """A request was answered.  Where more come than spans are made it is counted, and forgotten."""
        if self._waiting.qsize() < _MOST_WAITING:
            self._waiting.put(r)
        else:
            self._metrics.untraced.inc()

    def close(self) -> None:
        """What was added before becomes spans first, for two seconds at most."""
        self._waiting.put(None)
        self._thread.join(_END_S)

    def _run(self) -> None:
        while (r := self._waiting.get()) is not None:
            try:
                self._tell(r)
            except Exception:  # an exporter's fault must not end the telling
                log.exception("a request's spans could not be made")

    def _tell(self, r: RequestReport) -> None:
        api = self._api
        behind_ns = time.time_ns() - time.monotonic_ns()
        caller = api.SpanContext(
            int.from_bytes(r.context[:16], "big"),
            int.from_bytes(r.context[16:24], "big"),
            is_remote=True,
            trace_flags=api.TraceFlags(api.TraceFlags.SAMPLED),
        )
        service, method = (r.call.service, r.call.method) if r.call else (SERVICE, "StreamForward")
        span = self._tracer.start_span(
            f"{service}/{method}",
            api.set_span_in_context(api.NonRecordingSpan(caller)),
            api.SpanKind.SERVER,
            {
                "rpc.system": "grpc",
                "rpc.service": service,
                "rpc.method": method,
                "expertd.transport": r.transport,
                "expertd.layer": r.layer,
                "expertd.tokens": r.tokens,
                "expertd.top_k": r.top_k,
                **_batch(r),
            },
            start_time=r.arrival_ns + behind_ns,
        )
        inside = api.set_span_in_context(span)
        for name, begin, end in r.stages:
            stage = self._tracer.start_span(name, inside, start_time=begin + behind_ns)
            stage.end(end + behind_ns)
        if r.reason:
            span.set_attribute("error.type", r.reason)
            span.set_status(api.StatusCode.ERROR, r.reason)
        span.end(r.answered_ns + behind_ns)
        told = span.get_span_context()
        if told.trace_flags.sampled:
            self._metrics.exemplify(r, f"{told.trace_id:032x}", f"{told.span_id:016x}")


def _batch(r: RequestReport) -> dict[str, Any]:
    if not r.stages:
        return {}
    return {
        "expertd.backend": r.backend,
        "expertd.batch_tokens": r.batch_tokens,
        "expertd.batch_requests": r.batch_requests,
    }
