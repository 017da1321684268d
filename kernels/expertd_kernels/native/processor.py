"""What Linux says about this machine's processor.  Imports no torch: the oracle asks it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

__all__ = ["cpu_features", "cpu_info"]

_FLAGS = frozenset(
    [
        "avx2",
        "fma",
        "f16c",
        "avx512f",
        "avx512bw",
        "avx512vl",
        "avx512dq",
        "avx512_bf16",
        "avx512_vnni",
        "amx_tile",
        "amx_bf16",
        "amx_int8",
    ]
)


def cpu_info(*keys: str) -> str:
    """The first value of one of `keys` in /proc/cpuinfo; "" where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(keys)), "")


@cache
def cpu_features() -> frozenset[str]:
    """The instruction sets of this processor that rules and plans ask about; "neon" on aarch64."""
    words = set(cpu_info("flags", "Features").split())
    return frozenset({w for w in words if w in _FLAGS} | ({"neon"} if "asimd" in words else set()))
