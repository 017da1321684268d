"""docs/python-api.md: the public names of expertd_client and expertd_kernels, from their signatures and docstrings."""

from __future__ import annotations

import ast
import enum
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, ForwardRef

import expertd_client
import expertd_kernels

__all__ = ["markdown"]

OURS = ("expertd", "expertd_client", "expertd_kernels")
WIDTH = 120
PACKAGES: Mapping[ModuleType, str] = {
    expertd_client: "For inference engines. Start with `ExpertClient`, `ExpertCluster` and `RemoteExperts`.",
    expertd_kernels: "The kernels without gRPC. Start with `problem_of`, `decide`, `build` ([python.md](python.md)).",
}

ROOT = Path(__file__).resolve().parents[1]
OTHERS: Mapping[tuple[str, str, str], Mapping[str, str]] = {
    ("expertd_client.transformers", "client", "models.md#transformers"): {
        "attach": "servers compute the experts of a model that was loaded whole",
        "detach": "puts the model's own experts back",
        "load_without_experts": "loads a model without its experts, which servers compute",
        "Attachment": "what `attach` returns: `forwarder`, `layers`, `close()`",
    },
    ("expertd_client.engines.kt", "client", "engines.md#ktransformers"): {
        "RemoteKTMoEWrapper": "kt-kernel's `KTMoEWrapper` whose experts servers compute",
    },
    ("expertd_client.weights", "client", "weights.md"): {
        "Updater": "gives new weights to all servers of a model",
        "Update": "one update under way",
        "WeightSync": "the weight-sync client of vLLM's trainers, over an `Updater`",
        "WeightsServer": "the WeightsService of one server",
        "DeltaFolder": "one version of the weights as a delta folder of slime",
        "expert_tensors": "a transformers model's experts, as names and tensors of a checkpoint",
        "publish_delta_folder": "sends a delta folder to all servers, and has them serve it",
    },
    ("expertd.placement", "proto", "../proto/README.md"): {
        "Placement": "which server holds which experts, and its JSON",
        "Server": "one server of a placement",
    },
    ("expertd_kernels.checkpoint", "kernels", "python.md"): {
        "open_checkpoint": "opens a folder with config.json and safetensors files",
        "Checkpoint": "what `open_checkpoint` returns: `layers`, `info()`, `load()`",
        "CheckpointError": "raised where a checkpoint cannot be read",
    },
    ("expertctl.pictures.trace", "client", "models.md#a-step-as-a-picture"): {
        "write": "writes a trace, and its picture beside it",
    },
}
"""(Module, folder of its package, page that starts from it) -> name -> what it is.  Not imported: not all can be."""


class _Plain(str):
    """An annotation or a default that prints without quotes."""

    def __repr__(self) -> str:
        return str(self)


def _annotation(value: Any) -> Any:
    """As it was written."""
    value = value.__forward_arg__ if isinstance(value, ForwardRef) else value
    return _Plain(value) if isinstance(value, str) else value


def _default(value: Any) -> Any:
    """As somebody would write it; the same text in every process."""
    if value is inspect.Parameter.empty:
        return value
    if isinstance(value, enum.Enum):
        return _Plain(f"{type(value).__name__}.{value.name}")
    if isinstance(value, set | frozenset):
        text = "{" + ", ".join(sorted(repr(_default(v)) for v in value)) + "}"
        return _Plain(text if len(text) < 60 else "...")
    return _Plain("...") if " at 0x" in repr(value) else value


def markdown(note: str) -> str:
    parts = [
        f"""# Python API

{note}

Public are the names of `expertd_client` and `expertd_kernels` below, those of [other modules](#other-modules), and the
error classes ([errors.md](errors.md)).
Import by name: `import *` leaves out what needs torch or Ray.
Other modules may change at any time; [versions.md](versions.md) has the policy. Letters: M tokens, H hidden size,
I intermediate size, E experts, k routes per token.
"""
    ]
    for module, text in PACKAGES.items():
        parts.append(f"## `{module.__name__}`\n\n{text}\n")
        names = getattr(module, "_MODULES", module.__all__)  # with those that need another package
        parts += [_name(name, getattr(module, name)) for name in sorted(names, key=str.lower)]
    parts.append(_others())
    return "\n".join(parts)


