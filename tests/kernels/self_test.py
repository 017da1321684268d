"""Builds and runs the CPU kernel's self-test program (native/self_test.cpp)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from expertd_kernels.native.csrc import build

EMULATED = Path(__file__).parent / "emulated"
SOURCE = Path(__file__).parent / "native" / "self_test.cpp"
LEVELS = ("level_avx512", "level_avx512_bf16")


def stand_ins(extra: tuple[str, ...]) -> dict[str, tuple[Path, list[str]]]:
    """The AVX-512 levels on emulated instructions.  Not optimized: the kernels unroll their loops, and every
    instruction is a function."""
    flags = ["-O0", "-mavx2", "-mfma", f"-I{EMULATED}", *extra]
    return {name: (EMULATED / f"{name}.cpp", flags) for name in LEVELS}


def make(folder: Path, sanitize: str = "", emulate: tuple[str, ...] | None = None) -> Path:
    """The program.  emulate: flags for the AVX-512 levels on emulated instructions; None: the levels as they are."""
    try:
        build.find_compiler()
    except build.BuildError as e:
        pytest.skip(str(e))
    units = {} if emulate is None else stand_ins(emulate)
    return build.build(folder / "self_test", program=SOURCE, sanitize=sanitize, stand_ins=units)


def run(program: Path, *mistake: str) -> tuple[int, str]:
    """(exit code, output), also where a sanitizer ended it."""
    done = subprocess.run([program, *mistake], capture_output=True, text=True, check=False, timeout=600)
    return done.returncode, done.stdout + done.stderr
