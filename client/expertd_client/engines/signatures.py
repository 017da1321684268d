"""What a package's source defines under a name: parameters, fields, constants.  The package is not imported.

    sources = Sources(site_packages)
    sources.signature("vllm.forward_context:ForwardContext[is_padding]")     # {"is_padding": "None"}
    sources.signature("vllm.config:get_current_vllm_config")                 # "()"

What a name may be:

    "module:function", "module:Class", "module:Class.method"     parameters; of a class, of its constructor
    "module:CONSTANT"
    "module:Class[field,field]"     fields, with their defaults
    "module:Class{name,name}"       attributes of an object, which its methods set, or its class
    "module:op NAME"                the function that is registered as a custom op with op_name="NAME"

Annotations are left out: they differ between versions of Python.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

__all__ = ["MissingNameError", "Signature", "Sources", "differences"]

Signature: TypeAlias = "str | dict[str, str]"
"""Parameters as in a `def`, "(a, b=1)"; "property"; "constant"; or field -> default, "a field" = it has none, or
attribute -> "an attribute"."""
_Function = (ast.FunctionDef, ast.AsyncFunctionDef)


class MissingNameError(LookupError):
    """The source defines no such name."""


class _Found(NamedTuple):
    module: str
    node: ast.AST


class Sources:
    """The packages in a folder, such as site-packages or an unpacked wheel."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._trees: dict[str, ast.Module] = {}

    def signatures(self, names: Iterable[str]) -> dict[str, Signature | None]:
        """Of each name; None = the source does not define it."""
        found: dict[str, Signature | None] = {}
        for name in names:
            try:
                found[name] = self.signature(name)
            except MissingNameError:
                found[name] = None
        return found

    def signature(self, name: str) -> Signature:
        """Raises MissingNameError."""
        module, _, path = name.partition(":")
        path, _, fields = path.partition("[")
        path, _, attributes = path.partition("{")
        if path.startswith("op "):
            return _parameters(self._operator(module, path[3:]).args)
        first, *rest = path.split(".")
        found = self._defined(module, first)
        for part in rest:
            found = self._member(found, part)
        if fields:
            return {field: self._default(found, field) for field in fields.rstrip("]").split(",")}
        if attributes:
            return {name: self._attribute(found, name) for name in attributes.rstrip("}").split(",")}
        return self._text(found)

    def _attribute(self, found: _Found, name: str) -> str:
        """Raises MissingNameError where neither a method of the class sets self.NAME nor the class defines it."""
        for line in self._line(found):
            for node in ast.walk(line.node):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == name:
                    return "an attribute"
        self._member(found, name)
        return "an attribute"

    def _tree(self, module: str) -> ast.Module:
        if module not in self._trees:
            path = self._root.joinpath(*module.split("."))
            file = next((f for f in (path / "__init__.py", path.with_suffix(".py")) if f.is_file()), None)
            if file is None:
                raise MissingNameError(f"no module {module}")
            self._trees[module] = ast.parse(file.read_text(encoding="utf-8"))
        return self._trees[module]

    def _defined(self, module: str, name: str, seen: frozenset[tuple[str, str]] = frozenset()) -> _Found:
        """Where `name`, as `module` has it, is defined: imports are followed."""
        if (module, name) in seen:
            raise MissingNameError(f"{module}:{name} is imported in a circle")
        stars = []
        for node in _statements(self._tree(module).body):
            if isinstance(node, ast.ImportFrom):
                source = self._absolute(module, node)
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self._imported(source, alias.name, seen | {(module, name)})
                    if alias.name == "*":
                        stars.append(source)
            elif name in _names(node):
                return _Found(module, node)
        for source in stars:
            try:
                return self._defined(source, name, seen | {(module, name)})
            except MissingNameError:
                continue
        raise MissingNameError(f"{module} has no {name}")

    def _imported(self, source: str, name: str, seen: frozenset[tuple[str, str]]) -> _Found:
        try:
            return self._defined(source, name, seen)
        except MissingNameError:
            return _Found(f"{source}.{name}", self._tree(f"{source}.{name}"))  # a module of that package

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        package = self._root.joinpath(*parts, "__init__.py").is_file()
        parts = parts[: len(parts) - node.level + package]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def _member(self, found: _Found, name: str) -> _Found:
        """Of a class or its bases, of the class of an annotated variable, of a module."""
        module, node = found
        if isinstance(node, ast.Module):
            return self._defined(module, name)
        if isinstance(node, ast.AnnAssign):
            return self._member(self._named(module, node.annotation), name)
        if isinstance(node, ast.ClassDef):
            for line in self._line(found):
                for statement in _statements(line.node.body):  # type: ignore[attr-defined]
                    if name in _names(statement):
                        return _Found(line.module, statement)
        raise MissingNameError(f"{module}: {getattr(node, 'name', '?')} has no {name}")

    def _line(self, found: _Found) -> Iterator[_Found]:
        """A class and its bases, as far as their source is here."""
        yield found
        for base in found.node.bases:  # type: ignore[attr-defined]
            try:
                named = self._named(found.module, base)
            except MissingNameError:
                continue
            if isinstance(named.node, ast.ClassDef):
                yield from self._line(named)

    def _named(self, module: str, expression: ast.expr) -> _Found:
        if isinstance(expression, ast.Subscript):  # Base[T]
            expression = expression.value
        if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
            expression = ast.parse(expression.value, mode="eval").body
        if isinstance(expression, ast.Attribute):
            return self._member(self._named(module, expression.value), expression.attr)
        if isinstance(expression, ast.Name):
            return self._defined(module, expression.id)
        raise MissingNameError(f"{module}: {ast.unparse(expression)} is no name")

    def _default(self, found: _Found, field: str) -> str:
        node = self._member(found, field).node
        value = getattr(node, "value", None)
        return "a field" if value is None or isinstance(value, ast.Call) else ast.unparse(value)

    def _text(self, found: _Found) -> str:
        node = found.node
        if isinstance(node, _Function):
            decorators = {ast.unparse(d).rpartition(".")[2] for d in node.decorator_list}
            return "property" if decorators & {"property", "cached_property"} else _parameters(node.args)
        return self._constructor(found) if isinstance(node, ast.ClassDef) else "constant"

    def _constructor(self, found: _Found) -> str:
        line = list(self._line(found))
        fields: dict[str, str] = {}
        for module, node in line:
            assert isinstance(node, ast.ClassDef)
            methods = {n.name: n for n in _statements(node.body) if isinstance(n, _Function)}
            if "__init__" in methods:
                return _parameters(methods["__init__"].args, skip=1)
            marks = [ast.unparse(d).partition("(")[0] for d in node.decorator_list] + [
                ast.unparse(b) for b in node.bases
            ]
            if any(mark.rpartition(".")[2] in ("dataclass", "NamedTuple", "BaseModel") for mark in marks):
                own = [n for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
                fields = {n.target.id: self._default(_Found(module, node), n.target.id) for n in own} | fields  # type: ignore[union-attr]
        shown = [name if default == "a field" else f"{name}={default}" for name, default in fields.items()]
        return f"({', '.join(shown)})"

    def _operator(self, module: str, name: str) -> ast.FunctionDef:
        """The function that `module` registers as the op: a call with op_name=NAME and op_func=FUNCTION."""
        for node in ast.walk(self._tree(module)):
            if not isinstance(node, ast.Call):
                continue
            given = {k.arg: k.value for k in node.keywords}
            named = given.get("op_name")
            if isinstance(named, ast.Constant) and named.value == name and "op_func" in given:
                found = self._named(module, given["op_func"]).node
                if isinstance(found, ast.FunctionDef):
                    return found
        raise MissingNameError(f"{module} registers no op {name}")


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module or a class, also under `if`, `try` and `with`."""
    for node in body:
        yield node
        for inner in ("body", "orelse", "finalbody") if isinstance(node, ast.If | ast.Try | ast.With) else ():
            yield from _statements(getattr(node, inner, []))
        for handler in getattr(node, "handlers", []):
            yield from _statements(handler.body)


def _names(node: ast.stmt) -> set[str]:
    """What a statement defines."""
    if isinstance(node, (*_Function, ast.ClassDef)):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _parameters(arguments: ast.arguments, skip: int = 0) -> str:
    """skip: so many of the first, as a constructor's self."""
    bare = ast.parse(f"def f({ast.unparse(arguments)}): 0").body[0].args  # type: ignore[attr-defined]
    for argument in ast.walk(bare):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    for _ in range(skip):
        (bare.posonlyargs or bare.args).pop(0)
    return f"({ast.unparse(bare)})"


def differences(
    recorded: Mapping[str, Signature], found: Mapping[str, Signature | None], overridden: Iterable[str] = ()
) -> dict[str, str]:
    """Name -> how `found` differs from what was recorded so that a caller would notice; {} = the signatures hold.

    A function may have got further parameters with defaults behind those that were recorded.  One that is overridden
    may not: its caller could pass them."""
    exact, wrong = set(overridden), {}
    for name, was in recorded.items():
        now = found.get(name)
        same = now == was if name in exact or isinstance(was, dict) else _extends(was, now)
        if isinstance(was, dict) and isinstance(now, dict):
            same = set(was) == set(now)  # another default is no other field
        if not same:
            wrong[name] = "is not defined" if now is None else f"is {now}, was {was}"
    return wrong


def _extends(was: str, now: Signature | None) -> bool:
    if was == now or not isinstance(now, str) or not was.startswith("(") or not now.startswith("("):
        return was == now
    old, new = (ast.parse(f"def f{text}: 0").body[0].args for text in (was, now))  # type: ignore[attr-defined]
    names, more = ([a.arg for a in x.posonlyargs + x.args] for x in (old, new))
    required = len(more) - len(new.defaults)
    needed = {a.arg for a, d in zip(new.kwonlyargs, new.kw_defaults, strict=True) if d is None}
    keywords = {a.arg for a in new.kwonlyargs}
    return (
        more[: len(names)] == names
        and required <= max(len(names) - len(old.defaults), 0)
        and {a.arg for a in old.kwonlyargs} <= keywords | set(more[len(names) :])
        and needed <= {a.arg for a in old.kwonlyargs}
        and (old.vararg is None or new.vararg is not None)
        and (old.kwarg is None or new.kwarg is not None)
    )
