"""The AVX-512 and AMX levels of the CPU kernel on any x86-64: their instructions are emulated (tests/kernels/emulated).

The self-test program packs, unpacks and computes with every level: all elements and scale types, ragged sizes, one to
130 rows, 1 to 8 threads, against a plain loop over dequantized weights.  Other tests run the levels that exist here.
"""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import pytest
import self_test

X86 = platform.machine() in ("x86_64", "AMD64")
pytestmark = [
    pytest.mark.skipif(not X86, reason=f"{platform.machine()}: the AVX-512 levels are for x86-64"),
    pytest.mark.slow,  # compiles for half a minute, on a loaded machine for two
]

AVX512 = ("avx512", "avx512_vnni", "avx512_bytes", "avx512_bytes_ahead", "avx512_bf16", "avx512_amx")
FETCHED = Path(__file__).parents[3] / "build/simde/usr/include"
"""Where `make soak` puts Debian's headers."""
SIMDE = Path(os.environ.get("EXPERTD_SIMDE") or (FETCHED if FETCHED.exists() else "/usr/include"))
"""Folder that holds simde/: SIMD Everywhere, MIT licence."""


def has_avx2() -> bool:
    try:
        return "avx2" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return True


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    if not has_avx2():
        pytest.skip("the emulation is compiled for AVX2, which this processor lacks")
    return self_test.make(tmp_path_factory.mktemp("emulated"), emulate=())


def assert_all_levels_pass(code: int, output: str) -> None:
    levels = re.search(r"^levels: (.*)$", output, re.MULTILINE)
    assert levels is not None, output
    assert {*AVX512, "portable"} <= set(levels[1].split(",")), levels[1]
    tiled = re.search(r"^(\d+) through matrix tiles$", output, re.MULTILINE)
    assert tiled is not None, output
    assert int(tiled[1]) > 40
    counts = re.search(r"^(\d+) passed, (\d+) failed$", output, re.MULTILINE)
    assert counts is not None, output[-2000:]
    assert code == 0, output[-2000:]
    assert int(counts[1]) > 3000
    assert int(counts[2]) == 0


def test_avx512_levels_on_emulated_instructions(program):
    assert_all_levels_pass(*self_test.run(program))


def test_a_wrong_weight_is_noticed_at_every_level(program):
    code, output = self_test.run(program, "wrong")
    assert code == 1
    for level in AVX512:
        assert re.search(rf"^{level} element .*relative error", output, re.MULTILINE), level


@pytest.mark.soak
def test_avx512_levels_on_another_emulation(tmp_path):
    """Two independent readings of the manual: our emulation, and SIMDe's."""
    if not (SIMDE / "simde/x86/avx512.h").exists():
        pytest.skip(
            f"no SIMDe headers in {SIMDE}: `make soak` fetches Debian's libsimde-dev; or set EXPERTD_SIMDE to the"
            " folder that holds simde/"
        )
    program = self_test.make(tmp_path, emulate=("-DEXPERTD_SIMDE", "-w", "-isystem", str(SIMDE)))
    assert_all_levels_pass(*self_test.run(program))
