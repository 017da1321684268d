"""The device's executor: how a batch runs there, and the CUDA graphs that the core replays by itself from then on.

A batch is described by a table in the pinned memory of its batch slot (expertd_kernels/rows).  Python launches it the
first times a size comes: collect, experts, deliver, the word.  The second time its pieces are captured and given to the
core: the experts for each layer, collect and deliver for all layers of one hidden size.  Up to a few rows, and whatever
the size where all rows lie on the device already, the whole batch is one graph as well: one launch instead of three.
"""

from __future__ import annotations

import ctypes as C
import logging
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from expertd.common.dtypes import scales_of_row
from expertd.shm.cuda import device_refusal
from expertd.shm.pool import Pool
from expertd_kernels.backends.gather.kernels import collect, collect_e4m3, deliver, signal
from expertd_kernels.backends.gather.table import WORDS
from expertd_kernels.common.protocol import E4m3Experts
from expertd_kernels.oracle.probe import device_fault
from expertd_kernels.weights.numerics import COMPUTE_DTYPE
from expertd_server.engine import core as c
from expertd_server.engine.graphs import GraphPool, free_now
from expertd_server.engine.out_of_memory import compute, unheard
from expertd_server.engine.pieces import Piece, Pieces, Ran, collecting
from expertd_server.engine.plain import compute_stream
from expertd_server.engine.request import Array
from expertd_server.engine.served import ServedLayer
from expertd_server.engine.sizes import BATCH_SLOTS, STREAMED_ROWS, batch_slot_routes, padded

__all__ = ["DeviceExecutor", "supported"]

log = logging.getLogger(__name__)

_PORTABLE, _MAPPED = 1, 2
"""Flags of cudaHostRegister."""


