"""The device's executor: how a batch runs there, and the CUDA graphs that the core replays by itself from then on.

A batch is described by its lane's table in pinned memory (expertd_kernels/rows).  Python launches it the first times a
size comes: collect, experts, deliver, the word.  The second time its pieces are captured and given to the core: the
experts for each layer, collect and deliver for all layers of one hidden size.  Up to a few rows, and whatever the size
where all rows lie on the device already, the whole batch is one graph as well: one launch instead of three.
"""

from __future__ import annotations

import ctypes as C
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from expertd.shm.cuda import device_refusal
from expertd.shm.pool import Pool
from expertd_kernels.oracle.probe import device_fault
from expertd_kernels.rows.kernels import collect, deliver, signal
from expertd_kernels.rows.table import WORDS
from expertd_kernels.weights.numerics import COMPUTE_DTYPE
from expertd_server.engine import core as c
from expertd_server.engine.lane import compute_stream
from expertd_server.engine.request import Array
from expertd_server.engine.served import ServedLayer
from expertd_server.engine.sizes import LANES, STREAMED_ROWS, WHOLE_ROWS, padded

__all__ = ["DeviceExecutor", "supported"]

log = logging.getLogger(__name__)

_WORTH = 2
"""A size is captured when it has come this often."""
_PORTABLE, _MAPPED = 1, 2
"""Flags of cudaHostRegister."""


def supported(device: torch.device) -> str:
    """ "" where batches run as graphs that the core launches, else what is missing."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "the core launches graphs on NVIDIA GPUs only"
    if not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph"):
        return f"torch {torch.__version__} does not give its graphs away; 2.9 does"
    return ""


class _Lane:
    """One lane's memory: pinned on the host, and on the device."""

    def __init__(self, tokens: int, k: int, H: int, dtype: torch.dtype, device: torch.device) -> None:
        def pinned(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=True)

        self.table = pinned(tokens, WORDS, dtype=torch.int64)
        self.verdicts, self.done = pinned(tokens, 2, dtype=torch.int32), pinned(16, dtype=torch.int32)
        self.host = [
            pinned(tokens * H, dtype=dtype),
            pinned(tokens * k, dtype=torch.int32),
            pinned(tokens * k, dtype=torch.float32),
            pinned(tokens * H, dtype=dtype),
        ]
        self.hidden, self.out = (torch.empty(tokens * H, dtype=dtype, device=device) for _ in range(2))
        self.slots = torch.empty(tokens * k, dtype=torch.int32, device=device)
        self.weights = torch.empty(tokens * k, dtype=torch.float32, device=device)

    def memory(self) -> c.LaneMemory:
        hidden, slots, weights, out = (t.data_ptr() for t in self.host)
        return c.LaneMemory(
            table=self.table.data_ptr(),
            verdicts=self.verdicts.data_ptr(),
            done=self.done.data_ptr(),
            hidden=hidden,
            slots=slots,
            weights=weights,
            out=out,
            device_hidden=self.hidden.data_ptr(),
            device_out=self.out.data_ptr(),
        )


