"""Which kernel, with which tiles: a plan of one GEMM, and of a layer.  Pure: imports no torch and no triton."""

from __future__ import annotations

from dataclasses import dataclass, replace

from expertd_kernels.backends.plan_words import in_words, shown, values_of

__all__ = ["KERNELS", "LayerPlan", "TilePlan"]

KERNELS = ("block", "gemv", "ws", "wide")


@dataclass(frozen=True)
class TilePlan:
    """One GEMM's kernel, and how it cuts the GEMM.

    kernel       "block": one tile a CTA; "ws": persistent, warp-specialised; "wide": the same for bf16 weights;
                 "gemv": each route by itself
    rows         tokens of a block, an expert's routes
    tiles        tiles of 64 weight rows of a CTA (gemv: slices of 16)
    warps        that multiply (gemv: warps / tiles share out the columns)
    columns      weight columns of a stage, a multiple of 64
    stages       of the ring (gemv: steps under way)
    narrower     narrower widths that an expert's last block may take: 1: half of the rows; 2: a quarter, too; 3 (kernel
                 block): three quarters, too
    delay        stages between use and refill of a slot
    mma_columns  weight columns that an MMA takes at once, a multiple of 64
    registers    cap of a thread's; 0: none
    ctas         CTAs an SM of a persistent kernel
    late         whether w2's weights are asked for only when w13's GEMM has ended
    stretch      tokens by which an expert's last block may be longer (kernels ws and block, mode lists)
    parts        of w2's columns, a CTA each, for so few tokens that tiles alone do not fill the GPU (kernel block)
    follows      whether w2's tiles follow those of w13 of their own block, instead of waiting for all (kernel block;
                 kernel ws: in one launch with them)
    even         whether an SM takes its share of the CTAs and no more (kernel gemv)
    """

    kernel: str
    rows: int
    tiles: int = shown(1)
    warps: int = shown(4)
    columns: int = shown(128)
    stages: int = shown(3)
    narrower: int = 0
    delay: int = 1
    mma_columns: int = 64
    registers: int = 0
    ctas: int = 1
    late: bool = False
    stretch: int = 0
    parts: int = 1
    follows: bool = False
    even: bool = False

    def __post_init__(self) -> None:
        if self.kernel not in KERNELS:
            raise ValueError(f"tile plan {self}: want kernel {', '.join(KERNELS)}")
        if self.columns % 64 or self.mma_columns % 64:
            raise ValueError(f"tile plan {self}: want columns and mma columns in multiples of 64")

    def __str__(self) -> str:
        return in_words(self)

    @classmethod
    def parse(cls, text: str) -> TilePlan:
        """ "block: rows 8, columns 256, mma columns 128" -> the plan.  ValueError for an unknown word."""
        return cls(**values_of(cls, text))


@dataclass(frozen=True)
class LayerPlan:
    """A layer at up to `tokens` tokens.  mode "ids": no routing kernel (one token, or up to 128 routes); "table":
    blocks of routes listed by one kernel (up to 1024 routes); "lists": routes grouped by expert."""

    tokens: int
    mode: str
    w13: TilePlan
    w2: TilePlan

    def __str__(self) -> str:
        return in_words(self)

    def __post_init__(self) -> None:
        both = (self.w13, self.w2)
        if "gemv" in (self.w13.kernel, self.w2.kernel):
            if self.mode != "ids" or self.w13.kernel != self.w2.kernel:
                raise ValueError(f"layer plan {self}: kernel gemv takes both GEMMs, and mode ids")
            return
        blocks = all(p.kernel == "block" and not p.stretch for p in both)
        if self.mode not in ("ids", "table", "lists") or not (blocks or self.mode == "lists"):
            raise ValueError(
                f"layer plan {self}: want mode ids, table or lists: lists for kernels ws and wide, and stretch"
            )
        if self.mode == "table" and (self.w13.rows != self.w2.rows or self.w13.rows > 64):
            raise ValueError(f"layer plan {self}: with a table both GEMMs have blocks of the same rows, at most 64")
        alike = {p.kernel for p in both} == {"block"} and len({(p.rows, p.stretch) for p in both}) == 1
        alike |= self.w13.kernel == "ws" and replace(self.w2, follows=False) == self.w13
        if self.w13.follows or (self.w2.follows and not alike):
            raise ValueError(
                f"layer plan {self}: follows goes with w2 where both GEMMs take kernel block with the same rows and "
                "stretch, or kernel ws with the same plan"
            )
