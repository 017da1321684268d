"""Which executor computes the batches of a device."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from expertd_server.engine.executor import CpuExecutor, Executor
from expertd_server.engine.plain import PlainExecutor

__all__ = ["executor_of"]


def executor_of(device: torch.device, compute_dtype: str, warm_routes: Iterable[int] = ()) -> tuple[Executor, str]:
    """(executor, why the core does not launch its batches; "" = it does, or the device is a CPU).

    warm_routes: numbers of routes a token that kernels were warmed up with, besides each layer's top-k
    """
    if device.type == "cpu":
        return CpuExecutor(compute_dtype), ""
    try:
        from expertd_server.engine.device import DeviceExecutor, supported  # needs triton
    except ImportError as e:
        return PlainExecutor(device, compute_dtype, f"launching batches on {device} needs Triton: {e}"), str(e)
    why = supported(device)
    if why:
        return PlainExecutor(device, compute_dtype, why), why
    return DeviceExecutor(device, compute_dtype, warm_routes), ""
