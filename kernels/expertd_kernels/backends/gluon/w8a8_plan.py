"""Which tiles for how many tokens.  Pure: imports no torch and no triton."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Plan8", "plan8"]


@dataclass(frozen=True)
class Plan8:
    """BM tokens a block (64 a consumer warpgroup), ST stages, GM blocks of an expert side by side.

    lag                  stages by which the second warpgroup begins after the first, so that one stores results while
                         the other multiplies (grouped scales only)
    consumer_registers   cap of the second consumer warpgroup; producer_registers: of the producers
    """

    BM: int
    ST: int
    GM: int = 16
    lag: int = 0
    consumer_registers: int = 232
    producer_registers: int = 40

    def __post_init__(self) -> None:
        if self.BM not in (64, 128):
            raise ValueError(f"plan {self}: want BM 64 or 128")
        if not 0 <= self.lag < self.ST:
            raise ValueError(f"plan {self}: a lag of {self.lag} stages does not fit a ring of {self.ST}")


def plan8(each: float) -> Plan8:
    """By routes an expert that is hit.  The measurements behind it: docs/gpu-notes.md."""
    return Plan8(64, 5) if each <= 80 else Plan8(128, 4)
