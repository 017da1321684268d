"""Sets of numbers as people write them, "0-3,7": both ends included.  Layers and experts, on command lines, in files
and in reports: what one command prints, another one takes."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = [
    "LIMIT",
    "MOST_RANGES",
    "format_ranges",
    "format_runs",
    "merged",
    "parse_ranges",
    "parse_runs",
    "runs",
]

LIMIT = 1 << 20
"""Above every layer index and expert id: keeps "0-99999999999" from filling the memory."""


MOST_RANGES = 4096
"""Of one text."""
_MOST_TEXT = 1 << 16
_SHOWN = 80


def parse_ranges(text: str, most: int = LIMIT) -> tuple[int, ...]:
    """ "0-3,7" -> (0, 1, 2, 3, 7): ascending, each once, in whatever order they are written.  Raises ValueError that
    says what was got and what is wanted, also for more than `most` numbers, before it makes them."""
    pairs = parse_runs(text)
    count = sum(last - first + 1 for first, last in pairs)
    if count > most:
        raise ValueError(f"got {_shown(text)}, {count} numbers, want at most {most}")
    return tuple(n for first, last in pairs for n in range(first, last + 1))


def parse_runs(text: str) -> list[tuple[int, int]]:
    """ "0-1,2,7" -> [(0, 2), (7, 7)], as runs().  Takes no longer where a range is large or is written many times.
    Raises ValueError."""
    if len(text) > _MOST_TEXT or text.count(",") >= MOST_RANGES:
        raise ValueError(f"got {_shown(text)}, want at most {MOST_RANGES} ranges in {_MOST_TEXT} characters")
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,12})\s*(?:-\s*([0-9]{1,12})\s*)?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"got {_shown(text)}, want numbers and ranges as 0-3,7")
        if int(match[2] or match[1]) >= LIMIT:
            raise ValueError(f"got {_shown(text)}, want numbers below 2^20")
        found.append((int(match[1]), int(match[2] or match[1])))
    return merged(found)


def merged(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(first, last) pairs in any order, overlapping or not, as the fewest, ascending."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(pairs):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return found


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


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
