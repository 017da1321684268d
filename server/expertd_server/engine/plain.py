"""The plain executor: any device that torch knows and on which the core launches nothing by itself (ROCm, XPU, an
NVIDIA GPU without Triton).  The core gathers a batch on the host; here it is copied to the device, computed, and copied
back, one batch at a time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from expertd.shm.pool import Pool, PoolError
from expertd_kernels.oracle.probe import device_fault
from expertd_server.engine import core as c
from expertd_server.engine.executor import CpuExecutor
from expertd_server.engine.out_of_memory import compute
from expertd_server.engine.served import ServedLayer

# Why it is so: decision 162 in DECISIONS.md.
__all__ = ["FIRST", "LAST", "PlainExecutor", "compute_stream"]


FIRST, LAST = -1, 0
"""Priorities of streams: of what callers wait for, and of what is made ready meanwhile."""


def compute_stream(device: torch.device, priority: int = FIRST) -> Any:
    """A stream for layers to compute on; scratch belongs to it, so they are warmed up there.  None on a CPU."""
    return None if device.type == "cpu" else getattr(torch, device.type).Stream(device, priority=priority)


class PlainExecutor(CpuExecutor):
    """why: why the core launches nothing there, for clients that ask for memory of the device."""

    def __init__(self, device: torch.device, compute_dtype: str, why: str) -> None:
        super().__init__(compute_dtype, pinned=device.type != "cpu")
        self._device, self._why = device, why
        self.stream = compute_stream(device)
        self._room: list[Tensor] = []

    def reserve(self, tokens: int, layers: Iterable[ServedLayer]) -> list[c.BatchSlotMemory]:
        memory = super().reserve(tokens, layers)
        self._room = [torch.empty_like(t, device=self._device) for t in self._memory]
        return memory

    def pool(self, nbytes: int) -> Pool:
        raise PoolError(self._why)

    def pool_refusal(self) -> str:
        return self._why

    def run(self, run: c.Run, layer: ServedLayer) -> int:
        on_host = self.views(run, layer.hidden_size)
        hidden, slots, weights, out = (r[: h.numel()].view(h.shape) for r, h in zip(self._room, on_host, strict=True))
        out = hidden if layer.in_place else out
        on_input = bool(run.router_weight_on_input)

        def copy_in() -> None:
            for device, host in zip((hidden, slots, weights), on_host, strict=False):
                device.copy_(host, non_blocking=True)

        def call(a: int, z: int) -> None:
            layer.experts(hidden[a:z], slots[a:z], weights[a:z], router_weight_on_input=on_input, out=out[a:z])

        start = time.perf_counter_ns()
        with self._streaming():
            copy_in()
            if compute(call, run.rows, copy_in, f"layer {layer.layer}, {run.rows} rows"):
                self.trouble("split")
            on_host[3].copy_(out, non_blocking=True)
            if self.stream is not None:
                self.stream.synchronize()
        return time.perf_counter_ns() - start

    def fault(self) -> str:
        return device_fault(self._device)

    def _streaming(self) -> contextlib.AbstractContextManager[Any]:
        if self.stream is None:
            return contextlib.nullcontext()
        streaming: contextlib.AbstractContextManager[Any] = getattr(torch, self._device.type).stream(self.stream)
        return streaming
