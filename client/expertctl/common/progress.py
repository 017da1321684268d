"""How far a run is, on a terminal, while it goes on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TextIO, TypeVar

__all__ = ["Progress", "told"]

T = TypeVar("T")

_EVERY_S = 0.25


class Progress:
    """A line of standard error that is written over, and cleared at the end; nothing where that is no terminal.

    what    what is done, as "simulated"
    whole   how many calls there are in all
    """

    def __init__(
        self, what: str, whole: int, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._what, self._whole, self._clock = what, whole, clock
        self._out = out or sys.stderr
        self._shows = self._out.isatty()
        self._begun_s = self._next_s = 0.0

    def __enter__(self) -> Progress:
        self._begun_s = self._next_s = self._clock()
        self(0)
        return self

    def __exit__(self, *_: object) -> None:
        if self._shows:
            self._out.write("\r\x1b[K")
            self._out.flush()

    def __call__(self, done: int) -> None:
        """`done` of the calls have ended; shown four times a second at most."""
        if not self._shows or (now_s := self._clock()) < self._next_s:
            return
        self._next_s = now_s + _EVERY_S
        took_s = now_s - self._begun_s
        left = f", about {took_s * (self._whole - done) / done:,.0f} s left" if done and took_s >= 1 else ""
        self._out.write(f"\r{self._what}: {done:,} of {self._whole:,} calls, {took_s:,.0f} s{left}\x1b[K")
        self._out.flush()


def told(found: Iterable[T], first: str, named: Callable[[T], str]) -> Iterator[T]:
    """What `found` has.  Standard error gets the line `first`, and one for each with its name and the seconds since."""
    begun_s = time.monotonic()
    print(first, file=sys.stderr, flush=True)
    for one in found:
        print(f"{named(one)}: done after {time.monotonic() - begun_s:.0f} s", file=sys.stderr, flush=True)
        yield one
