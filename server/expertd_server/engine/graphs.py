"""Small batches on an NVIDIA GPU are replayed from CUDA graphs: launching copies and a layer's kernels one by one costs
the host more than the device takes (one token of Qwen3's int4 layer on an H200: 410 us launched, 27 us replayed).

A graph holds addresses, so it belongs to one lane's buffers, one generation of a layer and one size (sizes.py).  Only
for rows of the table that may be captured.

Graphs of all lanes of an engine run on one stream, one after another, so what their calls allocate comes from one pool.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch

from expertd_kernels.sizes import CAPTURED_TOKENS
from expertd_server.engine.served import ServedLayer

__all__ = ["MOST_TOKENS", "Graph", "Graphs", "free_now", "graph_key", "record", "supported"]

log = logging.getLogger(__name__)

MOST_TOKENS = CAPTURED_TOKENS
"""Larger batches take the device longer than the host."""
_MOST_GRAPHS = 2048
_WORTH = 2
"""A size is captured when it has come this often."""


Key = tuple[int, ...]
"""The generation of the layer, then whatever else tells one graph from another."""


def graph_key(layer: ServedLayer, router_weight_on_input: bool, tokens: int, top_k: int, *addresses: int) -> Key:
    """addresses: of all buffers that a graph reads and writes outside of the layer."""
    return (layer.generation, router_weight_on_input, tokens, top_k, *addresses)


class Graph(NamedTuple):
    """replay() launches it; copied and computed: its events when the inputs are there and when the output is; nbytes:
    of the device's memory, that went when it was captured, as the driver tells."""

    replay: Callable[[], object]
    copied: Any
    computed: Any
    nbytes: int


def supported(device: torch.device) -> bool:
    """Whether calls are captured there: on an NVIDIA GPU, by a torch whose graphs can hold timing events."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    try:
        _event()
    except TypeError:
        return False
    return True


def free_now() -> int:
    """Bytes of the current GPU's memory that nobody has."""
    return int(torch.cuda.mem_get_info()[0])


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]


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


class Graphs:
    """The graphs of one lane; for the engine's thread, on the stream that is current.

    pool: of memory, of all lanes of a stream; most: how many are kept"""

    def __init__(self, pool: Any, most: int = _MOST_GRAPHS) -> None:
        self.most = most
        self._pool = pool
        self._found: OrderedDict[Key, Graph] = OrderedDict()
        self._seen: Counter[Key] = Counter()
        self._works = True

    def __len__(self) -> int:
        return len(self._found)

    @property
    def nbytes(self) -> int:
        """Device memory that the graphs took."""
        return sum(g.nbytes for g in self._found.values())

    def get(self, key: Key) -> Graph | None:
        """What was captured as `key`."""
        graph = self._found.get(key)
        if graph is not None:
            self._found.move_to_end(key)
        return graph

    def forget(self, generations: Collection[int]) -> None:
        """Drop the graphs of layers that are not held any more: a graph keeps its layer's memory alive."""
        for kept in (self._found, self._seen):
            for key in [key for key in kept if key[0] in generations]:
                del kept[key]

    def capture(self, key: Key, body: Callable[[Any, Any], None]) -> None:
        """Capture body(copied, computed), whose like was run just now and is warm, if the key comes often enough.  It
        records the two events and is not run by this."""
        if len(self._seen) > 4 * self.most:  # callers may vary top_k at will
            self._seen.clear()
        self._seen[key] += 1
        if not self._works or self._seen[key] < _WORTH or key in self._found:
            return
        free = free_now()
        graph, copied, computed = torch.cuda.CUDAGraph(), _event(), _event()
        try:
            record(graph, self._pool, lambda: body(copied, computed))
        except RuntimeError as e:
            self._works = False
            log.warning("a call could not be captured in a CUDA graph, so none is from now on: %s", e)
            return
        self._found[key] = Graph(graph.replay, copied, computed, max(0, free - free_now()))
        if len(self._found) > self.most:
            self._found.popitem(last=False)
