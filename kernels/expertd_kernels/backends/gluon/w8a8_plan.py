"""How a w8a8 GEMM is cut and buffered.  Pure: imports no torch and no triton."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TOKENS", "Plan8"]

TOKENS = 128
"""Tokens of a block, 64 for each of two consumer warpgroups (one of 64 tokens and one warpgroup was slower)."""


@dataclass(frozen=True)
class Plan8:
    """ST stages of the ring, GM blocks of an expert side by side (their weights are read once).

    lag                  stages by which the second warpgroup begins after the first, so that one stores results while
                         the other multiplies (grouped scales only)
    depth                stages of gathered inputs in flight besides the one that is asked for
    listed               w13's inputs are copied into the order of the list first, so that bulk copies fetch them
    consumer_registers   cap of the second consumer warpgroup; producer_registers: of the producers
    """

    ST: int = 4
    GM: int = 16
    lag: int = 0
    depth: int = 1
    listed: bool = False
    consumer_registers: int = 232
    producer_registers: int = 40

    @classmethod
    def of(cls, tokens: int, top_k: int) -> Plan8:
        """The plan by size.  Copying inputs first pays where a token goes to few experts (H200, two routes a token:
        Mixtral 4 % at 2048 and 8192 tokens, 2 % at 512; eight routes: 3 % slower on Qwen3, even on DeepSeek)."""
        return cls(listed=top_k <= 2 and tokens >= 512)

    def __post_init__(self) -> None:
        if self.lag < 0 or not 1 <= self.depth < self.ST or self.lag + self.depth > self.ST:
            raise ValueError(f"plan {self}: want lag >= 0, depth 1 to ST - 1, no more than ST stages together")
