"""Devices by the names that people give them: "h100", "MI300X", "arc b580", "sm89", "gfx942".  Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from expertd_kernels.common.problem import NAMED_DEVICES, Device

__all__ = ["KINDS", "PRODUCTS", "arch_of", "cuda_device", "named_device", "rocm_device", "xpu_device"]

PRODUCTS: Mapping[str, Sequence[str]] = {
    "sm70": ("v100",),
    "sm75": ("t4", "rtx2080", "rtx2080ti"),
    "sm80": ("a100", "a800", "a30"),
    "sm86": ("a10", "a10g", "a16", "a2", "a40", "a6000", "rtxa6000", "rtx3080", "rtx3090", "rtx3090ti"),
    "sm89": ("l4", "l20", "l40", "l40s", "rtx4080", "rtx4090", "rtx4090d", "rtx6000ada"),
    "sm90": ("h100", "h200", "h800", "h20", "gh200"),
    "sm100": ("b200", "gb200", "b100"),
    "sm103": ("b300", "gb300"),
    "sm120": ("rtx5080", "rtx5090", "rtxpro6000"),
    "sm121": ("gb10", "dgxspark"),
    "gfx90a": ("mi210", "mi250", "mi250x"),
    "gfx942": ("mi300", "mi300a", "mi300x", "mi308x", "mi325x"),
    "gfx950": ("mi350x", "mi355x"),
    "gfx1100": ("rx7900xt", "rx7900xtx", "w7900"),
    "gfx1201": ("rx9070", "rx9070xt", "r9700"),
    "xpu-xe": ("a770", "max1100", "max1550"),
    "xpu-xe2": ("b570", "b580", "b50", "b60", "b70", "lunarlake"),
    "xpu-xe3": ("pantherlake",),
    "cpu-avx2": ("haswell", "zen2", "zen3", "rome", "milan"),
    "cpu-avx512": ("zen4", "zen5", "genoa", "turin", "cooperlake"),
    "cpu-amx": ("sapphirerapids", "emeraldrapids", "graniterapids"),
    "cpu-arm": ("graviton3", "graviton4", "grace", "axion"),
}
"""Architecture -> names of products, in small letters, without spaces, maker and memory size."""

KINDS: Mapping[str, str] = {"cuda": "sm90", "rocm": "gfx942", "xpu": "xpu-xe2"}
"""Kind of device -> the architecture that stands for it where no such device is here."""

_ARCH = {product: arch for arch, products in PRODUCTS.items() for product in products}
_LEFT_OUT = re.compile(r"nvidia|geforce|amd|instinct|radeon|intel|arc|pcie|nvl|sxm\d*|hbm\d*e?|\d+gi?b")


def arch_of(name: str) -> str:
    """The architecture of a product; `name` itself where it is none: "NVIDIA H100-SXM5-80GB" -> "sm90"."""
    words = [w for w in re.split(r"[\s_/-]+", name.lower()) if w and not _LEFT_OUT.fullmatch(w)]
    return _ARCH.get("".join(words), name.lower())


def named_device(name: str) -> Device | None:
    """A device that need not be here: a product, an architecture or a kind; None for other names."""
    arch = arch_of(KINDS.get(name.lower(), name))
    if arch in NAMED_DEVICES:
        return NAMED_DEVICES[arch]
    if m := re.fullmatch(r"sm_?(\d{1,2})(\d)[af]?", arch):
        return cuda_device((int(m[1]), int(m[2])))
    if re.fullmatch(r"gfx\d{1,2}\d[0-9a-f]", arch):
        return rocm_device(arch)
    return xpu_device(arch.removeprefix("xpu-")) if re.fullmatch(r"(xpu-)?xe\d?", arch) else None


def cuda_device(capability: tuple[int, int]) -> Device:
    """Compute capability (9, 0) -> sm90."""
    return Device("cuda", f"sm{capability[0]}{capability[1]}", capability)


def rocm_device(gfx: str) -> Device:
    """ "gfx942" -> capability (9, 42), "gfx90a" -> (9, 10): the last two hex digits, as torch writes them."""
    major, minor = gfx.removeprefix("gfx")[:-2], gfx[-2:]
    return Device("rocm", gfx, (int(major), int(minor) if minor.isdigit() else int(minor, 16)))


def xpu_device(arch: str) -> Device:
    """ "xe", "xe2" or "xe3"."""
    return replace(NAMED_DEVICES["xpu-xe2"], arch=arch, capability=(int(arch.removeprefix("xe") or 1), 0))
