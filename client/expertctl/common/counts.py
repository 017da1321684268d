"""Numbers on a command line, as argparse's types: what cannot be is refused before anything begins."""

from __future__ import annotations

import argparse
import re

__all__ = ["at_least", "at_least_0", "counted", "duration_s", "positive", "share"]

_SECONDS = {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def positive(text: str) -> float:
    """A number > 0, as argparse's type."""
    value = at_least_0(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"got {text!r}, want a number > 0")
    return value


def at_least_0(text: str) -> float:
    """A number >= 0, as argparse's type."""
    if not re.fullmatch(r"\d+(\.\d*)?(e[+-]?\d+)?|\.\d+", text):
        raise argparse.ArgumentTypeError(f"got {text!r}, want a number >= 0")
    return float(text)


def duration_s(text: str) -> float:
    """A time > 0 in seconds, "10", "10s", "500ms", "2m" or "1h", as argparse's type."""
    m = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)", text)
    if m is None or m[2] not in _SECONDS or float(m[1]) == 0:
        raise argparse.ArgumentTypeError(f"got {text!r}, want a time > 0, for example 10s, 500ms or 2m")
    return float(m[1]) * _SECONDS[m[2]]


def counted(n: int, noun: str) -> str:
    """ "1 call", "2 calls"."""
    return f"{n:,} {noun}{'s' if n != 1 else ''}"


def share(text: str) -> float:
    """From 0 to 1, as argparse's type."""
    value = at_least_0(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, want a share from 0 to 1")
    return value


class at_least:  # noqa: N801 - reads as the function that it is
    """A whole number >= least, as argparse's type."""

    def __init__(self, least: int) -> None:
        self._least = least

    def __call__(self, text: str) -> int:
        if not re.fullmatch(r"\d+", text) or int(text) < self._least:
            raise argparse.ArgumentTypeError(f"got {text!r}, want a whole number >= {self._least}")
        return int(text)
