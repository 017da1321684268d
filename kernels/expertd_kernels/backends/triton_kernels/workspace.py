"""Scratch memory, shared by all layers of a device and stream: calls on one stream follow each other, so they never use
it at the same time.  It only grows, and what it outgrew is kept: a captured graph may still write there."""

from __future__ import annotations

import torch
from torch import Tensor

from expertd_kernels.backends.triton_kernels.device import stream_of

__all__ = ["carve", "scratch"]

ALIGNMENT = 256
_buffers: dict[tuple[str, int], list[Tensor]] = {}


def scratch(device: torch.device, nbytes: int) -> Tensor:
    """[>= nbytes] u8 on `device`, the same memory for every call on the current stream.  Grows by doubling."""
    kept = _buffers.setdefault((str(device), stream_of(device)), [])
    if not kept or kept[-1].numel() < nbytes:
        size = max(nbytes, 2 * kept[-1].numel() if kept else 1 << 20)
        kept.append(torch.empty(size, dtype=torch.uint8, device=device))
    return kept[-1]


def carve(parts: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> tuple[dict[str, tuple[int, int]], int]:
    """Offsets: name -> (first byte, bytes) for each shape and dtype, 256-byte aligned; and the bytes of all."""
    at, out = 0, {}
    for name, (shape, dtype) in parts.items():
        size = dtype.itemsize
        for n in shape:
            size *= n
        out[name] = (at, size)
        at += -(-size // ALIGNMENT) * ALIGNMENT
    return out, at
