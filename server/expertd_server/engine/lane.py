"""Where a batch's tensors live while it is computed: reused host buffers, and on an accelerator device buffers, streams
and events, so that copying one batch overlaps with computing another.

    lane.reserve(M, top_k, H)   room for the largest batch: pinned memory that grows under load stops the device, and
                                graphs hold addresses; in_place: outputs lie where the inputs did
    lane.size(M, capturable)    rows to open for a batch of M; those behind the batch must have slots of -1
    lane.open(M, top_k, H)      flat numpy views to fill: hidden, slots, weights
    lane.launch(layer, ...)     starts copy in, kernel, copy out; returns at once where the device allows it
    lane.collect()              waits; the output [M, H] on the host and the time of each stage
    lane.fault()                after a failure: why the device is lost to this process, "" where it is not
    lane.graph_bytes            of the device, that its captured graphs took
    lane.forget(generations)    drops what is kept for layers that are not held any more
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from expertd_kernels.oracle.probe import device_fault
from expertd_kernels.weights.numerics import COMPUTE_DTYPE
from expertd_server.engine import halves
from expertd_server.engine.graphs import MOST_TOKENS, Graphs, graph_key, supported
from expertd_server.engine.halves import unheard
from expertd_server.engine.request import Array, Stages
from expertd_server.engine.served import ServedLayer
from expertd_server.engine.sizes import LANES, padded

__all__ = ["Inputs", "Lane", "compute_stream", "lanes"]

_Part = Callable[[], None]
Trouble = Callable[[str], None]
_MOST_VIEWS = 1024
_BITS = {torch.bfloat16: torch.uint16, torch.float32: torch.float32}


class Inputs(NamedTuple):
    """What the engine fills, flat.  hidden [M * H], bf16 as its bits (u2); slots [M * top_k] int32: local positions of
    experts, -1 = not here; weights [M * top_k] f32."""

    hidden: Array
    slots: Array
    weights: Array


class Lane(Protocol):
    """One batch's place.  Used by the engine's thread only."""

    def reserve(self, tokens: int, top_k: int, hidden_size: int, in_place: bool) -> None: ...

    def size(self, tokens: int, capturable: bool) -> int: ...

    def open(self, tokens: int, top_k: int, hidden_size: int) -> Inputs: ...

    def launch(self, layer: ServedLayer, router_weight_on_input: bool) -> None: ...

    def collect(self) -> tuple[Tensor, Stages]: ...

    def fault(self) -> str: ...

    @property
    def graph_bytes(self) -> int: ...

    def forget(self, generations: Collection[int]) -> None: ...


class _Store:
    """A flat buffer that is reserved as large as it is asked for, then grows to a power of two; it never shrinks."""

    def __init__(self, dtype: torch.dtype, device: torch.device, pinned: bool = False) -> None:
        self.dtype, self.device, self.pinned = dtype, device, pinned
        self.tensor = torch.empty(0, dtype=dtype, device=device)

    def get(self, rows: int, columns: int) -> Tensor:
        """[rows, columns], contiguous."""
        n = rows * columns
        if n > self.tensor.numel():
            self.reserve(1 << (n - 1).bit_length())
        return self.tensor[:n].view(rows, columns)

    def reserve(self, size: int) -> None:
        """Room for so many elements, unless there is as much."""
        if size > self.tensor.numel():
            self.tensor = torch.empty(size, dtype=self.dtype, device=self.device, pin_memory=self.pinned)

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


class _Views(NamedTuple):
    """The buffers of a batch: inputs and output as torch sees them, inputs as numpy sees them."""

    hidden: Tensor
    slots: Tensor
    weights: Tensor
    out: Tensor
    inputs: Inputs


class _Host:
    """The inputs and the output of one batch in host memory; pinned where a device copies from it.

    Views are kept by shape: making them anew costs more than filling them for a batch of a few tokens.
    """

    def __init__(self, dtype: torch.dtype, pinned: bool) -> None:
        cpu = torch.device("cpu")
        self._bits = _BITS[dtype]
        self._hidden = _Store(dtype, cpu, pinned)
        self._slots = _Store(torch.int32, cpu, pinned)
        self._weights = _Store(torch.float32, cpu, pinned)
        self._out = _Store(dtype, cpu, pinned)
        self._views: dict[tuple[int, int, int], _Views] = {}

    @property
    def nbytes(self) -> int:
        return sum(s.nbytes for s in (self._hidden, self._slots, self._weights, self._out))

    def reserve(self, tokens: int, top_k: int, hidden_size: int) -> None:
        for store, columns in (
            (self._hidden, hidden_size),
            (self._out, hidden_size),
            (self._slots, top_k),
            (self._weights, top_k),
        ):
            store.reserve(tokens * columns)

    def open(self, tokens: int, top_k: int, hidden_size: int) -> Inputs:
        key = (tokens, top_k, hidden_size)
        found = self._views.get(key)
        if found is None:
            found = self._make(*key)
        self.now = found
        return found.inputs

    def _make(self, tokens: int, top_k: int, hidden_size: int) -> _Views:
        stores = (self._hidden, self._slots, self._weights, self._out)
        before = [s.tensor.numel() for s in stores]
        hidden, slots = self._hidden.get(tokens, hidden_size), self._slots.get(tokens, top_k)
        weights, out = self._weights.get(tokens, top_k), self._out.get(tokens, hidden_size)
        inputs = Inputs(hidden.view(-1).view(self._bits).numpy(), slots.view(-1).numpy(), weights.view(-1).numpy())
        if len(self._views) >= _MOST_VIEWS or before != [s.tensor.numel() for s in stores]:
            self._views.clear()  # or views would keep the smaller buffers alive
        found = self._views[tokens, top_k, hidden_size] = _Views(hidden, slots, weights, out, inputs)
        return found


class CpuLane:
    """The kernel reads and writes the host buffers themselves; launch() is the computation."""

    def __init__(self, dtype: torch.dtype, trouble: Trouble = unheard) -> None:
        self._host, self._trouble = _Host(dtype, pinned=False), trouble
        self._kernel_ns = 0

    def reserve(self, tokens: int, top_k: int, hidden_size: int, in_place: bool) -> None:
        """Nothing: host memory costs little to grow."""

    def size(self, tokens: int, capturable: bool) -> int:
        return tokens

    def open(self, tokens: int, top_k: int, hidden_size: int) -> Inputs:
        return self._host.open(tokens, top_k, hidden_size)

    def launch(self, layer: ServedLayer, router_weight_on_input: bool) -> None:
        h = self._host.now

        def call(a: int, z: int) -> None:
            rows = slice(a, z)
            layer.experts(
                h.hidden[rows],
                h.slots[rows],
                h.weights[rows],
                router_weight_on_input=router_weight_on_input,
                out=h.out[rows],
            )

        start = time.perf_counter_ns()
        if halves.compute(call, len(h.hidden), lambda: None, f"layer {layer.layer}, {len(h.hidden)} tokens"):
            self._trouble("split")
        self._kernel_ns = time.perf_counter_ns() - start

    def collect(self) -> tuple[Tensor, Stages]:
        return self._host.now.out, Stages(0, self._kernel_ns, 0)

    def fault(self) -> str:
        return ""

    @property
    def graph_bytes(self) -> int:
        return 0

    def forget(self, generations: Collection[int]) -> None:
        """Nothing is kept by layer."""


class DeviceLane:
    """Pinned host buffers, device buffers, and three streams: copy in, compute, copy out.  All lanes share the streams:
    scratch memory belongs to the one that computes."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        api: Any,
        streams: tuple[Any, Any, Any],
        pool: Any,
        trouble: Trouble = unheard,
    ) -> None:
        self._trouble = trouble
        self._host = _Host(dtype, pinned=True)
        self._api, self._device = api, device
        self._in, self._compute, self._back = streams
        self._hidden = _Store(dtype, device)
        self._slots = _Store(torch.int32, device)
        self._weights = _Store(torch.float32, device)
        self._out = _Store(dtype, device)
        # begin, inputs copied, kernel begun, kernel done, output copy begun, output copied
        self._marks = self._now = tuple(api.Event(enable_timing=True) for _ in range(6))
        self._graphs = None if pool is None else Graphs(pool)

    def reserve(self, tokens: int, top_k: int, hidden_size: int, in_place: bool) -> None:
        tokens = padded(tokens)
        self._host.reserve(tokens, top_k, hidden_size)
        columns = (hidden_size, top_k, top_k, 0 if in_place else hidden_size)
        for store, each in zip(self._stores(), columns, strict=True):
            store.reserve(tokens * each)

    def _stores(self) -> tuple[_Store, ...]:
        return self._hidden, self._slots, self._weights, self._out

    def size(self, tokens: int, capturable: bool) -> int:
        return padded(tokens) if capturable and self._graphs is not None and tokens <= MOST_TOKENS else tokens

    def open(self, tokens: int, top_k: int, hidden_size: int) -> Inputs:
        return self._host.open(tokens, top_k, hidden_size)

    def launch(self, layer: ServedLayer, router_weight_on_input: bool) -> None:
        h = self._host.now
        hidden = self._hidden.get(*h.hidden.shape)
        slots = self._slots.get(*h.slots.shape)
        weights = self._weights.get(*h.weights.shape)
        out = hidden if layer.in_place else self._out.get(*h.out.shape)

        def copy_in() -> None:
            hidden.copy_(h.hidden, non_blocking=True)
            slots.copy_(h.slots, non_blocking=True)
            weights.copy_(h.weights, non_blocking=True)

        def compute() -> None:
            layer.experts(hidden, slots, weights, router_weight_on_input=router_weight_on_input, out=out)

        def copy_out() -> None:
            h.out.copy_(out, non_blocking=True)

        def compute_or_halve() -> None:
            def call(a: int, z: int) -> None:
                rows, on_input = slice(a, z), router_weight_on_input
                layer.experts(hidden[rows], slots[rows], weights[rows], router_weight_on_input=on_input, out=out[rows])

            if halves.compute(call, len(hidden), copy_in, f"layer {layer.layer}, {len(hidden)} rows"):
                self._trouble("split")

        parts = (copy_in, compute, copy_out)
        if self._graphs is None or not layer.capturable or len(hidden) > MOST_TOKENS:
            self._launch(copy_in, compute_or_halve, copy_out)
            return
        tensors = (hidden, slots, weights, out, h.hidden, h.slots, h.weights, h.out)
        key = graph_key(layer, router_weight_on_input, *slots.shape, *(t.data_ptr() for t in tensors))
        graph = self._graphs.get(key)
        if graph is None:
            self._launch(copy_in, compute_or_halve, copy_out)
            with self._api.stream(self._compute):  # while the device computes
                self._graphs.capture(key, partial(_recorded, parts))
            return
        begin, end = self._marks[0], self._marks[5]
        with self._api.stream(self._compute):
            begin.record()
            graph.replay()
            end.record()
        self._now = (begin, graph.copied, graph.copied, graph.computed, graph.computed, end)

    def _launch(self, copy_in: _Part, compute: _Part, copy_out: _Part) -> None:
        """Each part on its own stream."""
        self._now = m = self._marks
        with self._api.stream(self._in):
            m[0].record()
            copy_in()
            m[1].record()
        with self._api.stream(self._compute):
            self._compute.wait_event(m[1])
            m[2].record()
            compute()
            m[3].record()
        with self._api.stream(self._back):
            self._back.wait_event(m[3])
            m[4].record()
            copy_out()
            m[5].record()

    def collect(self) -> tuple[Tensor, Stages]:
        m = self._now
        m[5].synchronize()
        return self._host.now.out, Stages(*(int(m[i].elapsed_time(m[i + 1]) * 1e6) for i in (0, 2, 4)))

    def fault(self) -> str:
        return device_fault(self._device)

    @property
    def graph_bytes(self) -> int:
        return 0 if self._graphs is None else self._graphs.nbytes

    def forget(self, generations: Collection[int]) -> None:
        if self._graphs is not None:
            self._graphs.forget(generations)


