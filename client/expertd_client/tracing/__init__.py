"""What calls did, and when: recorded by trace(), written for Chrome's and Perfetto's trace viewers."""

from expertd_client.tracing.recorder import Module, SubRequestTrace, Trace, TracedCall, trace

__all__ = ["Module", "SubRequestTrace", "Trace", "TracedCall", "trace"]
