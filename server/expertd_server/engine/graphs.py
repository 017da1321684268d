"""Capturing CUDA graphs.  A graph replays a batch's launches in one: launching copies and a layer's kernels one by one
costs the host more than the device takes (one token of Qwen3's int4 layer on an H200: 410 us launched, 27 us replayed).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["free_now", "record"]


def free_now() -> int:
    """Bytes of the current GPU's memory that nobody has."""
    return int(torch.cuda.mem_get_info()[0])


def record(graph: Any, pool: Any, body: Callable[[], object]) -> None:
    """Capture body() in `graph`, a torch.cuda.CUDAGraph.  RuntimeError: it cannot be captured.

    A capture that fails leaves the device's default generator inside of it (torch 2.11: the end raises before it lets
    go of it), and every later draw of this process would raise: it gets a state of its own again."""
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            body()
        finally:
            graph.capture_end()
    except RuntimeError:
        _free_generator()
        raise


def _free_generator() -> None:
    generator: Any = torch.cuda.default_generators[torch.cuda.current_device()]
    fresh: Any = torch.Generator(generator.device)
    fresh.manual_seed(generator.initial_seed())
    generator.graphsafe_set_state(fresh.graphsafe_get_state())
