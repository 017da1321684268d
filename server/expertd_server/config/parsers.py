"""The text of an option to its value.  Each raises ValueError: what was got, what is wanted."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import TypeVar

from expertd_server.config.values import parse_backend

__all__ = ["argument", "backend", "choice", "copies", "part", "seconds", "size", "size_text", "whole", "yes_no"]


_T = TypeVar("_T")


def argument(parse: Callable[[str], _T]) -> Callable[[str], _T]:
    """As argparse's type: what is wrong is said, which argparse does for no other ValueError."""

    def checked(text: str) -> _T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


def backend(text: str) -> str:
    parse_backend(text)
    return text


def choice(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(f"got {text!r}, want {' or '.join(names)}")
        return text

    return parse


_MOST = (1 << 31) - 1
"""Of any other number: what gRPC and the contract's fields hold."""


def whole(least: int, most: int = _MOST) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"-?\d{1,18}", text) or not least <= int(text) <= most:
            raise ValueError(f"got {text[:80]!r}, want a whole number from {least} to {most}")
        return int(text)

    return parse


def yes_no(text: str) -> bool:
    return choice("yes", "no")(text) == "yes"


def copies(text: str) -> int:
    return int(choice("1", "2")(text))


_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "KB": 10**3, "MB": 10**6,
          "GB": 10**9, "TB": 10**12, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40,
          "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40}  # fmt: skip


_MOST_BYTES = 1 << 62
"""Of a size: sums of two still fit into 64 bits."""


def size(text: str) -> int:
    m = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if m is None or m[2].upper() not in _UNITS:
        raise ValueError(f"got {text!r}, want a size as 20GiB, 20Gi or 20G (the same), 20GB or bytes; 0 = none")
    nbytes = int(float(m[1]) * _UNITS[m[2].upper()])
    if nbytes > _MOST_BYTES:
        raise ValueError(f"got {text!r}, want at most {size_text(_MOST_BYTES)}")
    return nbytes


def size_text(nbytes: int) -> str:
    """As size() reads it, in the largest unit that divides it: "4GiB"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if nbytes and nbytes % _UNITS[unit.upper()] == 0:
            return f"{nbytes // _UNITS[unit.upper()]}{unit}"
    return str(nbytes)


def seconds(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text):
        raise ValueError(f"got {text!r}, want seconds >= 0")
    return float(text)


def part(text: str) -> float:
    if not re.fullmatch(r"0(\.\d+)?|1(\.0+)?", text):
        raise ValueError(f"got {text!r}, want a number from 0 to 1")
    return float(text)
