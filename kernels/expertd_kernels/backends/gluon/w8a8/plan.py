"""How a w8a8 GEMM is cut and buffered.  Pure: imports no torch and no triton."""

from __future__ import annotations

from dataclasses import dataclass

from expertd_kernels.sizes import planned

__all__ = ["GROUP", "TOKENS", "Few8", "Plan8", "Shape8"]

GROUP = 128
"""Columns an activation scale, rows and columns a weight scale, columns a stage."""

TOKENS = 128
"""Tokens of a block, 64 for each of two consumer warpgroups (one of 64 tokens and one warpgroup was slower)."""


FEW_ROUTES = 512
"""Routes up to which each CTA of the kernel for few tokens looks at all of them (at 1024 the other kernel is ahead)."""
FEW_EACH = 12
"""Routes an expert that is hit up to which weights are what costs."""
CTAS = 200
"""CTAs under which a GEMM of one token's routes does not fill an H100 or H200 (132 SMs, two CTAs each)."""


@dataclass(frozen=True)
class Shape8:
    """A layer's sizes: H hidden, I intermediate."""

    experts: int
    top_k: int
    H: int
    I: int

    def hit(self, tokens: int) -> float:
        """Experts that uniform routing sends anything to."""
        return self.experts * (1.0 - (1.0 - min(1.0, self.top_k / self.experts)) ** tokens)


@dataclass(frozen=True)
class Few8:
    """For few routes an expert (kernel `w8a8_few`): N1 tokens side by side where an expert has no more, else N2 at a
    time; rings of ST stages of 32 KiB; w2's columns in Z parts, a CTA each."""

    N1: int = 8
    N2: int = 16
    ST: int = 3
    Z: int = 1


@dataclass(frozen=True)
class Plan8:
    """ST stages of the ring, GM blocks of an expert side by side (their weights are read once).

    depth                stages of gathered inputs in flight besides the one that is asked for
    listed               w13's inputs are rounded into the order of the list, so that bulk copies fetch them
    consumer_registers   cap of the second consumer warpgroup; producer_registers: of the producers
    """

    ST: int = 4
    GM: int = 16
    depth: int = 1
    listed: bool = False
    consumer_registers: int = 232
    producer_registers: int = 40
    few: tuple[Few8, Few8] | None = None

    @classmethod
    def of(cls, tokens: int, shape: Shape8, batch_invariant: bool = False) -> Plan8:
        """The plan by size; the measurements behind each line: docs/log/h200-w8a8.md.  batch_invariant: one kernel for
        any number of tokens, so that each row is summed by the same steps."""
        few = None if batch_invariant else few_of(tokens, shape)
        least = 512 if shape.top_k <= 2 else 1024 if shape.H > 4096 else 2048
        return cls(listed=few is None and planned(tokens) >= least, few=few)

    def __post_init__(self) -> None:
        if not 1 <= self.depth < self.ST:
            raise ValueError(f"plan {self}: want depth from 1 to ST - 1")


def few_of(tokens: int, shape: Shape8) -> tuple[Few8, Few8] | None:
    """How kernel `w8a8_few` computes w13 and w2; None where the other one is faster, or w2's columns are no multiple
    of two stages."""
    routes, hit = tokens * shape.top_k, shape.hit(tokens)
    if routes > FEW_ROUTES or routes / hit > FEW_EACH or shape.I % 256:
        return None
    if tokens == 1:
        stages, tiles = shape.I // 256, hit * (shape.H // 128)
        parts = [z for z in range(1, stages // 4 + 1) if stages % z == 0] or [1]
        Z = next((z for z in parts if z * tiles >= CTAS), parts[-1])
        return Few8(8, 8, 3), Few8(8, 8, 3, Z)
    few = Few8(8, 16, 2 if shape.H <= 2048 else 3)
    return few, few