def supported(device: torch.device) -> str:
    """ "" where batches run as graphs that the core launches, else what is missing."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "the core launches graphs on NVIDIA GPUs only"
    if not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph"):
        return f"torch {torch.__version__} does not give its graphs away; 2.9 does"
    return ""


class _BatchSlot:
    """One batch slot's memory: pinned on the host, and on the device, there with an output of its own if it is `apart`.
    routes: slots of all tokens together; coded: columns of e4m3 inputs, 0 = no layer takes them."""

    def __init__(
        self, tokens: int, routes: int, H: int, apart: int, coded: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        def pinned(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=True)

        self.table = pinned(tokens, WORDS, dtype=torch.int64)
        self.verdicts, self.done = pinned(tokens, 2, dtype=torch.int32), pinned(16, dtype=torch.int32)
        self.host = [
            pinned(tokens * H, dtype=dtype),
            pinned(routes, dtype=torch.int32),
            pinned(routes, dtype=torch.float32),
            pinned(tokens * H, dtype=dtype),
        ]
        self.hidden = torch.empty(tokens * H, dtype=dtype, device=device)
        self.out = torch.empty_like(self.hidden) if apart else self.hidden
        self.codes = torch.empty(tokens * coded, dtype=torch.float8_e4m3fn, device=device)
        self.scales = torch.empty(tokens * scales_of_row(coded), dtype=torch.float32, device=device)
        self.slots = torch.empty(routes, dtype=torch.int32, device=device)
        self.weights = torch.empty(routes, dtype=torch.float32, device=device)

    def memory(self) -> c.BatchSlotMemory:
        hidden, slots, weights, out = (t.data_ptr() for t in self.host)
        return c.BatchSlotMemory(
            table=self.table.data_ptr(),
            verdicts=self.verdicts.data_ptr(),
            done=self.done.data_ptr(),
            hidden=hidden,
            slots=slots,
            weights=weights,
            out=out,
            device_hidden=self.hidden.data_ptr(),
            device_out=self.out.data_ptr(),
            device_codes=self.codes.data_ptr(),
            device_scales=self.scales.data_ptr(),
        )


class _Rows:
    """The first `number` rows of a batch slot, as a batch of a layer is launched on them: its pieces."""

    def __init__(self, batch_slot: _BatchSlot, layer: ServedLayer, number: int, top_k: int, on_input: bool) -> None:
        def rows(of: Tensor, columns: int) -> Tensor:
            return of[: number * columns].view(number, columns)

        H = layer.hidden_size
        self.number, self._batch_slot, self._layer, self._on_input = number, batch_slot, layer, on_input
        self._hidden, self._out = rows(batch_slot.hidden, H), rows(batch_slot.out, H)
        self._slots, self._weights = rows(batch_slot.slots, top_k), rows(batch_slot.weights, top_k)
        if layer.takes_e4m3:
            self._codes, self._scales = rows(batch_slot.codes, H), rows(batch_slot.scales, scales_of_row(H))

    def compute(self, a: int, z: int) -> None:
        """The experts of rows a to z."""
        part, on_input = slice(a, z), self._on_input
        routes, out = (self._slots[part], self._weights[part]), self._out[part]
        if self._layer.takes_e4m3:
            experts = cast(E4m3Experts, self._layer.experts)
            experts.of_e4m3(self._codes[part], self._scales[part], *routes, router_weight_on_input=on_input, out=out)
        else:
            self._layer.experts(self._hidden[part], *routes, router_weight_on_input=on_input, out=out)

    def collect(self, streamed: bool = False) -> None:
        """streamed: copy engines have brought the hidden states."""
        batch_slot, routes = self._batch_slot, (self._slots, self._weights, self._batch_slot.verdicts)
        if self._layer.takes_e4m3:
            staged = self._hidden if streamed else None
            collect_e4m3(batch_slot.table, self.number, self._codes, self._scales, *routes, staged)
        else:
            collect(batch_slot.table, self.number, None if streamed else self._hidden, *routes)

    def collect_again(self) -> None:
        """What the experts read, where they may have written over it; collecting counts routes, so not for nothing."""
        if self._batch_slot.out is self._batch_slot.hidden and not self._layer.takes_e4m3:
            self.collect()

    def deliver(self) -> None:
        deliver(self._batch_slot.table, self.number, self._out)
        signal(self._batch_slot.done[:1])

    def warm(self) -> None:
        """Call the experts for no route, before their first batch: what a first call makes cannot be captured."""
        self._slots.fill_(-1)
        self.compute(0, self.number)

    def _whole(self) -> None:
        self.collect()
        self.compute(0, self.number)
        self.deliver()

    def parts(self) -> dict[int, Callable[[], None]]:
        """By what the core calls them."""
        bring, streamed = collecting(self._layer)
        return {
            c.WHOLE: self._whole,
            c.EXPERTS: partial(self.compute, 0, self.number),
            bring: self.collect,
            streamed: partial(self.collect, streamed=True),
            c.DELIVER: self.deliver,
        }


class DeviceExecutor:
    """For the engine's thread.  `core` is set by the engine before the first batch."""

    batch_slots = BATCH_SLOTS
    streamed_rows = STREAMED_ROWS

    def __init__(self, device: torch.device, compute_dtype: str, warm_routes: Iterable[int] = ()) -> None:
        self._device, self._dtype = device, COMPUTE_DTYPE[compute_dtype]
        api: Any = torch.cuda
        self.stream: Any = compute_stream(device)
        self.streams: Any = (self.stream, compute_stream(device), compute_stream(device))
        self._counting: Any = api.Stream(device)
        self._pool = GraphPool()
        self._runtime: Any = api.cudart()
        self._index: int = api.current_device() if device.index is None else device.index
        self.core: c.Core
        self.trouble: Callable[[str], None] = unheard
        self._batch_slots: list[_BatchSlot] = []
        self._size = (0, 0, 0, 0, 0)
        self._facts: dict[int, tuple[Tensor, Tensor]] = {}  # by generation
        self.pieces = Pieces(warm_routes)
        self._works = True
        self._driver = C.CDLL("libcuda.so.1")

    def reserve(self, tokens: int, layers: Iterable[ServedLayer]) -> list[c.BatchSlotMemory]:
        sizes = [
            (
                batch_slot_routes(tokens, s.top_k, s.num_experts),
                s.hidden_size,
                int(not s.in_place),
                s.hidden_size if s.takes_e4m3 else 0,
            )
            for s in layers
        ] or [(1, 1, 0, 0)]
        wanted, have = (padded(tokens), *(max(column) for column in zip(*sizes, strict=True))), self._size
        if any(want > now for want, now in zip(wanted, have, strict=True)):
            rows, routes, H, apart, coded = (max(pair) for pair in zip(wanted, have, strict=True))
            self._size = (rows, routes, H, apart, coded)
            self.drop_graphs()  # they hold addresses
            self._batch_slots = []
            self._batch_slots = [_BatchSlot(*self._size, self._dtype, self._device) for _ in range(BATCH_SLOTS)]
        return [batch_slot.memory() for batch_slot in self._batch_slots]

    @property
    def graph_bytes(self) -> int:
        return self.pieces.nbytes

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
        batch_slot = self._batch_slots[run.batch_slot]
        rows = padded(run.tokens) if layer.capturable else run.tokens
        batch_slot.table[run.tokens : rows, 4] = 0
        if run.launch_error:  # some of its pieces ran, and are over: the word may say that all is
            batch_slot.done[0] = 0
        views = _Rows(batch_slot, layer, rows, run.top_k, bool(run.router_weight_on_input))
        with torch.cuda.stream(self.streams[0]):
            if self._launch(views, f"layer {layer.layer}, {rows} rows"):
                self.trouble("split")
            elif layer.capturable:
                self._capture(run, rows, layer, views.parts())

    def _launch(self, rows: _Rows, where: str) -> bool:
        """The whole batch, piece by piece.  True: its experts in two halves, because memory ran out."""
        rows.collect()
        split = compute(rows.compute, rows.number, rows.collect_again, where)
        rows.deliver()
        return split

    def _capture(self, run: c.Run, rows: int, layer: ServedLayer, parts: dict[int, Callable[[], None]]) -> None:
        """Capture the pieces of a size that comes often; what has just run is warm."""
        for piece in self.pieces.wanted(layer, cast(Ran, run), rows) if self._works else ():
            graph = self._kept(layer, piece, parts[piece.part])
            if graph is None:
                return
            self.core.add_graph(layer.layer, layer.generation, *piece[1:], graph[1])

    def capture_like(self, layer: ServedLayer, generation: int) -> bool:
        missing = self.pieces.like(layer, generation) if self._works and layer.capturable else []
        if not missing:
            return False
        piece = missing[0]
        rows = _Rows(self._batch_slots[piece.batch_slot], layer, piece.rows, piece.top_k, bool(piece.last))
        try:
            with torch.cuda.stream(self.streams[0]):
                rows.warm()
                return self._kept(layer, piece, rows.parts()[piece.part]) is not None
        except RuntimeError as e:  # for want of memory, say: its batches are launched one by one until there is some
            log.warning("layer %d: no CUDA graph of %d rows before it is served: %s", layer.layer, piece.rows, e)
            return False

    def graphs(self, generation: int) -> list[tuple[int, ...]]:
        return [(*piece[1:], graph[1]) for piece, graph in self.pieces.of(generation).items()]

    def _kept(self, layer: ServedLayer, piece: Piece, body: Callable[[], None]) -> tuple[Any, int] | None:
        """See _graph(); it is kept."""
        free = free_now()
        graph = self._graph(body)
        if graph is not None:
            self.pieces.add(layer, piece, graph, max(0, free - free_now()))
        return graph

    def _graph(self, body: Callable[[], None]) -> tuple[Any, int] | None:
        """(torch's graph, the driver's executable) of body(); None: it cannot be captured, nor anything from now on."""
        graph, made = torch.cuda.CUDAGraph(keep_graph=True), C.c_void_p()
        try:
            self._pool.record(graph, body)
            raw = C.c_void_p(graph.raw_cuda_graph())
            error = self._driver.cuGraphInstantiateWithFlags(C.byref(made), raw, C.c_ulonglong(0))
            if error:
                raise RuntimeError(f"instantiating a graph: CUDA error {error}")
        except RuntimeError as e:
            self._works = False
            log.warning("a call could not be captured in a CUDA graph; continuing without graphs: %s", e)
            return None
        assert made.value is not None
        return graph, made.value

    def fault(self) -> str:
        return device_fault(self._device)

    def drop_graphs(self) -> None:
        self.core.forget_graphs()
        self._destroy(self.pieces.clear())

    def forget(self, generations: Collection[int]) -> None:
        """Drop the graphs of layers that are not held any more: a graph keeps its layer's memory alive."""
        for generation in generations:
            self._facts.pop(generation, None)
        self._destroy(self.pieces.forget(generations))

    def _destroy(self, graphs: Iterable[tuple[Any, int]]) -> None:
        for _, made in graphs:
            self._driver.cuGraphExecDestroy(C.c_void_p(made))
