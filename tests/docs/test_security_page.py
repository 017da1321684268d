"""SECURITY.md: every test that it names exists, and every guarantee names one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from documents import ROOT

PAGE = (ROOT / "SECURITY.md").read_text()


def _file(name: str) -> Path:
    """Of a path, or of a name that one test file has."""
    if (ROOT / name).is_file():
        return ROOT / name
    found = list((ROOT / "tests").rglob(name))
    assert len(found) == 1, f"SECURITY.md: {name}: {len(found)} files, want one"
    return found[0]


def _functions(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def named(text: str) -> list[tuple[str, str]]:
    """(file, test) of each `FILE::test`, `::test` and `FILE`; "" = the whole file."""
    out: list[tuple[str, str]] = []
    for file, test in re.findall(r"`((?:[\w/.]+/)?\w+\.py)?(?:::(test_\w+))?`", text):
        if file or test:
            out.append((file or out[-1][0], test))
    return out


def sections() -> dict[str, str]:
    return {part.partition("\n")[0]: part.partition("\n")[2] for part in PAGE.split("\n## ")[1:]}


def rows(section: str) -> list[list[str]]:
    """Of its table, without the two lines of the head."""
    lines = [line for line in sections()[section].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_test_that_is_named_exists():
    tests = [(file, test) for file, test in named(PAGE) if test]
    assert len(tests) > 30
    missing = [f"{file}::{test}" for file, test in tests if test not in _functions(_file(file))]
    assert not missing
    for file, _ in named(PAGE):
        if file.startswith("tests/"):
            assert (ROOT / file).is_file(), file


@pytest.mark.parametrize("section", ["How long a peer can make us wait", "Guarantees and their tests"])
def test_every_promise_names_its_test(section):
    found = rows(section)
    assert len(found) >= 10
    for cells in found:
        assert named(cells[-1]), f"{section}: {cells[0]}: names no test"
