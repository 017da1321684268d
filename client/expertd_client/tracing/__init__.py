"""What calls did, as a picture of time: for Chrome's and Perfetto's trace viewers, and as SVG."""

from expertd_client.tracing.recorder import Module, Part, Trace, TracedCall, trace

__all__ = ["Module", "Part", "Trace", "TracedCall", "trace"]
