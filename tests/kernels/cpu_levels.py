"""The instruction-set levels of the CPU kernel in tests: those that this processor has, and the others through a
library whose AVX-512 and AMX instructions are emulated (tests/kernels/emulated).

    with on_level("avx512_amx"): ...      expertd_kernels.native is at that level, whatever the processor

What ran how is counted for the line at the end of the test run (tests/conftest.py).
"""

from __future__ import annotations

import fcntl
import hashlib
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from self_test import EMULATED, stand_ins

from expertd_kernels.native import library as native
from expertd_kernels.native.csrc import build
from expertd_kernels.native.processor import cpu_features

__all__ = ["KNOWN", "RAN", "emulated_library", "how", "on_level", "ran", "spread", "summary"]

X86 = platform.machine() in ("x86_64", "AMD64")
AVX512 = ("avx512_amx", "avx512_bf16", "avx512_bytes", "avx512_bytes_ahead", "avx512_vnni", "avx512")
KNOWN = (*AVX512, "avx2", "portable") if X86 else ("portable",)
"""Levels of this architecture."""

RAN = "cpu level"
"""Property of a test: [level, "native" or "emulated"]."""

KEPT = Path(__file__).parents[2] / "build" / "emulated"


@cache
def how(level: str) -> str:
    """ "native" or "emulated", or why neither is possible on this machine."""
    if native.kernel_error():
        return native.kernel_error()
    if level in native.levels():
        return "native"
    if level not in AVX512:
        return f"{level}: not on this processor, and not emulated"
    if "avx2" not in cpu_features():
        return f"{level}: the emulation is compiled for AVX2, which this processor lacks"
    try:
        build.find_compiler()
    except build.BuildError as e:
        return str(e)
    return "emulated"


@cache
def emulated_library() -> Path:
    """The shared object with emulated AVX-512 levels, kept by the content of its sources."""
    digest = hashlib.sha256(build.sources_hash().encode())
    for path in sorted(EMULATED.glob("*")):
        digest.update(path.read_bytes())
    made = KEPT / digest.hexdigest()[:16] / build.LIBRARY
    KEPT.mkdir(parents=True, exist_ok=True)
    with (KEPT / "lock").open("w") as lock:  # another worker may be making it
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            build.build(made, stand_ins=stand_ins(()))
    return made


@cache
def _emulated() -> object:
    return native._open(emulated_library())


@contextmanager
def on_level(level: str) -> Iterator[None]:
    """Contexts of expertd_kernels.native that name no level have this one, and the library is the one that has it.
    Skips the test where there is none."""
    way = how(level)
    if way not in ("native", "emulated"):
        pytest.skip(way)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXPERTD_CPU_ISA", level)
        if way == "emulated":
            lib = _emulated()
            patch.setattr(native, "library", lambda: lib)
        yield


def spread(names: Sequence[str]) -> list[tuple[str, str]]:
    """(level, name), for schemes' names: each on every level that this processor has.  An emulated level, which takes
    ten times as long, has two of each element, and the next level the next two: so it computes on every element, and
    each scheme is computed on some of them."""
    elements: dict[str, list[str]] = {}
    for name in names:
        elements.setdefault(name.partition("_")[0], []).append(name)
    found = []
    for i, level in enumerate(KNOWN):
        some = {of[(2 * i + n) % len(of)] for of in elements.values() for n in (0, 1)}
        found += [(level, name) for name in names if how(level) != "emulated" or name in some]
    return found


def ran(reports: Iterable[Any]) -> dict[str, str]:
    """Level -> "native" or "emulated", of the tests that are reported to have run to their end."""
    found: dict[str, str] = {}
    for report in reports:
        if getattr(report, "when", "") == "call" and getattr(report, "outcome", "") != "skipped":
            found |= dict(value for name, value in report.user_properties if name == RAN)
    return found


def summary(found: Mapping[str, str]) -> str:
    """The line at the end of a test run: which levels of this architecture ran and how; "" where no test asked."""
    if not found:
        return ""
    parts = [(way, [level for level in KNOWN if found.get(level) == way]) for way in ("native", "emulated")]
    parts.append(("not tested", [level for level in KNOWN if level not in found]))
    line = "; ".join(f"{way}: {', '.join(levels) or 'none'}" for way, levels in parts)
    return f"CPU levels {line}" + ("; aarch64 runs under `make aarch64`" if X86 else "")


if __name__ == "__main__":  # what `make test` does first: compiling takes longer than a test may
    if any(how(level) == "emulated" for level in KNOWN):
        print(emulated_library())
