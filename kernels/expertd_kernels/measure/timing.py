"""Microseconds of a call: by the clock as a caller sees it, or replayed from CUDA graphs as a server does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import cache

import torch

__all__ = ["LIMIT_S", "captured", "time_calls"]

ROUNDS = 5
LIMIT_S = 1.0
"""Time for one backend at one token count.  A call that alone takes longer than its share is timed once; a backend with
a call that takes longer than all of it is not timed at larger counts."""


def time_calls(call: Callable[[int], object], inputs: int, device: torch.device, rounds: int = ROUNDS) -> float:
    """Median microseconds of call(i), i going round the input sets so that weights come from memory, not from cache.
    As many rounds as LIMIT_S allows, at most `rounds`."""

    def timed(indices: Iterable[int]) -> float:
        begin = time.perf_counter_ns()
        for i in indices:
            call(i)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elif device.type == "xpu":
            torch.xpu.synchronize(device)
        return (time.perf_counter_ns() - begin) / 1e3

    timed([0])  # compiles, chooses, allocates
    once = timed([0])
    fit = min(rounds, int(LIMIT_S * 1e6 / (once * inputs)))
    if fit < 1:
        return once
    times = sorted(timed(range(inputs)) / inputs for _ in range(fit))
    return times[len(times) // 2]


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The same for all captures: a stream has its own scratch memory."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def captured(call: Callable[[int], object], inputs: int, device: torch.device) -> Callable[[int], object]:
    """call(i) for i < inputs, each replayed from a CUDA graph that was captured on the current stream, or on a side
    stream where that is the default one, which cannot be captured."""
    stream = torch.cuda.current_stream(device)
    if stream == torch.cuda.default_stream(device):
        stream = _side_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
    graphs = []
    with torch.cuda.stream(stream):
        for i in range(inputs):
            call(i)  # what is captured must be warm
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                call(i)
            finally:
                graph.capture_end()
            graphs.append(graph)
    stream.synchronize()
    return lambda i: graphs[i].replay()
