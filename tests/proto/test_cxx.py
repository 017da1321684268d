"""The small C++ libraries are found where they lie: in a checkout, and where the packages are installed."""

import shutil
from pathlib import Path

import pytest

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
