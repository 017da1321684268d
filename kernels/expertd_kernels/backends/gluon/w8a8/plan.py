"""How a w8a8 GEMM is cut and buffered.  Pure: imports no torch and no triton."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from expertd_kernels.backends.gluon.shared.measured import numbers
from expertd_kernels.backends.plan_words import in_words, shown
from expertd_kernels.common.sizes import planned

__all__ = ["GROUP", "TOKENS", "Few8", "Plan8", "Rules8", "Shape8", "rules8"]

GROUP = 128
"""Columns an activation scale, rows and columns a weight scale, columns a stage."""

TOKENS = 128
"""Tokens of a block, 64 for each of two consumer warpgroups (one of 64 tokens and one warpgroup was slower)."""


@dataclass(frozen=True)
class Rules8:
    """The numbers behind the rules, for a GPU of so many multiprocessors (plans/rules.json, docs/log/h200-w8a8.md).

    ctas        under which a GEMM of one token's routes does not fill the GPU, two an SM
    few_routes  up to which each CTA of the kernel for few tokens looks at all of them (at 1024 the other one is ahead)
    few_each    routes an expert that is hit up to which weights are what costs
    """

    multiprocessors: int
    ctas: float
    few_routes: int
    few_each: int


@cache
def rules8(multiprocessors: int | None = None) -> Rules8:
    """None: those of the GPU that they were measured on."""
    return Rules8(**numbers(Path(__file__).parent / "plans" / "rules.json", multiprocessors))


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
    """Kernel `w8a8_few`, for few routes an expert.

    rows    tokens side by side where an expert has no more; else `many` at a time
    stages  of the ring, 32 KiB each
    parts   of w2's columns, a CTA each
    """

    rows: int = shown(8)
    many: int = shown(16)
    stages: int = shown(3)
    parts: int = 1

    def __str__(self) -> str:
        return in_words(self)


@dataclass(frozen=True)
class Plan8:
    """Kernel `w8a8`, and `w8a8_few` where there is `few`, for w13 and w2.

    stages               of the ring
    together             blocks of an expert side by side (their weights are read once)
    depth                stages of gathered inputs in flight besides the one that is asked for
    listed               w13's inputs are rounded into the order of the list, so that bulk copies fetch them
    consumer_registers   cap of the second consumer warpgroup; producer_registers: of the producers
    """

    stages: int = shown(4)
    together: int = shown(16)
    depth: int = 1
    listed: bool = False
    consumer_registers: int = 232
    producer_registers: int = 40
    few: tuple[Few8, Few8] | None = None

    @classmethod
    def of(cls, tokens: int, shape: Shape8, batch_invariant: bool = False, rules: Rules8 | None = None) -> Plan8:
        """The plan by size; the measurements behind each line: docs/log/h200-w8a8.md.  batch_invariant: one kernel for
        any number of tokens, so that each row is summed by the same steps.  rules: None = those of the GPU that they
        were measured on."""
        few = None if batch_invariant else few_of(tokens, shape, rules or rules8())
        least = 512 if shape.top_k <= 2 else 1024 if shape.H > 4096 else 2048
        return cls(listed=few is None and planned(tokens) >= least, few=few)

    def __post_init__(self) -> None:
        if not 1 <= self.depth < self.stages:
            raise ValueError(f"plan {self}: want depth from 1 to stages - 1")

    def __str__(self) -> str:
        return in_words(self)


def few_of(tokens: int, shape: Shape8, rules: Rules8) -> tuple[Few8, Few8] | None:
    """How kernel `w8a8_few` computes w13 and w2; None where the other one is faster, or w2's columns are no multiple
    of two stages."""
    routes, hit = tokens * shape.top_k, shape.hit(tokens)
    if routes > rules.few_routes or routes / hit > rules.few_each or shape.I % 256:
        return None
    if tokens == 1:
        stages, tiles = shape.I // 256, hit * (shape.H // 128)
        counts = [n for n in range(1, stages // 4 + 1) if stages % n == 0] or [1]
        parts = next((n for n in counts if n * tiles >= rules.ctas), counts[-1])
        return Few8(8, 8, 3), Few8(8, 8, 3, parts)
    few = Few8(8, 16, 2 if shape.H <= 2048 else 3)
    return few, few
