"""Calls that nothing on this host waits for, timed by events on their stream.  Needs torch with CUDA."""

from __future__ import annotations

import time
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from expertd_client.tracing.recorder import Trace
from expertd_client.tracing.records import FROM_GPU_TO_GPU, Module

__all__ = ["timed"]


class _Clock:
    """One GPU's, for one trace: an event whose time by this host's monotonic clock is known but for a wake-up."""

    def __init__(self) -> None:
        self._zero = self.mark()
        self._zero.synchronize()
        self._zero_ns = time.monotonic_ns()

    def mark(self) -> torch.cuda.Event:
        """An event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def ns(self, event: torch.cuda.Event) -> int:
        """When it was; waits for it."""
        event.synchronize()
        return self._zero_ns + round(float(self._zero.elapsed_time(event)) * 1e6)


_CLOCKS: WeakKeyDictionary[Trace, dict[torch.device, _Clock]] = WeakKeyDictionary()


def timed(trace: Trace, layer: int, x: Tensor) -> Callable[[], None]:
    """Call it before a layer's experts are asked for on the current stream of x [M, H]'s GPU, and what it returns
    behind that: trace.modules says, at the trace's end, when the stream came to them and when it had the answer.  What
    is captured into a CUDA graph is not timed."""
    if torch.cuda.is_current_stream_capturing():
        return lambda: None
    clocks = _CLOCKS.setdefault(trace, {})
    with torch.cuda.device(x.device):
        clock = clocks[x.device] if x.device in clocks else clocks.setdefault(x.device, _Clock())
        begin = clock.mark()

    def over() -> None:
        with torch.cuda.device(x.device):
            end = clock.mark()
        name, tokens = str(x.device), len(x)
        trace.before_end.append(
            lambda: trace.modules.append(Module(FROM_GPU_TO_GPU, layer, name, clock.ns(begin), clock.ns(end), tokens))
        )

    return over
