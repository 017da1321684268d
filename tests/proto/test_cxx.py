"""The small C++ libraries are found where they lie: in a checkout, and where the packages are installed."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from expertd import cxx
from expertd.cxx import LIBRARIES

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda x: x.name)
def test_sources_and_headers_are_found_in_a_checkout_and_where_the_packages_are_installed(library, tmp_path):
    for folder in (library.folder, *library.headers):
        shutil.copytree(ROOT / folder, tmp_path / Path(*Path(folder).parts[1:]), ignore=shutil.ignore_patterns("*.so"))
    assert [p.name for p in library.sources(tmp_path)] == [p.name for p in library.sources(ROOT)] != []
    assert all(any(p.glob("*.h")) for p in library.includes(tmp_path))
    assert library.digest(tmp_path) == library.digest(ROOT)
    assert library.place(tmp_path) == tmp_path / Path(*Path(library.folder).parts[1:])


def test_a_library_of_other_sources_is_not_loaded(tmp_path, monkeypatch):
    folder = tmp_path / cxx.SHM
    folder.mkdir(parents=True)
    (folder / "client.cpp").write_text("int one;")
    monkeypatch.setattr(cxx, "_root", lambda: tmp_path)
    name = "libexpertd_shm.so"
    assert cxx.stale(name) == "", "not known how it was made"
    library = next(x for x in LIBRARIES if x.name == name)
    (folder / f".{name}.digest").write_text(library.digest(tmp_path) + "x86_64")
    assert cxx.stale(name) == ""
    (folder / "client.cpp").write_text("int two;")
    assert "python -m expertd.cxx" in cxx.stale(name)


def test_a_stale_library_of_the_cpus_kernels_is_told_beside_the_small_ones(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "kernels/expertd_kernels/native/csrc"
    folder.mkdir(parents=True)
    (tmp_path / cxx.SHM).mkdir(parents=True)
    shutil.copy(ROOT / "kernels/expertd_kernels/native/csrc/build.py", folder)
    (folder / "layer.cpp").write_text("int one;")
    monkeypatch.setattr(cxx, "_root", lambda: tmp_path)
    monkeypatch.setattr(cxx, "build", lambda library, root: root / library.name)
    assert cxx.main() == 0
    assert capsys.readouterr().err == "", "none is there"
    (folder / "libexpertd_cpu.so").write_bytes(b"of older sources")
    assert cxx.main() == 0, "the small ones are there"
    said = capsys.readouterr().err
    assert "libexpertd_cpu.so was made of other sources than those that lie there" in said
    assert "python -m expertd_kernels.native.csrc.build makes it anew" in said
    digest = subprocess.run(
        [sys.executable, "-c", "import build; print(build.sources_hash())"], cwd=folder, capture_output=True, text=True
    ).stdout.strip()
    (folder / "libexpertd_cpu.so").write_bytes(b"of " + digest.encode())
    assert cxx.main() == 0
    assert capsys.readouterr().err == ""