class DeviceExecutor:
    """For the engine's thread.  `core` is set by the engine before the first batch."""

    lanes = LANES
    streamed_rows = STREAMED_ROWS

    def __init__(self, device: torch.device, compute_dtype: str) -> None:
        self._device, self._dtype = device, COMPUTE_DTYPE[compute_dtype]
        api: Any = torch.cuda
        self.streams: Any = (compute_stream(device), api.Stream(device), api.Stream(device))
        self._counting: Any = api.Stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._runtime: Any = api.cudart()
        self._index: int = api.current_device() if device.index is None else device.index
        self.core: c.Core
        self._lanes: list[_Lane] = []
        self._size = (0, 0, 0)
        self._facts: dict[int, tuple[Tensor, Tensor]] = {}  # by generation
        self._seen: Counter[tuple[int, ...]] = Counter()
        self._kept: dict[int, list[Any]] = {}  # graphs by generation, 0 = those of all layers
        self._captured: set[tuple[int, ...]] = set()
        self._works = True
        self._driver = C.CDLL("libcuda.so.1")

    def reserve(self, tokens: int, layers: Iterable[ServedLayer]) -> list[c.LaneMemory]:
        sizes = [(s.num_experts, s.hidden_size) for s in layers] or [(1, 1)]
        wanted = (padded(tokens), max(k for k, _ in sizes), max(H for _, H in sizes))
        if any(want > have for want, have in zip(wanted, self._size, strict=True)):
            self._size = (max(wanted[0], self._size[0]), max(wanted[1], self._size[1]), max(wanted[2], self._size[2]))
            self.core.forget_graphs()  # they hold addresses
            self._kept.clear()
            self._captured.clear()
            self._lanes = []
            self._lanes = [_Lane(*self._size, self._dtype, self._device) for _ in range(LANES)]
        return [lane.memory() for lane in self._lanes]

    def facts(self, layer: ServedLayer) -> tuple[int, int]:
        """Addresses of its slots and of its counts of routes on the device."""
        slots = torch.from_numpy(layer.slot_of).to(self._device)
        counts = torch.zeros(max(1, len(layer.held)), dtype=torch.int64, device=self._device)
        self._facts[layer.generation] = (slots, counts)
        return slots.data_ptr(), counts.data_ptr()

    def counts(self, generation: int) -> Array | None:
        found = self._facts.get(generation)
        if found is None:
            return None
        with torch.cuda.stream(self._counting):
            host = torch.empty(found[1].shape, dtype=torch.int64, pin_memory=True)
            host.copy_(found[1], non_blocking=True)
        self._counting.synchronize()
        return host.numpy()

    def register(self, address: int, nbytes: int) -> None:
        with torch.cuda.device(self._device):
            error = int(self._runtime.cudaHostRegister(address, nbytes, _PORTABLE | _MAPPED))
        if error:
            raise OSError(f"{nbytes} bytes of shared memory cannot be pinned: CUDA error {error}")

    def unregister(self, address: int) -> None:
        with torch.cuda.device(self._device):
            self._runtime.cudaHostUnregister(address)

    def pool(self, nbytes: int) -> Pool:
        return Pool.create(self._index, nbytes)

    def pool_refusal(self) -> str:
        return device_refusal(self._index)

    def run(self, run: c.Run, layer: ServedLayer) -> None:
        lane = self._lanes[run.lane]
        rows = padded(run.tokens) if layer.capturable else run.tokens
        lane.table[run.tokens : rows, 4] = 0
        parts = self._parts(lane, rows, run.top_k, bool(run.router_weight_on_input), layer)
        with torch.cuda.stream(self.streams[0]):
            parts[c.WHOLE]()
            if layer.capturable:
                self._capture(run, rows, layer, parts)

    def _parts(
        self, lane: _Lane, rows: int, k: int, on_input: bool, layer: ServedLayer
    ) -> dict[int, Callable[[], None]]:
        H = layer.hidden_size
        hidden, out = lane.hidden[: rows * H].view(rows, H), lane.out[: rows * H].view(rows, H)
        slots, weights = lane.slots[: rows * k].view(rows, k), lane.weights[: rows * k].view(rows, k)
        done = lane.done[:1]

        def experts() -> None:
            layer.experts(hidden, slots, weights, router_weight_on_input=on_input, out=out)

        def bring() -> None:
            collect(lane.table, rows, hidden, slots, weights, lane.verdicts)

        def bring_routes() -> None:
            collect(lane.table, rows, None, slots, weights, lane.verdicts)

        def take() -> None:
            deliver(lane.table, rows, out)
            signal(done)

        def whole() -> None:
            bring()
            experts()
            take()

        return {c.WHOLE: whole, c.EXPERTS: experts, c.COLLECT: bring, c.COLLECT_ROUTES: bring_routes, c.DELIVER: take}

    def _capture(self, run: c.Run, rows: int, layer: ServedLayer, parts: dict[int, Callable[[], None]]) -> None:
        """Capture the pieces of a size that comes often; what has just run is warm."""
        size = (layer.generation, run.lane, rows, run.top_k, run.router_weight_on_input)
        self._seen[size] += 1
        if not self._works or self._seen[size] < _WORTH:
            return
        H, flag = layer.hidden_size, run.router_weight_on_input
        wanted = [(c.EXPERTS, run.top_k, flag), (c.COLLECT, run.top_k, H), (c.DELIVER, 0, H)]
        if rows >= STREAMED_ROWS:
            wanted.append((c.COLLECT_ROUTES, run.top_k, H))
        if rows <= WHOLE_ROWS or run.whole:
            wanted.append((c.WHOLE, run.top_k, flag))
        for part, k, last in wanted:
            own = layer.generation if part in (c.WHOLE, c.EXPERTS) else 0
            key = (own, part, run.lane, rows, k, last)
            if key in self._captured:
                continue
            graph = self._graph(parts[part])
            if graph is None:
                return
            self._captured.add(key)
            self._kept.setdefault(own, []).append(graph)
            self.core.add_graph(layer.layer, layer.generation, part, run.lane, rows, k, last, graph[1])

    def _graph(self, body: Callable[[], None]) -> tuple[Any, int] | None:
        """(torch's graph, the driver's executable) of body(); None: it cannot be captured, nor anything from now on."""
        graph, made = torch.cuda.CUDAGraph(keep_graph=True), C.c_void_p()
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                body()
            finally:
                graph.capture_end()
            raw = C.c_void_p(graph.raw_cuda_graph())
            error = self._driver.cuGraphInstantiateWithFlags(C.byref(made), raw, C.c_ulonglong(0))
            if error:
                raise RuntimeError(f"instantiating a graph: CUDA error {error}")
        except RuntimeError as e:
            self._works = False
            log.warning("a call could not be captured in a CUDA graph, so none is from now on: %s", e)
            return None
        assert made.value is not None
        return graph, made.value

    def fault(self) -> str:
        return device_fault(self._device)

    def forget(self, generations: Collection[int]) -> None:
        """Drop the graphs of layers that are not held any more: a graph keeps its layer's memory alive."""
        for generation in generations:
            self._facts.pop(generation, None)
            for _, made in self._kept.pop(generation, []):
                self._driver.cuGraphExecDestroy(C.c_void_p(made))
        self._captured = {key for key in self._captured if key[0] not in generations}
        for key in [key for key in self._seen if key[0] in generations]:
            del self._seen[key]
