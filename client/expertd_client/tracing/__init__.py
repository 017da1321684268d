"""What calls did, and when: recorded by trace(), written for Chrome's and Perfetto's trace viewers."""

from expertd_client.tracing.recorder import Module, Part, Trace, TracedCall, trace

__all__ = ["Module", "Part", "Trace", "TracedCall", "trace"]
