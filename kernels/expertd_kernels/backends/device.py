"""What the kernels' host side asks of a device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["capturing", "multiprocessors", "on", "shared_bytes", "stream_of"]


def stream_of(device: torch.device) -> int:
    """The current stream, as a number that tells it from others."""
    if device.type == "cuda":
        return int(torch.cuda.current_stream(device).cuda_stream)
    if device.type == "xpu":
        return int(torch.xpu.current_stream(device).sycl_queue)
    return 0


def on(device: torch.device) -> AbstractContextManager[object]:
    """Makes `device` the one that kernels start on, where it is not already."""
    if device.type == "cuda" and torch.cuda.current_device() != device.index:
        return torch.cuda.device(device)
    if device.type == "xpu" and torch.xpu.current_device() != device.index:
        return torch.xpu.device(device)
    return nullcontext()


def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may use."""
    if device.type == "cuda":
        p = torch.cuda.get_device_properties(device)
        return int(getattr(p, "shared_memory_per_block_optin", 64 * 1024))
    return 64 * 1024


def multiprocessors(device: torch.device) -> int:
    """Programs that run side by side, at least."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return 64


def capturing(device: torch.device) -> bool:
    """Whether a graph is being captured: nothing may wait for the device then."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
