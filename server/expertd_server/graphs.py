"""Small batches on an NVIDIA GPU are replayed from CUDA graphs: launching a layer's kernels one by one costs the host
more than they take.

A graph holds addresses, so it belongs to one lane's buffers, one layer and one size.  Sizes are powers of two, the rest
of a batch has no routes: there are few graphs, and every one is soon there.  Only for rows of the table that may be
captured.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch

from expertd_kernels.timing import CAPTURED_TOKENS

__all__ = ["MOST_TOKENS", "Graphs", "padded", "supported"]

log = logging.getLogger(__name__)

MOST_TOKENS = CAPTURED_TOKENS
"""Larger batches take the device longer than the host."""
_MOST_GRAPHS = 2048
_WORTH = 2
"""A size is captured when it has come this often."""


def supported(device: torch.device) -> bool:
    """Whether calls are captured there."""
    return device.type == "cuda" and torch.version.hip is None


def padded(tokens: int) -> int:
    """The size that a batch of `tokens` is given; itself where it is too large for a graph."""
    return tokens if tokens > MOST_TOKENS else 1 << (tokens - 1).bit_length()


class Graphs:
    """The graphs of one lane; for the engine's thread, on the stream that is current."""

    def __init__(self) -> None:
        self._found: OrderedDict[Hashable, Any] = OrderedDict()
        self._seen: Counter[Hashable] = Counter()
        self._works = True

    def replay(self, key: Hashable) -> bool:
        """Launch what was captured as `key`; False where nothing was."""
        graph = self._found.get(key)
        if graph is None:
            return False
        self._found.move_to_end(key)
        graph.replay()
        return True

    def capture(self, key: Hashable, call: Callable[[], object]) -> None:
        """Capture `call`, which was made just now and is warm, if it comes often enough.  It is not run again."""
        self._seen[key] += 1
        if not self._works or self._seen[key] < _WORTH or key in self._found:
            return
        graph = torch.cuda.CUDAGraph()
        try:
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                call()
            finally:
                graph.capture_end()
        except RuntimeError as e:
            self._works = False
            log.warning("a call could not be captured in a CUDA graph, so none is from now on: %s", e)
            return
        self._found[key] = graph
        if len(self._found) > _MOST_GRAPHS:
            self._found.popitem(last=False)
