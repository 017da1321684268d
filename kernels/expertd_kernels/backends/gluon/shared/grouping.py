"""How routes are cut for grouping them by expert.  Pure: imports no torch and no triton."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FEW", "LINE", "WARPS", "Chunks"]

FEW = 4096
"""Routes up to which a program an expert looks at all of them: 2.5 us there for 128 experts, where two launches take
3.5; 4.2 against 4.0 at 8192 (H200)."""
FINE = 16384
"""Routes up to which chunks have half of the size."""
LINE = 32
"""int32 of a cache line: counters that different kernels draw from lie at least so far apart."""
WARPS = 4
"""Of each program that groups: 512 ids by 16 warps take longer than by 4, most of it in scans across warps."""


@dataclass(frozen=True)
class Chunks:
    """How many routes are cut: `number` programs of `size` ids.

    Sizes follow from powers of two, so that a layer that ran at two neighbouring ones compiles nothing between."""

    number: int
    size: int
    experts: int

    @classmethod
    def of(cls, n: int, experts: int) -> Chunks:
        size = 256 if n <= FINE else 512
        return cls(-(-n // size), size, experts)

    @property
    def padded(self) -> int:
        """Columns of the table of counts."""
        return max(32, 1 << (self.experts - 1).bit_length())

    @property
    def rows(self) -> int:
        """Rows of the table that a program adds up at a time: 32 numbers a thread."""
        return max(1, 32 * 32 * WARPS // self.padded)

    @classmethod
    def table(cls, n: int, experts: int) -> tuple[int, int]:
        """Rows and columns of int16 that hold what `count` leaves of up to n routes: of fewer than n there may be more
        chunks, being smaller."""
        all_of_them, finest = cls.of(n, experts), cls.of(min(n, FINE), experts)
        return max(all_of_them.number, finest.number), all_of_them.padded
