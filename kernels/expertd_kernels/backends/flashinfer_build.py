"""Builds FlashInfer's MoE modules ahead of a start (`expertd prepare --backend flashinfer_cutlass`)."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["MODULES", "build_module"]

_TRTLLM = "gen_trtllm_gen_fused_moe_sm100_module"
MODULES: Mapping[str, Mapping[tuple[int, int], str]] = {
    "flashinfer_cutlass": {
        (8, 9): "gen_cutlass_fused_moe_sm89_module",
        (9, 0): "gen_cutlass_fused_moe_sm90_module",
        (10, 0): "gen_cutlass_fused_moe_sm100_module",
        (10, 3): "gen_cutlass_fused_moe_sm103_module",
        (12, 0): "gen_cutlass_fused_moe_sm120_module",
    },
    "flashinfer_trtllm": {(10, 0): _TRTLLM, (10, 3): _TRTLLM},
}
"""Backend -> compute capability -> the function of flashinfer.jit.fused_moe (0.7.2) that describes its module."""


def build_module(backend: str, capability: tuple[int, int]) -> Path:
    """Compiles the module of `backend` for a GPU of that compute capability, which need not be here, into FlashInfer's
    cache; returns the library.  Needs nvcc, ninja and a C++ compiler, and takes a quarter of an hour or more.

    Raises ValueError where the backend has no module for it, ImportError without FlashInfer, and what its build raises.
    """
    modules = MODULES.get(backend, {})
    if capability not in modules:
        has = ", ".join(f"{major}.{minor}" for major, minor in modules) or "none"
        got = ".".join(map(str, capability))
        raise ValueError(f"{backend}: got compute capability {got}, want one that it has a module for: {has}")
    suffix = "a" if capability >= (9, 0) else ""
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", f"{capability[0]}.{capability[1]}{suffix}")
    described = getattr(importlib.import_module("flashinfer.jit.fused_moe"), modules[capability])()
    described.build(verbose=True)
    return Path(described.jit_library_path)
