"""Which executor computes the batches of a device."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from expertd_server.engine.executor import CpuExecutor, Executor
from expertd_server.engine.plain import PlainExecutor

__all__ = ["executor_of", "graphs_refusal"]


def executor_of(device: torch.device, compute_dtype: str, warm_routes: Iterable[int] = ()) -> tuple[Executor, str]:
    """(executor, why the core does not launch its batches; "" = it does, or the device is a CPU).

    warm_routes: numbers of routes a token that kernels were warmed up with, besides each layer's top-k
    """
    if device.type == "cpu":
        return CpuExecutor(compute_dtype), ""
    why = graphs_refusal(device)
    if why:
        return PlainExecutor(device, compute_dtype, why), why
    from expertd_server.engine.device import DeviceExecutor  # needs triton

    return DeviceExecutor(device, compute_dtype, warm_routes), ""


def graphs_refusal(device: torch.device) -> str:
    """Why batches on an accelerator cannot be launched as CUDA graphs; "" = they can."""
    try:
        from expertd_server.engine.device import supported
    except ImportError as e:
        return f"launching batches on {device} needs Triton: {e}"
    return supported(device)
