"""pyproject.toml's ranges, the files of pins and the backend table agree."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from expertd_kernels.oracle.table import BACKENDS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements(*extras: str) -> list[Requirement]:
    """Of the base and of some extras, without those that are for another Python."""
    texts = [*PROJECT["dependencies"], *(t for e in extras for t in PROJECT["optional-dependencies"][e])]
    found = [Requirement(t) for t in texts if not t.startswith("expertd[")]
    return [r for r in found if r.marker is None or r.marker.evaluate()]


def pins(name: str) -> dict[str, str]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    found = [Requirement(line) for line in lines]
    assert all(re.fullmatch(r"==[^=,*]+", str(r.specifier)) for r in found), f"{name}: one version of each"
    return {
        r.name.lower().replace("_", "-"): str(r.specifier)[2:] for r in found if not r.marker or r.marker.evaluate()
    }


@pytest.mark.parametrize(
    ("name", "extras"),
    [
        ("constraints.txt", ("server", "transformers", "test", "deploy")),
        ("constraints-cuda.txt", ("server", "cuda", "nvml")),
    ],
)
def test_each_requirement_is_pinned_within_its_range(name, extras):
    have = pins(name)
    for r in requirements(*extras):
        version = have.get(r.name.lower().replace("_", "-"))
        assert version is not None, f"{name} does not pin {r.name}"
        assert r.specifier.contains(version, prereleases=True), f"{name}: {r.name}=={version}, want {r.specifier}"


def test_an_extra_brings_versions_that_every_row_takes():
    """A package that pip chooses within the extra's range must not shut out the row that it is there for."""
    extras = {r.name: r.specifier for e in ("cuda", "deepgemm", "rocm", "xpu") for r in requirements(e)}
    asked = {(b.name, package, want) for b in BACKENDS for package, want in b.needs.items() if package in extras}
    assert {package for _, package, _ in asked} == set(extras) - {"torch"} - {r.name for r in requirements()}
    for row, package, want in sorted(asked):
        bounds = {s.version for s in [*extras[package], *SpecifierSet(want)]}
        for version in bounds | {f"{v}.99" for v in bounds}:
            if extras[package].contains(version, prereleases=True):
                takes = SpecifierSet(want).contains(version, prereleases=True)
                assert takes, f"extra gives {package} {version}, row {row} wants {want}"
