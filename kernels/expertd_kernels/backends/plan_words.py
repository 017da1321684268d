"""Plans as words: "block: rows 64, tiles 2, warps 4, follows".  The one way in which kernels' plans are printed and
stored."""

from __future__ import annotations

from dataclasses import MISSING, Field, field, fields, is_dataclass
from typing import Any

__all__ = ["in_words", "shown", "values_of"]


def shown(default: int) -> Any:
    """A field of a plan that stands in its text even where it has its default."""
    return field(default=default, metadata={"shown": True})


def in_words(plan: Any) -> str:
    """The fields of a plan, a dataclass, in their order, without those that have their default and are not `shown`.  A
    name comes first, a number behind its field's name; what is true is named; a plan inside the plan is in brackets."""
    kept = [f for f in fields(plan) if "shown" in f.metadata or getattr(plan, f.name) != f.default]
    names = [f"{getattr(plan, f.name)}: " for f in kept if _type(f) == "str"]
    return "".join(names) + ", ".join(_word(f, getattr(plan, f.name)) for f in kept if _type(f) != "str")


def values_of(kind: type[Any], text: str) -> dict[str, Any]:
    """The fields of a plan of whole numbers and truths, and of a name where it has one, as `in_words` wrote them; those
    that have a default may be left out.  ValueError for words that are unknown, twice there or not there."""
    values: dict[str, Any] = {}
    words = text
    named = next((f for f in fields(kind) if _type(f) == "str"), None)
    if named is not None:
        values[named.name], _, words = text.partition(": ")
    known = {_name(f): f for f in fields(kind) if f is not named}
    for word in filter(None, words.split(", ")):
        front, _, last = word.rpartition(" ")
        name, number = (front, last) if last.isdecimal() else (word, "")
        f = known.get(name)
        if f is None or f.name in values or _type(f) != ("int" if number else "bool"):
            raise ValueError(f"plan {text!r}: {word!r} is unknown or there twice; words: {', '.join(known)}")
        values[f.name] = int(number) if number else True
    missing = [name for name, f in known.items() if f.default is MISSING and f.name not in values]
    if missing:
        raise ValueError(f"plan {text!r}: want {', '.join(missing)}")
    return values


def _name(f: Field[Any]) -> str:
    return f.name.replace("_", " ")


def _type(f: Field[Any]) -> str:
    return f.type if isinstance(f.type, str) else f.type.__name__


def _word(f: Field[Any], value: Any) -> str:
    name = _name(f)
    if isinstance(value, bool):
        return name if value else f"not {name}"
    if isinstance(value, tuple):
        return " ".join([name, *(f"({in_words(v)})" for v in value)])
    return f"{name} ({in_words(value)})" if is_dataclass(value) else f"{name} {value}"
