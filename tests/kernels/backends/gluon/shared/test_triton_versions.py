"""The kernels under each version of Triton that the oracle takes: compiled for sm_90 by that version in a process of
its own.  pip puts each version into build/triton once, beside what is installed.

EXPERTD_TEST_TRITON, for instance "3.6.0,3.8.0" or "all" (`make triton`), says which, and writes to triton_versions.json
which state of the kernels compiled under them.  Without it, in `make soak`, the newest version compiles them, where
they changed since it was last recorded, and unless it is installed and the other tests compile with it."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version as installed
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from expertd_kernels.oracle.table import BACKENDS

VERSIONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
ROOT = Path(__file__).parents[5]
FILES = ("gluon/test_launches.py", "portable/test_compile.py", "test_glue_compile.py")
COMPILERS = ("dry_gpu.py", "kept_triton.py", *(f"backends/{name}" for name in FILES))
SECONDS = 800
RECORD = Path(__file__).with_name("triton_versions.json")
ROOMS = ("backends", "common", "compiling", "weights")
"""Of expertd_kernels: kernels, and what decides how they are compiled."""
ASKED = os.environ.get("EXPERTD_TEST_TRITON", "")


def wanted() -> list[str]:
    if ASKED == "all":
        return list(VERSIONS)
    return ASKED.split(",") if ASKED else [v for v in VERSIONS[-1:] if v != installed("triton")]


def kernels_digest() -> str:
    """Of the sources in ROOMS, and of the tests that compile them."""
    sources = [p for room in ROOMS for p in (ROOT / "kernels/expertd_kernels" / room).rglob("*.py")]
    found = hashlib.sha256()
    for path in sorted([*sources, *(ROOT / "tests/kernels" / name for name in COMPILERS)]):
        found.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return found.hexdigest()


def recorded() -> dict[str, str]:
    """{version: kernels_digest() of the kernels that compiled under it}."""
    return dict(json.loads(RECORD.read_text())) if RECORD.exists() else {}


def folder_of(version: str) -> Path:
    """Where Triton `version` is; made if it is not there."""
    folder = ROOT / "build/triton" / version
    if not folder.exists():
        parts = folder.with_name(version + ".part")
        shutil.rmtree(parts, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--only-binary=:all:", "--target", str(parts)]
        done = subprocess.run([*pip, f"triton=={version}"], capture_output=True, text=True, check=False)
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["nothing"]
            pytest.skip(f"Triton {version} is not in build/triton, and pip cannot install it here: {said[0]}")
        parts.rename(folder)
    return folder


@pytest.mark.soak
@pytest.mark.parametrize("version", wanted())
def test_every_kernel_compiles_under(version, tmp_path):
    if not ASKED and recorded().get(version) == kernels_digest():
        pytest.skip("the kernels are as they were when `make triton` compiled them")
    paths = [os.environ.get("PYTHONPATH", ""), *(str(ROOT / name) for name in ("proto", "kernels", "server", "client"))]
    if version != installed("triton"):
        paths.insert(0, str(folder_of(version)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    tells = [sys.executable, "-c", "import triton; print(triton.__version__)"]
    done = subprocess.run(tells, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == version
    files = [f"tests/kernels/backends/{name}" for name in FILES]
    pytest_run = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-o", "addopts=", "--basetemp"]
    done = subprocess.run(
        [*pytest_run, str(tmp_path / "its"), "--import-mode=importlib", *files],
        capture_output=True, text=True, check=False, env=environment, cwd=ROOT, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    assert " skipped" not in done.stdout
    if ASKED:
        RECORD.write_text(json.dumps({**recorded(), version: kernels_digest()}, indent=0, sort_keys=True) + "\n")


def test_a_changed_kernel_is_not_taken_for_the_recorded_one(tmp_path, monkeypatch):
    here = kernels_digest()
    kernels = tmp_path / "kernels/expertd_kernels"
    for room in ROOMS:
        shutil.copytree(ROOT / "kernels/expertd_kernels" / room, kernels / room)
    for name in COMPILERS:
        (copy := tmp_path / "tests/kernels" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "tests/kernels" / name, copy)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert kernels_digest() == here
    for name in ("backends/gluon/shared/routing.py", "backends/gluon/shared/gpu.py"):
        path = kernels / name
        sound = path.read_bytes()
        path.write_bytes(sound + b"# changed\n")
        assert kernels_digest() != here, name
        path.write_bytes(sound)


@pytest.mark.parametrize("row", [b for b in BACKENDS if b.name.startswith("gluon_")], ids=lambda b: b.name)
def test_the_oracle_takes_these_versions_and_no_other(row):
    taken = SpecifierSet(row.needs["triton"])
    assert all(v in taken for v in VERSIONS)
    first, last = (tuple(map(int, VERSIONS[i].split(".")[:2])) for i in (0, -1))
    assert f"{first[0]}.{first[1] - 1}.9" not in taken
    assert f"{last[0]}.{last[1] + 1}.0" not in taken
