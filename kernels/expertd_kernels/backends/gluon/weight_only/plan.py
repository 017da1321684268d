"""Which kernel, with which tiles: a plan of one GEMM, and of a layer.  Pure: imports no torch and no triton."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

__all__ = ["LayerPlan", "TilePlan"]


@dataclass(frozen=True)
class TilePlan:
    """One GEMM's kernel.  kind "block": one tile a CTA; "ws": persistent, warp-specialised; "wide": the same for bf16
    weights; "gemv": each route by itself.  The letters: see Tile; for "gemv" T counts slices of 16 rows, W / T
    warps share out K, and V1 keeps an SM to its share of the CTAs.

    R: register cap (0: none).  C: CTAs an SM of a persistent kernel.  P: whether w2's weights are fetched before
    w13's GEMM has ended.  X: tokens by which an expert's last block may stretch (kernels "ws" and "block", mode lists).
    Z: parts of w2's columns, a CTA each, for so few tokens that tiles alone do not fill the GPU (kernel "block").
    F: whether w2's tiles follow those of w13 of their own block, instead of waiting for all (kernel "block").
    """

    kind: str
    BM: int
    T: int = 1
    W: int = 4
    S: int = 2
    ST: int = 3
    V: int = 0
    D: int = 1
    SK: int = 1
    R: int = 0
    C: int = 1
    P: int = 1
    X: int = 0
    Z: int = 1
    F: int = 0

    @property
    def early(self) -> bool:
        return bool(self.P)

    def __str__(self) -> str:
        default = TilePlan(self.kind, 0)
        words = [
            f"{f.name}{getattr(self, f.name)}"
            for f in fields(self)[1:]
            if f.name in ("BM", "T", "W", "S", "ST") or getattr(self, f.name) != getattr(default, f.name)
        ]
        return " ".join([self.kind, *words])

    @classmethod
    def parse(cls, text: str) -> TilePlan:
        """ "block BM8 T1 W4 S4 ST3 SK2" -> the plan.  ValueError for an unknown word."""
        kind, *words = text.split()
        values = {}
        for w in words:
            m = re.fullmatch(r"([A-Z]+)(\d+)", w)
            if m is None or m[1] not in {f.name for f in fields(cls)}:
                raise ValueError(f"tile plan {text!r}: unknown word {w!r}")
            values[m[1]] = int(m[2])
        if kind not in ("block", "gemv", "ws", "wide") or "BM" not in values:
            raise ValueError(f"tile plan {text!r}: want block, gemv, ws or wide, with BM")
        return cls(kind, **values)


@dataclass(frozen=True)
class LayerPlan:
    """A layer at up to `tokens` tokens.  mode "ids": no routing kernel (one token, or up to 128 routes); "table":
    blocks of routes listed by one kernel (up to 1024 routes); "lists": routes grouped by expert."""

    tokens: int
    mode: str
    w13: TilePlan
    w2: TilePlan

    def __post_init__(self) -> None:
        both = (self.w13, self.w2)
        if "gemv" in (self.w13.kind, self.w2.kind):
            if self.mode != "ids" or self.w13.kind != self.w2.kind:
                raise ValueError(f"layer plan {self}: kernel gemv takes both GEMMs, and mode ids")
            return
        blocks = all(p.kind == "block" and not p.X for p in both)
        if self.mode not in ("ids", "table", "lists") or not (blocks or self.mode == "lists"):
            raise ValueError(f"layer plan {self}: want mode ids, table or lists: lists for kernels ws and wide, and X")
        if self.mode == "table" and (self.w13.BM != self.w2.BM or self.w13.BM > 64):
            raise ValueError(f"layer plan {self}: with a table both GEMMs share one BM, at most 64")
        if self.w13.F or (self.w2.F and ({p.kind for p in both} != {"block"} or len({(p.BM, p.X) for p in both}) > 1)):
            raise ValueError(f"layer plan {self}: F goes with w2 where both GEMMs take kernel block with one BM and X")
