"""Sets of numbers as people write them, "0-3,7": both ends included.  Layers and experts, on command lines, in files
and in reports: what one command prints, another one takes."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["LIMIT", "format_ranges", "format_runs", "parse_ranges", "runs"]

LIMIT = 1 << 20
"""Above every layer index and expert id: keeps "0-99999999999" from filling the memory."""


def parse_ranges(text: str) -> tuple[int, ...]:
    """ "0-3,7" -> (0, 1, 2, 3, 7): ascending, each once, in whatever order they are written.  Raises ValueError that
    says what was got and what is wanted."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,12})\s*(?:-\s*([0-9]{1,12})\s*)?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"got {text!r}, want numbers and ranges as 0-3,7")
        if int(match[2] or match[1]) >= LIMIT:
            raise ValueError(f"got {text!r}, want numbers below 2^20")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(found))


def format_ranges(numbers: Iterable[int]) -> str:
    """The inverse, with the fewest ranges: (0, 1, 2, 3, 7) -> "0-3,7".  No number -> ""."""
    return format_runs(runs(numbers))


def format_runs(pairs: Iterable[tuple[int, int]]) -> str:
    """[(0, 3), (7, 7)] -> "0-3,7", without looking at what lies between."""
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in pairs)


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """(first, last) of each run of consecutive numbers, ascending: (7, 0, 1, 2) -> [(0, 2), (7, 7)]."""
    found: list[tuple[int, int]] = []
    for n in sorted(set(numbers)):
        if found and n == found[-1][1] + 1:
            found[-1] = (found[-1][0], n)
        else:
            found.append((n, n))
    return found
