"""What the layers ask of the GPU that they run on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from expertd_kernels.backends.device import absent

__all__ = ["Gpu", "current_gpu"]


@dataclass(frozen=True)
class Gpu:
    """device; its name as the driver gives it, by which tuned plans are found; its multiprocessors, which launches
    fill."""

    device: torch.device
    name: str
    multiprocessors: int


def current_gpu() -> Gpu:
    """The current CUDA device, or the one that this process compiles for (device.compile_for)."""
    if gpu := absent():
        return Gpu(torch.device("cpu"), gpu.name, gpu.multiprocessors)
    device = torch.device("cuda", torch.cuda.current_device())
    facts = torch.cuda.get_device_properties(device)
    return Gpu(device, facts.name, facts.multi_processor_count)
