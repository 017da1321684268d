"""Where tensors of an update lie until their layer is made."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["room_on"]


def room_on(device: torch.device) -> Callable[[int], Tensor] | None:
    """What makes [n] u8 on the host for so many bytes, pinned, so that `device` copies from there by itself; torch
    keeps such memory for the next tensors.  None: the device is a CPU, and tensors may lie anywhere."""
    if device.type != "cuda":
        return None
    return lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
