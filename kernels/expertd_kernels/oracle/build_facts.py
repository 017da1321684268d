"""What a package needs beside itself before its kernels can run: compilers, or files that were built or fetched before.

These are entries of Backend.needs that are no distributions.  Each is a Package whose `error` says what is missing and
whose `remedy` is the command that brings it; no error: the kernels can be built or loaded here.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

from expertd_kernels.common.problem import Package

__all__ = ["CUDA_COMPILER", "FACTS", "FLASHINFER_CUTLASS", "FLASHINFER_TRTLLM"]

CUDA_COMPILER = "nvcc"
"""nvcc and a C++ compiler, for packages that compile CUDA sources at first use."""
FLASHINFER_CUTLASS = "flashinfer-fused-moe"
"""FlashInfer's CUTLASS MoE module, built before: FlashInfer would build it in the first call, which then takes a
quarter of an hour or more."""
FLASHINFER_TRTLLM = "flashinfer-trtllm-moe"
"""FlashInfer's TRTLLM MoE module, likewise, and the kernels that FlashInfer fetches from NVIDIA's server."""

_TOOLKIT = "install the CUDA toolkit and a C++ compiler, and put nvcc on PATH (or set CUDA_HOME)"


def _lacking_tools(*names: str) -> list[str]:
    home = next((os.environ[v] for v in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(v)), "")
    compiler = any(map(shutil.which, ("c++", "g++", os.environ.get("CXX") or "c++")))
    there = {
        "nvcc": bool(shutil.which("nvcc") or (home and Path(home, "bin", "nvcc").exists())),
        "ninja": bool(shutil.which("ninja")),
        "a C++ compiler": compiler,
    }
    return [n for n in names if not there[n]]


def _cuda_compiler() -> Package:
    lacking = _lacking_tools("nvcc", "a C++ compiler")
    if not lacking:
        return Package("0")
    return Package("", f"{' and '.join(lacking)} not found, and its kernels are compiled at first use", _TOOLKIT)


def _flashinfer_cache() -> Path:
    """The folder that FlashInfer builds into and fetches to (flashinfer/jit/env.py)."""
    return Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home(), ".cache", "flashinfer")


def _flashinfer_built(pattern: str) -> bool:
    """Whether such a module was built into the package, brought by flashinfer-jit-cache, or compiled before."""
    if find_spec("flashinfer_jit_cache") is not None:
        return True
    spec = find_spec("flashinfer")
    roots = [Path(p) / "data" / "aot" for p in (spec.submodule_search_locations or () if spec else ())]
    patterns = [*((root, f"{pattern}/*.so") for root in roots), (_flashinfer_cache(), f"**/{pattern}/*.so")]
    return any(next(iter(root.glob(pattern)), None) for root, pattern in patterns if root.is_dir())


def _flashinfer_module(backend: str, pattern: str) -> Package:
    if _flashinfer_built(pattern):
        return Package("built")
    lacking = _lacking_tools("nvcc", "ninja", "a C++ compiler")
    if not lacking:
        return Package("", "FlashInfer's MoE module is not built here", f"expertd prepare --backend {backend}")
    why = f"{' and '.join(lacking)} not found, and FlashInfer's MoE module was not built before"
    return Package("", why, f"{_TOOLKIT}, and pip install ninja" if "ninja" in lacking else _TOOLKIT)


def _flashinfer_cutlass() -> Package:
    return _flashinfer_module("flashinfer_cutlass", "fused_moe_[0-9]*")


def _flashinfer_trtllm() -> Package:
    module = _flashinfer_module("flashinfer_trtllm", "fused_moe_trtllm*")
    if module.error:
        return module
    own = os.environ.get("FLASHINFER_CUBIN_DIR")
    folder = Path(own) if own else _flashinfer_cache() / "cubins"
    if find_spec("flashinfer_cubin") is None and not (folder.is_dir() and any(folder.iterdir())):
        why = f"FlashInfer's compiled kernels (cubins) are not here, neither as flashinfer-cubin nor in {folder}"
        return Package("", why, "python -m flashinfer download-cubin")
    return module


FACTS: Mapping[str, Callable[[], Package]] = {
    CUDA_COMPILER: _cuda_compiler,
    FLASHINFER_CUTLASS: _flashinfer_cutlass,
    FLASHINFER_TRTLLM: _flashinfer_trtllm,
}
"""Entry of Backend.needs -> how it is looked up on this machine."""