def _others() -> str:
    """Raises LookupError for a name that its module does not offer."""
    lines = [
        "## Other modules",
        "",
        "Of these only the names here are public. `help(NAME)` prints arguments and errors.",
    ]
    lines += ["", "| module | name | what it is |", "|---|---|---|"]
    for (module, folder, page), names in OTHERS.items():
        absent = set(names) - _offered(module, ROOT / folder)
        if absent:
            raise LookupError(f"{module}: its __all__ lacks {', '.join(sorted(absent))}")
        lines += [f"| [`{module}`]({page}) | `{name}` | {text} |" for name, text in names.items()]
    return "\n".join([*lines, ""])


def _offered(module: str, folder: Path) -> set[str]:
    """What __all__ of a module's source lists."""
    path = folder / module.replace(".", "/")
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def _name(name: str, value: Any) -> str:
    """The section of one public name."""
    if inspect.isclass(value):
        lines = list(_class(name, value))
    elif callable(value):
        lines = [*_signature(name, value), *_doc(value)]
    else:
        keys = ", ".join(map(str, value)) if isinstance(value, Mapping) else repr(value)
        lines = textwrap.wrap(f"{name}: {type(value).__name__} with the keys {keys}", WIDTH, subsequent_indent="    ")
    body = "\n".join(line.rstrip() for line in lines)
    return f"### `{name}`\n```text\n{body}\n```\n"


def _class(name: str, cls: type) -> Iterator[str]:
    bases = [b.__name__ for b in cls.__bases__ if b.__module__.split(".")[0] in OURS]
    if issubclass(cls, enum.Enum):
        yield f"enum {name}: " + ", ".join(str(m.name) for m in cls)
    elif getattr(cls, "_is_protocol", False):
        yield f"protocol {name}"
    else:
        yield from _signature(f"class {name}", cls)
    yield from _doc(cls)
    if bases:
        yield from ("", f"    Base: {', '.join(bases)}.")
    for method, value in _members(cls):
        yield ""
        if isinstance(value, property):
            yield f"    property {method}"
            yield from _doc(value, "    ")
            continue
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        kind = "async " if inspect.iscoroutinefunction(function) else ""
        first = "classmethod " if isinstance(value, classmethod) else ""
        yield from ("    " + line for line in _signature(f"{first}{kind}{method}", function, WIDTH - 4))
        yield from _doc(function, "    ")


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties of the class and of our bases, in the order of their definition."""
    seen: set[str] = set()
    for base in [cls, *(b for b in cls.__mro__[1:] if b.__module__.split(".")[0] in OURS)]:
        for name, value in vars(base).items():
            public = not name.startswith("_") or (name == "__call__" and base.__module__.split(".")[0] in OURS)
            if name in seen or not public or isinstance(base, enum.EnumMeta):
                continue
            if isinstance(value, property | classmethod | staticmethod) or inspect.isfunction(value):
                seen.add(name)
                yield name, value


def _signature(name: str, value: Any, width: int = WIDTH) -> list[str]:
    """`name(arguments) -> result`, a line for each argument where it is too long for one."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return [name]
    arguments = [
        p.replace(annotation=_annotation(p.annotation), default=_default(p.default))
        for p in signature.parameters.values()
        if p.name not in ("self", "cls")
    ]
    result = inspect.Signature.empty if inspect.isclass(value) else _annotation(signature.return_annotation)
    whole = str(inspect.Signature(arguments, return_annotation=result, __validate_parameters__=False))
    if len(name) + len(whole) <= width:
        return [name + whole]
    words = [str(inspect.Signature([a], __validate_parameters__=False))[1:-1] for a in arguments]
    keyword = next((i for i, a in enumerate(arguments) if a.kind is a.KEYWORD_ONLY), None)
    words = [w.removeprefix("*, ") for w in words]
    if keyword is not None:
        words.insert(keyword, "*")
    end = "" if result is inspect.Signature.empty else f" -> {inspect.formatannotation(result)}"
    return [f"{name}(", *(f"    {w}," for w in words), f"){end}"]


def _doc(value: Any, indent: str = "") -> list[str]:
    text = inspect.getdoc(value) if not inspect.isclass(value) else inspect.cleandoc(value.__doc__ or "")
    return [f"{indent}    {line}" for line in (text or "").splitlines()]
