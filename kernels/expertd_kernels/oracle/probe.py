"""What this machine has: its device and the distributions that backends need.  The impure half of the oracle."""

from __future__ import annotations

import importlib
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertd_kernels.common.problem import Device, Package
from expertd_kernels.native.processor import cpu_features, cpu_info
from expertd_kernels.oracle.backend import CPU_KERNEL
from expertd_kernels.oracle.build_facts import FACTS
from expertd_kernels.oracle.decision import Backend
from expertd_kernels.oracle.devices import cuda_device, rocm_device, xpu_device
from expertd_kernels.oracle.import_health import ImportHealth, installed_as
from expertd_kernels.oracle.intel_gpus import xe_generation

if TYPE_CHECKING:
    import torch

__all__ = [
    "assumed_packages",
    "cpu_name",
    "detect_device",
    "device_fault",
    "installed_packages",
    "packages_for",
    "use_device",
]

_ACCELERATORS = ("cuda", "rocm", "xpu")


def cpu_name() -> str:
    """The processor's marketing name; "" where it cannot be told."""
    return cpu_info("model name")


def _cpu() -> Device:
    return Device("cpu", platform.machine(), features=cpu_features())


def detect_device(name: str = "auto") -> Device:
    """The device called "auto", "cpu", "cuda", "cuda:1", "rocm" or "xpu" on this machine.  auto: the first accelerator,
    else the CPU.  RuntimeError where it is not there."""
    kind, _, index = name.partition(":")
    if kind not in ("auto", "cpu", *_ACCELERATORS) or (":" in name and not (kind in _ACCELERATORS and index.isdigit())):
        raise ValueError(f"device {name!r}: want auto, cpu, cuda[:N], rocm[:N] or xpu[:N]")
    if kind == "cpu":
        return _cpu()
    import torch

    i = _index(name, kind, index)
    if kind in ("auto", "cuda", "rocm") and torch.cuda.is_available() and (kind != "rocm" or torch.version.hip):
        if torch.version.hip:
            return rocm_device(torch.cuda.get_device_properties(i).gcnArchName.split(":")[0])
        return cuda_device(torch.cuda.get_device_capability(i))
    if kind in ("auto", "xpu") and torch.xpu.is_available():
        found = torch.xpu.get_device_properties(i)
        return xpu_device(xe_generation(found.name, getattr(found, "device_id", 0)))
    if kind == "auto":
        return _cpu()
    raise RuntimeError(f"device {name!r} is not on this machine; --device cpu always is")


def _index(name: str, kind: str, index: str) -> int:
    """N of "cuda:N"; RuntimeError where there is no such one."""
    import torch

    cuda, xpu = torch.cuda.device_count, torch.xpu.device_count
    count = {"cuda": cuda, "rocm": cuda, "xpu": xpu}.get(kind, lambda: 0)()
    if not index:
        return 0
    if count and int(index) >= count:
        raise RuntimeError(f"device {name!r} is not on this machine, which has {kind}:0 to {kind}:{count - 1}")
    return int(index)


def _api(device: torch.device) -> Any:
    """torch.cuda or torch.xpu; None for a CPU."""
    import torch

    return None if device.type == "cpu" else getattr(torch, device.type)


def use_device(device: torch.device) -> None:
    """Make `device` the one that the calling thread allocates and launches on: threads begin with the first."""
    api = _api(device)
    if api is not None and device.index is not None:
        api.set_device(device)


def device_fault(device: torch.device) -> str:
    """Why this process can use an accelerator no more (an illegal address, an assertion in a kernel: every later call
    fails, too); "" while it can, and for a CPU.  Waits for what was launched."""
    api = _api(device)
    if api is None:
        return ""
    try:
        api.synchronize(device)
    except RuntimeError as e:
        return str(e).splitlines()[0]
    return ""


def _wanted(backends: Sequence[Backend]) -> Iterable[str]:
    return dict.fromkeys(name for b in backends for name in b.needs)


def installed_packages(
    backends: Sequence[Backend], probe_imports: bool = False, folder: Path | None = None
) -> dict[str, Package]:
    """The distributions that rows of the table need and that are installed here.  probe_imports: import each and
    record the error of one that is broken; folder: where it is remembered which import (import_health.py).  The CPU
    kernel's shared object counts as one of them."""
    health = ImportHealth(folder)
    out: dict[str, Package] = {}
    for name in _wanted(backends):
        if name == CPU_KERNEL:
            native = importlib.import_module("expertd_kernels.native.library")
            error = native.kernel_error()
            out[name] = Package(str(native.ABI), error, native.source.remedy() if error else "")
            continue
        if name in FACTS:
            out[name] = FACTS[name]()
        elif (dist := installed_as(name)) is not None:
            out[name] = Package(dist.version, health.error(name) if probe_imports else "")
    health.keep()
    return out


def packages_for(device: Device, backends: Sequence[Backend], folder: Path | None = None) -> dict[str, Package]:
    """What is installed here, as a server on `device` of this machine finds it: on an accelerator each is imported, so
    that one that is broken is refused with its error; a CPU needs none of them.  folder: see installed_packages."""
    return installed_packages(backends, probe_imports=device.kind != "cpu", folder=folder)


def assumed_packages(backends: Sequence[Backend]) -> Mapping[str, Package]:
    """Each needed distribution at a version that its row accepts: for asking about hardware that is not here."""
    return {
        name: Package(want.split(",")[0].lstrip("><=~!") or "0") for b in backends for name, want in b.needs.items()
    }
