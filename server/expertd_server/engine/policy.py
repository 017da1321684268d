"""How the engine batches, and what it does with numbers that are not finite."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NONFINITE", "Policy"]

NONFINITE = ("pass", "refuse", "zero")
"""What becomes of NaN and infinity: hidden states pass and weights refuse their request, both do, both count as 0.  In
the order of csrc/core.h."""


@dataclass(frozen=True)
class Policy:
    """max_tokens: of a batch (one larger request makes a batch alone).  max_wait_ns: maximum batching delay while the
    engine is idle; 0 = none.  patience: part of the last batch's time for which the engine waits for the clients it has
    just answered; 0 = not at all."""

    max_tokens: int
    max_wait_ns: int = 0
    patience: float = 0.0
