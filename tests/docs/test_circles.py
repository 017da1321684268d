"""No module imports itself by way of others, in any package: what lies below can be read, and changed, by itself."""

from collections.abc import Mapping

import grimp
import pytest

PACKAGES = ("expertctl", "expertd", "expertd_client", "expertd_echo", "expertd_kernels", "expertd_server")


def imports(*packages: str) -> dict[str, set[str]]:
    """Module -> those of the packages that it imports, wherever in it, for types alone too."""
    graph = grimp.build_graph(*packages, cache_dir=None)
    return {m: set(graph.find_modules_directly_imported_by(m)) for m in graph.modules}


def reached(imported: Mapping[str, set[str]], module: str) -> set[str]:
    """What a module imports, also by way of others."""
    found: set[str] = set()
    ahead = [module]
    while ahead:
        new = imported[ahead.pop()] - found
        found |= new
        ahead += new
    return found


def circles(imported: Mapping[str, set[str]]) -> list[list[str]]:
    """Modules that import each other, directly or not; each module is in one circle at most."""
    below = {module: reached(imported, module) for module in imported}
    found = {tuple(sorted(m for m in below[module] if module in below[m])) for module in imported}
    return sorted(list(circle) for circle in found if circle)


def test_no_modules_import_each_other():
    assert circles(imports(*PACKAGES)) == []


@pytest.mark.parametrize(
    "line",
    [
        "from toy_circle.low import a",
        "def late():\n    from toy_circle import low",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import toy_circle.low",
    ],
    ids=["as it is read", "later", "for types alone"],
)
def test_a_circle_is_seen_wherever_it_is_closed(tmp_path, monkeypatch, line):
    package = tmp_path / "toy_circle"
    package.mkdir()
    for name, text in (
        ("__init__", ""),
        ("low", "from toy_circle.middle import a"),
        ("middle", "from toy_circle.high import a"),
        ("high", line),
        ("top", "import toy_circle.high"),
    ):
        (package / f"{name}.py").write_text(f"{text}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert circles(imports("toy_circle")) == [["toy_circle.high", "toy_circle.low", "toy_circle.middle"]]
