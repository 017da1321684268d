"""The wheel that is given away: what the library shows and needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from expertd_kernels.native import library as native
from expertd_kernels.native.csrc import build

ROOT = Path(__file__).parents[2]


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)


def test_without_a_compiler_the_way_out_is_named(no_compiler):
    with pytest.raises(build.BuildError, match=r"apt-get install g\+\+.*pip install ziglang"):
        build.find_compiler()
    with pytest.raises(build.BuildError, match="aarch64 with an old glibc needs the package ziglang"):
        build.find_compiler("aarch64")
    assert build.remedy() == "pip install ziglang && python -m expertd_kernels.native.csrc.build"


def test_compilers_in_their_order(no_compiler, monkeypatch, tmp_path):
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: name == "ziglang" or None)
    zig = [sys.executable, "-m", "ziglang", "c++", "-target"]
    assert build.find_compiler("aarch64")[:6] == [*zig, "aarch64-linux-gnu.2.28"]
    assert build.find_compiler()[:5] == zig
    assert build.remedy() == "python -m expertd_kernels.native.csrc.build"
    for name in ("clang++", "g++", "c++", "ccache"):
        (tmp_path / name).touch(mode=0o755)
        if name != "ccache":
            assert build.find_compiler() == [str(tmp_path / name)]
    monkeypatch.setenv("CXX", "ccache g++ -m64")
    assert build.find_compiler() == [str(tmp_path / "ccache"), "g++", "-m64"]
    assert build.find_compiler("x86_64")[:5] == zig, "a wheel to give away is never made by the system's compiler"


@pytest.mark.skipif(bool(native.kernel_error()), reason=native.kernel_error() or "built")
def test_the_library_runs_what_the_processor_has():
    """It asks the processor itself: run-time libraries of compilers may say no to everything."""
    from expertd_kernels.oracle.probe import detect_device

    features = detect_device("cpu").features
    levels = native.levels()
    assert levels[-1] == "portable"
    assert ("avx2" in levels) == ({"avx2", "fma"} <= features)
    wide = {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= features
    assert ("avx512" in levels) == wide
    assert ("avx512_bf16" in levels) == (wide and {"avx512_vnni", "avx512_bf16"} <= features)


@pytest.mark.slow
def test_a_wheel_for_old_systems(tmp_path):
    """Half a minute with compiled sources at hand; `make wheel` installs what it needs."""
    for module in ("ziglang", "auditwheel", "hatchling"):
        pytest.importorskip(module, reason=f"{module} is not installed: `make wheel` does that")
    out = subprocess.run(
        [sys.executable, "deploy/wheel.py", "build", "--machine", "x86_64,aarch64", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert out.returncode == 0, out.stderr
    for line, machine in zip(out.stdout.splitlines(), ("x86_64", "aarch64"), strict=True):
        assert f"manylinux_2_28_{machine}.whl" in line
        libraries = ("cpu", "shm", "engine", "cluster")
        assert all(f"libexpertd_{name}.so" in line for name in libraries)
        assert "newest symbol GLIBC_2." in line
