"""The kernels under each version of Triton that the oracle takes: compiled for sm_90 by that version in a process of
its own.  Which: EXPERTD_TEST_TRITON, for instance "3.6.0,3.8.0" or "all"; by default the newest, unless it is installed
and the other tests compile with it.  pip puts each into build/triton once, beside what is installed."""

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
SECONDS = 800


def wanted() -> list[str]:
    asked = os.environ.get("EXPERTD_TEST_TRITON", "")
    if asked == "all":
        return list(VERSIONS)
    return asked.split(",") if asked else [v for v in VERSIONS[-1:] if v != installed("triton")]


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


@pytest.mark.slow
@pytest.mark.parametrize("version", wanted())
def test_every_kernel_compiles_under(version, tmp_path):
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


@pytest.mark.parametrize("row", [b for b in BACKENDS if b.name.startswith("gluon_")], ids=lambda b: b.name)
def test_the_oracle_takes_these_versions_and_no_other(row):
    taken = SpecifierSet(row.needs["triton"])
    assert all(v in taken for v in VERSIONS)
    first, last = (tuple(map(int, VERSIONS[i].split(".")[:2])) for i in (0, -1))
    assert f"{first[0]}.{first[1] - 1}.9" not in taken
    assert f"{last[0]}.{last[1] + 1}.0" not in taken
