"""EXPERTD_BENCH_SCALE: a number above 0 and at most 1 that every default length and count of the benchmarks is
multiplied with, so that a test runs each command as it stands.  Read here alone; options that are given stay."""

from __future__ import annotations

import os

__all__ = ["SCALE", "briefly", "fewer", "scale"]

SCALE = "EXPERTD_BENCH_SCALE"


def scale() -> float:
    """The factor; 1 where none is set.  Raises ValueError."""
    text = os.environ.get(SCALE, "1")
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise ValueError(f"{SCALE}: got {text!r}, want a number above 0 and at most 1")
    return value


def briefly(seconds: float, least: float = 0.2) -> float:
    """A default in seconds, times the factor, but not below `least`."""
    return seconds if scale() == 1 else max(least, seconds * scale())


def fewer(count: int, least: int = 1) -> int:
    """The same for a count."""
    return count if scale() == 1 else max(least, round(count * scale()))
