"""What the tests of kernel packages' rows share: the packages' Python sources, for tests that compare with their own
functions on a CPU, `bits`, `check_packing` and `refused`.

A package counts as there when it is installed, or when `make vendor` has unpacked its wheel (fetch_vendor.py), or when
EXPERTD_TEST_WHEELS names a folder with unpacked wheels (each in a folder of its own, or all in one).  Nothing is
imported as the package itself: its native parts are not needed.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import typing
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch
from fetch_vendor import PLACE

from expertd_kernels.common.refused import Refused
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.packed.builder import pack


def package_folder(name: str) -> Path:
    """The folder of package `name`; skips the test with a sentence where there is none."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    root = Path(os.environ.get("EXPERTD_TEST_WHEELS") or PLACE)
    found = [*root.glob(name), *root.glob(f"*/{name}")]
    if not found:
        pytest.skip(f"package {name} is neither installed nor unpacked: `make vendor` fetches it")
    return found[0]


@contextmanager
def stand_ins(*names: str):
    """Empty modules under these names while something is imported; what was there comes back."""
    before = {name: sys.modules.get(name) for name in names}
    for name in names:
        sys.modules[name] = ModuleType(name)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


def load_file(path: Path, name: str) -> ModuleType:
    """The module in `path` under `name`, which stays in sys.modules for what imports it relatively."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def functions(path: Path, names: set[str], into: ModuleType) -> ModuleType:
    """Only these functions and constants of a source file, undecorated and run in module `into`: for files whose other
    imports are not there.  AssertionError where the file does not have them all."""
    tree = ast.parse(path.read_text())
    found = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            node.decorator_list = []
            found.append((node.name, node))
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) in names:
            found.append((node.targets[0].id, node))
    assert {name for name, _ in found} == names, f"{path.name} lacks {names - {n for n, _ in found}}"
    for name, value in vars(typing).items():
        into.__dict__.setdefault(name, value)
    into.torch = torch
    exec(compile(ast.Module([n for _, n in found], []), str(path), "exec"), into.__dict__)
    return into


def refused(row, weights, problem):
    """The sentence with which weights are refused on their way into the layout of the row of this name."""
    with pytest.raises(Refused) as found:
        pack(next(b for b in BACKENDS if b.name == row), weights, problem)
    return str(found.value)


def bits(weights):
    """Every tensor of canonical weights, by name: equal where dtypes, shapes and bits are."""
    return {
        f"{m}.{name}": (t.dtype, t.shape, t.reshape(-1).view(torch.uint8).tolist())
        for m in ("w13", "w2")
        for name, t in getattr(weights, m).tensors()
    }


def check_packing(backend, weights, problem):
    """unpack(pack(w)) is w bit for bit, w stays as it is, packed tensors are contiguous, and packing what was unpacked
    gives the same bits again."""
    before = bits(weights)
    packed = backend.pack(weights, problem)
    assert bits(backend.unpack(packed)) == before == bits(weights)
    twice = backend.pack(backend.unpack(packed), problem)
    for name, t in packed.tensors.items():
        assert t.is_contiguous(), name
        assert torch.equal(t.reshape(-1).view(torch.uint8), twice.tensors[name].reshape(-1).view(torch.uint8)), name
