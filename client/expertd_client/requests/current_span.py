"""The trace that a call is made in, where its program uses OpenTelemetry; who does not use it pays for one look."""

from __future__ import annotations

import sys

from expertd.common.trace_context import text_of

__all__ = ["current_traceparent"]

_MODULE = "opentelemetry.trace"


def current_traceparent() -> str:
    """Of the span that this thread, or task, is in; "" where there is none, or nobody records it."""
    trace = sys.modules.get(_MODULE)
    if trace is None:
        return ""
    span = trace.get_current_span().get_span_context()
    if not (span.is_valid and span.trace_flags.sampled):
        return ""
    return text_of(span.trace_id.to_bytes(16, "big") + span.span_id.to_bytes(8, "big"))