def _recorded(parts: tuple[_Part, _Part, _Part], copied: Any, computed: Any) -> None:
    """The parts on one stream, with the events between them."""
    copy_in, compute, copy_out = parts
    copy_in()
    copied.record()
    compute()
    computed.record()
    copy_out()


def compute_stream(device: torch.device) -> Any:
    """A stream for layers to compute on; scratch belongs to it, so they are warmed up there.  None on a CPU."""
    return None if device.type == "cpu" else getattr(torch, device.type).Stream(device)


def lanes(device: torch.device, compute_dtype: str, stream: Any, trouble: Trouble = unheard) -> tuple[Lane, ...]:
    """The lanes of an engine: one on a CPU, where computing and copying compete for the same cores; two on an
    accelerator, so that one batch is filled and copied while another is computed.  stream: of compute_stream();
    trouble: told what Worker is."""
    dtype = COMPUTE_DTYPE[compute_dtype]
    if device.type == "cpu":
        return (CpuLane(dtype, trouble),)
    api = getattr(torch, device.type)  # torch.cuda and torch.xpu have the same Stream, Event and stream()
    streams = (api.Stream(device), stream, api.Stream(device))
    pool = torch.cuda.graph_pool_handle() if supported(device) else None
    return tuple(DeviceLane(dtype, device, api, streams, pool, trouble) for _ in range(LANES))
