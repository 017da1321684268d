"""What the layers ask of the GPU that they run on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Gpu", "current_gpu"]


@dataclass(frozen=True)
class Gpu:
    """device; its name as the driver gives it, by which tuned plans are found; its multiprocessors, which launches
    fill."""

    device: torch.device
    name: str
    multiprocessors: int


def current_gpu() -> Gpu:
    """The current CUDA device."""
    device = torch.device("cuda", torch.cuda.current_device())
    facts = torch.cuda.get_device_properties(device)
    return Gpu(device, facts.name, facts.multi_processor_count)
