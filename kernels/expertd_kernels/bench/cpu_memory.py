"""Where a CPU benchmark's bytes come from: a plain read beside the layers, and a cache that holds none of theirs.

A server's processor may have a last-level cache that is larger than a whole layer.  A model has dozens of layers, so
its weights come from memory all the same: a benchmark that calls one layer again and again must empty the cache first.
"""

from __future__ import annotations

import ctypes as C
from pathlib import Path

import torch
from torch import Tensor

from expertd_kernels.backends.cpu import CpuExperts
from expertd_kernels.common.protocol import Packed
from expertd_kernels.native import library as native
from expertd_kernels.native.cores import SYSTEM

__all__ = ["Evictor", "Reader", "RunsReader", "last_level_cache"]

UNKNOWN = 64 << 20
MOST = 1 << 30
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def last_level_cache(system: Path = SYSTEM) -> int:
    """Bytes of the largest cache that the first CPU has a share in; UNKNOWN where the system does not say."""
    found = []
    for file in system.glob("cpu/cpu0/cache/index*/size"):
        text = file.read_text().strip()
        number, unit = (text[:-1], _UNITS[text[-1]]) if text[-1:] in _UNITS else (text, 1)
        if number.isdecimal():
            found.append(int(number) * unit)
    return max(found, default=UNKNOWN)


class Evictor:
    """Fills the last-level cache with bytes that nobody uses: reads twice as many as it holds, on all cores."""

    def __init__(self) -> None:
        self.context = native.context()
        size = min(2 * last_level_cache(), MOST)
        self.data = native.allocate((-(-size // native.HUGE_PAGE) * native.HUGE_PAGE,)).fill_(1)

    def __call__(self) -> None:
        native.library().expertd_cpu_read_gb_s(self.context.handle, self.data.data_ptr(), self.data.numel())


class Reader:
    """Reads as many bytes as asked for, each time further on in a layer's packed weights."""

    def __init__(self, packed: Packed, context: native.Context) -> None:
        largest = max(packed.tensors.values(), key=lambda t: t.numel() * t.element_size())
        self.data = largest.view(torch.uint8).view(-1)
        self.context, self.at = context, 0

    def whole(self, nbytes: float) -> int:
        """As many of the bytes as are read at a time."""
        return min(int(nbytes), self.data.numel()) // 64 * 64

    def __call__(self, nbytes: int) -> None:
        self.at = 0 if self.at + nbytes > self.data.numel() else self.at
        native.library().expertd_cpu_read_gb_s(self.context.handle, self.data.data_ptr() + self.at, nbytes)
        self.at += nbytes


READ = 3
"""EXPERTD_COMPUTE_READ of abi.h."""


class RunsReader:
    """Called as a layer, reads what the layer reads: each thread its part of the experts that the routes touch, in the
    order in which it would compute with them.  Nothing is computed or written."""

    def __init__(self, experts: CpuExperts) -> None:
        self.experts = experts  # holds the memory
        self.direct = experts.direct()
        self.layer = native.Layer.from_buffer_copy(native.Layer.from_address(self.direct.experts))
        self.layer.compute = READ

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        (M, H), k = x.shape, ids.shape[1]
        f32 = x.dtype is torch.float32
        pointers = [t.data_ptr() for t in (x, ids, weights, x)]  # the answer's is not used
        call = native.call_bytes(*pointers, M, H, k, f32, f32, False)
        context = self.experts.context
        error = native.library().expertd_cpu_forward(context.handle, C.byref(self.layer), call)
        context.check(error, f"reading what {M} tokens touch")
