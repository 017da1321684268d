"""What the adapters use of engines is recorded, and pinned; without the engines."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
import signatures

ROOT = Path(__file__).parent.parent.parent


def imported(package):
    """ "module:name" of each import of an engine in its adapter."""
    found = set()
    for path in (ROOT / "client/expertd_client/engines" / package).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
                found |= {f"{node.module}:{alias.name}" for alias in node.names}
            assert not (isinstance(node, ast.Import) and any(a.name.split(".")[0] == package for a in node.names)), path
    return found


@pytest.mark.parametrize("package", signatures.USED)
def test_all_that_an_adapter_imports_is_recorded(package):
    used = imported(package)
    kept = signatures.recorded(package)
    assert used, package
    assert not [name for name in used if not any(key.startswith(name) for key in kept)]
    assert set(kept) == {"version", *signatures.USED[package]}  # python tests/engines/signatures.py NAME --write


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib")
@pytest.mark.parametrize(("package", "group"), [("vllm", "vllm.general_plugins"), ("sglang", "sglang.srt.plugins")])
def test_the_extra_pins_what_was_recorded_and_the_entry_point_is_there(package, group):
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [pin] = project["optional-dependencies"][package]
    assert pin.startswith(f"{package}=={signatures.recorded(package)['version']};")
    module, _, function = project["entry-points"][group]["expertd"].partition(":")
    path = ROOT / "client" / Path(*module.split(".")) / "__init__.py"
    assert f"def {function}() -> None:" in path.read_text()
