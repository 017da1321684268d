"""What the kernels' host side asks of a device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

__all__ = [
    "Nvidia",
    "absent",
    "capturing",
    "compile_for",
    "multiprocessors",
    "nvidia_of",
    "on",
    "shared_bytes",
    "stream_of",
]


@dataclass(frozen=True)
class Nvidia:
    """What kernels are planned and compiled by of an NVIDIA GPU: its name as the driver gives it, compute capability,
    multiprocessors, and bytes of shared memory that one program may use."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int


_absent: Nvidia | None = None


def compile_for(gpu: Nvidia | None) -> None:
    """From now on kernels of this process are planned for `gpu`, which is not here, and tensors stay on the CPU: for
    processes that compile and start nothing.  None: for what is here."""
    global _absent
    _absent = gpu


def absent() -> Nvidia | None:
    """What compile_for() was given."""
    return _absent


def nvidia_of(device: torch.device) -> Nvidia | None:
    """The NVIDIA GPU that layers on `device` are for; None where they are for something else."""
    if _absent is not None or device.type != "cuda" or torch.version.hip is not None:
        return _absent
    p = torch.cuda.get_device_properties(device)
    return Nvidia(p.name, (p.major, p.minor), multiprocessors(device), shared_bytes(device))


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
    if _absent is not None:
        return _absent.shared_bytes
    if device.type == "cuda":
        p = torch.cuda.get_device_properties(device)
        return int(getattr(p, "shared_memory_per_block_optin", 64 * 1024))
    return 64 * 1024


def multiprocessors(device: torch.device) -> int:
    """Programs that run side by side, at least."""
    if _absent is not None:
        return _absent.multiprocessors
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return 64


def capturing(device: torch.device) -> bool:
    """Whether a graph is being captured: nothing may wait for the device then."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
