"""Executors compute the batches that the core hands to Python.

CpuExecutor     the experts read and write the memory that the core names
JoinedExecutor  (joined.py) the same, for experts of which parts compute on devices
PlainExecutor   (plain.py) any device: the batch is copied there, computed, and copied back
DeviceExecutor  (device.py) NVIDIA GPUs: collect, experts, deliver and a word at the end; the second time as CUDA
                graphs, which the core then replays itself
"""

from __future__ import annotations

import ctypes as C
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from expertd.shm.pool import Pool, PoolError
from expertd_kernels.weights.numerics import COMPUTE_DTYPE
from expertd_server.engine import core as c
from expertd_server.engine.out_of_memory import compute, unheard
from expertd_server.engine.request import Array
from expertd_server.engine.served import ServedLayer

__all__ = ["CpuExecutor", "Executor"]

_KIND: Mapping[torch.dtype, Any] = {
    torch.bfloat16: C.c_int16,
    torch.float32: C.c_float,
    torch.int32: C.c_int32,
}

_MOST_VIEWS = 4096


_NO_POOL = "the server computes on a CPU: it has no GPU whose memory could be shared"


class Executor(Protocol):
    """For the engine's thread.

    streams      compute, in and out, where the core launches graphs by itself, else None
    stream       what layers are computed on, with its scratch memory; None on a CPU
    core         set by the engine
    trouble      called for each batch that was computed in halves (see Worker); set by the engine
    """

    trouble: Callable[[str], None]
    batch_slots: int
    streamed_rows: int
    streams: Any
    stream: Any
    core: c.Core

    def reserve(self, tokens: int, layers: Iterable[ServedLayer]) -> list[c.BatchSlotMemory]:
        """Room for the largest batch of any of `layers` in each batch slot; what was given before is used no more."""
        ...

    @property
    def graph_bytes(self) -> int:
        """Of the device's memory, what captured graphs took."""
        ...

    def facts(self, layer: ServedLayer) -> tuple[int, int]:
        """Addresses of a new layer's slots and counts on the device; 0 on a CPU."""
        ...

    def counts(self, generation: int) -> Array | None:
        """[held] int64, routes by expert that the device has counted; None: the core counts.  Any thread."""
        ...

    def register(self, address: int, nbytes: int) -> None:
        """Let the device read and write host memory.  Raises OSError."""

    def unregister(self, address: int) -> None:
        """It does no more."""

    def pool(self, nbytes: int) -> Pool:
        """Memory of the device that a client may map.  Raises PoolError."""
        ...

    def pool_refusal(self) -> str:
        """Why there is none, "" where there is."""
        ...

    def run(self, run: c.Run, layer: ServedLayer) -> int | None:
        """Compute, or launch, a batch.  Nanoseconds of the computation; None: launched, the batch slot's word will
        say."""
        ...

    def capture_like(self, layer: ServedLayer, generation: int) -> bool:
        """Capture the next graph that the layer of this generation has and `layer`, which is to replace it, has not.
        False: there is none.  While no batch is under way."""
        ...

    def graphs(self, generation: int) -> list[tuple[int, ...]]:
        """Those of a layer, as Core.add_graph takes them after its generation."""
        ...

    def fault(self) -> str:
        """Why the device is lost to this process, "" where it is not."""
        ...

    def drop_graphs(self) -> None:
        """Drop all that is captured, while no batch is under way."""

    def forget(self, generations: Collection[int]) -> None:
        """Drop what is kept for layers that are not held any more."""


class CpuExecutor:
    """One batch slot: computing and copying compete for the same cores."""

    batch_slots = 1
    streamed_rows = 0
    streams: Any = None
    stream: Any = None
    core: c.Core

    def __init__(self, compute_dtype: str, pinned: bool = False) -> None:
        self.trouble: Callable[[str], None] = unheard
        self._pinned = pinned
        self._dtype = COMPUTE_DTYPE[compute_dtype]
        self._memory: list[Tensor] = []
        self._views: dict[tuple[int, int, int, torch.dtype], Tensor] = {}

    def reserve(self, tokens: int, layers: Iterable[ServedLayer]) -> list[c.BatchSlotMemory]:
        sizes = [(s.num_experts, s.hidden_size) for s in layers] or [(1, 1)]
        k, H = (max(column) for column in zip(*sizes, strict=True))
        wanted = [(H, self._dtype), (k, torch.int32), (k, torch.float32), (H, self._dtype)]
        self._memory = [torch.empty(tokens * n, dtype=dtype, pin_memory=self._pinned) for n, dtype in wanted]
        self._views.clear()
        hidden, slots, weights, out = (t.data_ptr() for t in self._memory)
        return [c.BatchSlotMemory(hidden=hidden, slots=slots, weights=weights, out=out)]

    @property
    def graph_bytes(self) -> int:
        return 0

    def facts(self, layer: ServedLayer) -> tuple[int, int]:
        return 0, 0

    def counts(self, generation: int) -> Array | None:
        return None

    def register(self, address: int, nbytes: int) -> None:
        """The host reads its own memory."""

    def unregister(self, address: int) -> None:
        """Nothing was registered."""

    def pool(self, nbytes: int) -> Pool:
        raise PoolError(_NO_POOL)

    def pool_refusal(self) -> str:
        return _NO_POOL

    def views(self, run: c.Run, H: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A batch's hidden states [M, H], slots [M, top_k] int32, weights [M, top_k] f32 and output [M, H]."""
        M, k = run.rows, run.top_k
        hidden, out = self._view(run.hidden, M, H, self._dtype), self._view(run.out, M, H, self._dtype)
        return hidden, self._view(run.slots, M, k, torch.int32), self._view(run.weights, M, k, torch.float32), out

    def run(self, run: c.Run, layer: ServedLayer) -> int:
        M = run.rows
        hidden, slots, weights, out = self.views(run, layer.hidden_size)
        on_input = bool(run.router_weight_on_input)

        def call(a: int, z: int) -> None:
            layer.experts(hidden[a:z], slots[a:z], weights[a:z], router_weight_on_input=on_input, out=out[a:z])

        def again() -> None:
            if abs(run.hidden - run.out) < hidden.numel() * hidden.element_size():
                raise MemoryError("its caller wants the output where the input lies, which may be gone")

        start = time.perf_counter_ns()
        if compute(call, M, again, f"layer {layer.layer}, {M} tokens"):
            self.trouble("split")
        return time.perf_counter_ns() - start

    def capture_like(self, layer: ServedLayer, generation: int) -> bool:
        return False

    def graphs(self, generation: int) -> list[tuple[int, ...]]:
        return []

    def fault(self) -> str:
        return ""

    def drop_graphs(self) -> None:
        """Nothing is captured."""

    def forget(self, generations: Collection[int]) -> None:
        """Nothing is kept by layer."""

    def _view(self, address: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """The memory there, which the core answers for.  Views are kept: making the four of a batch takes longer than
        launching its kernel, and most batches lie where earlier ones of their size did."""
        key = (address, rows, columns, dtype)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            view = self._views[key] = _tensor(address, (rows, columns), dtype)
        return view


def _tensor(address: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """A view of memory that the core answers for."""
    raw = (_KIND[dtype] * (shape[0] * shape[1])).from_address(address)
    return torch.from_numpy(np.frombuffer(raw, np.dtype(_KIND[dtype]))).view(dtype).view(shape)
