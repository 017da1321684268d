"""What calls did, and when: recorded by trace(), written for Chrome's and Perfetto's trace viewers."""

from expertd_client.tracing.recorder import Trace, trace
from expertd_client.tracing.records import Module, SubRequestTrace, TracedCall

__all__ = ["Module", "SubRequestTrace", "Trace", "TracedCall", "trace"]
