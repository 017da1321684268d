"""Imports chosen modules with a point before each statement of their functions, and with virtual threads and time."""

from __future__ import annotations

import ast
import builtins
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Collection, Mapping
from typing import Any

import virtual

Fault = Mapping[str, Collection[tuple[str, str]]]
"""Module -> texts in its source, and what is put in their places."""
_REAL = {"threading", "time", "concurrent.futures"}


class _Weaver(ast.NodeTransformer):
    """The names of _REAL become those of `virtual`."""

    def __init__(self) -> None:
        self._inside = 0

    def visit_Import(self, node: ast.Import) -> Any:
        for alias in node.names:
            if alias.name in _REAL:
                alias.asname, alias.name = alias.asname or alias.name, "virtual"
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        if node.module in _REAL:
            node.module = "virtual"
        return node

    def _function(self, node: Any) -> Any:
        self._inside += 1
        self.generic_visit(node)
        self._inside -= 1
        node.body = self._pointed(node.body)
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = _function  # noqa: N815

    def _block(self, node: Any) -> Any:
        self.generic_visit(node)
        if self._inside:
            for field in ("body", "orelse", "finalbody"):
                if getattr(node, field, None):
                    setattr(node, field, self._pointed(getattr(node, field)))
        return node

    visit_If = visit_For = visit_While = visit_With = visit_Try = visit_ExceptHandler = _block  # noqa: N815

    def _pointed(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        woven: list[ast.stmt] = []
        for statement in statements:
            if not isinstance(statement, ast.Global | ast.Nonlocal):
                call = ast.Expr(ast.Call(ast.Name("__point__", ast.Load()), [], []))
                woven.append(ast.copy_location(call, statement))
            woven.append(statement)
        return woven


class _Loader(importlib.machinery.SourceFileLoader):
    changes: Collection[tuple[str, str]] = ()

    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        source = self.get_data(path).decode()
        for old, new in self.changes:
            if source.count(old) != 1:
                raise RuntimeError(f"{path}: got {source.count(old)} times {old!r}, want one to plant a fault in")
            source = source.replace(old, new)
        tree = ast.fix_missing_locations(_Weaver().visit(ast.parse(source, path)))
        return compile(tree, path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, names: Collection[str], planted: Fault) -> None:
        self._names, self._planted = names, planted

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self._names:
            return None
        found = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert found is not None
        assert found.origin is not None
        loader = _Loader(name, found.origin)
        loader.changes = self._planted.get(name, ())
        return importlib.util.spec_from_loader(name, loader)


def weave(names: Collection[str], planted: Fault) -> None:
    """Modules of these names, imported from now on.  planted: what is changed in the source of some.  Raises
    RuntimeError where one was imported before."""
    if there := [name for name in names if name in sys.modules]:
        raise RuntimeError(f"imported already: {', '.join(there)}")
    builtins.__point__ = virtual.point  # type: ignore[attr-defined]
    sys.meta_path.insert(0, _Finder(names, planted))
