"""Timed points in a file: one CSV line each, with the machine and its ceilings on every line.

So a file says by itself where its figures come from, two files may be put one behind the other, and tables, comparisons
and readers of other projects need no parser of ours.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["read_points", "write_points"]

_WHOLE = frozenset({"M", "threads", "processes"})
_NUMBERS = ("us", "_s", "fraction", "error", "tolerance")
"""How the names of columns end that hold numbers: units are in names."""


def write_points(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """lines: of one form; a None (no time, no finite error) becomes an empty field.  No points, no file."""
    if not lines:
        return
    with path.open("w", newline="") as f:
        writer = csv.DictWriter(f, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def read_points(path: Path) -> list[dict[str, Any]]:
    """The lines as they were written: M and threads are integers, measured columns floats or None, all else is text.
    OSError or ValueError for what is no such file."""
    with path.open(newline="") as f:
        lines = list(csv.DictReader(f))
    if not lines or not {"shape", "scheme", "backend", "M", "us"} <= lines[0].keys():
        raise ValueError(f"{path}: want points of the bench (--csv FILE), with shape, scheme, backend, M and us")
    return [{name: _value(name, text) for name, text in line.items()} for line in lines]


def _value(name: str, text: str) -> Any:
    if name in _WHOLE:
        return int(text)
    if name.endswith(_NUMBERS):
        return float(text) if text else None
    return text
