"""Which kernel, with which tiles, for how many tokens.  Pure: imports no torch and no triton."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from expertd_kernels.backends.gluon.codec import Codec

__all__ = ["LayerPlan", "Plans", "TilePlan", "heuristic"]

TABLE_ROUTES = 1024
"""Routes up to which one program of the routing kernel looks at all of them at once."""


@dataclass(frozen=True)
class TilePlan:
    """One GEMM's kernel.  kind "block": one tile a CTA; "ws": persistent, warp-specialised.  The letters: see Tile.

    R: register cap (0: none).  C: CTAs an SM of a persistent kernel.  P: whether w2's weights are fetched before
    w13's GEMM has ended.
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
        if kind not in ("block", "ws") or "BM" not in values:
            raise ValueError(f"tile plan {text!r}: want block or ws, with BM")
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
        if self.mode not in ("ids", "table", "lists") or (self.mode != "lists" and any(p.kind == "ws" for p in both)):
            raise ValueError(f"layer plan {self}: want mode ids, table or lists, and lists for kernel ws")
        if self.mode == "table" and (self.w13.BM != self.w2.BM or self.w13.BM > 64):
            raise ValueError(f"layer plan {self}: with a table both GEMMs share one BM, at most 64")


Shape = tuple[int, int, int, int]
"""(E, top_k, H, I)."""


class Plans:
    """The plans of one layer: tuned ones for some ranges of tokens, the heuristic elsewhere."""

    def __init__(self, codecs: tuple[Codec, Codec], shape: Shape, tuned: Sequence[LayerPlan] = ()) -> None:
        self.codecs, self.shape = codecs, shape
        self.tuned = sorted(tuned, key=lambda p: p.tokens)
        self._found: dict[int, LayerPlan] = {}

    @classmethod
    def for_layer(cls, gpu: str, w13: Codec, w2: Codec, shape: Shape) -> Plans:
        """With the committed table of this GPU, if it has the shape and the codecs."""
        path = Path(__file__).parent / "plans" / (re.sub(r"\W+", "_", gpu.lower()) + ".json")
        rows = json.loads(path.read_text())["layers"] if path.exists() else []
        names = [w13.name, w2.name]
        for row in rows:
            if row["codecs"] == names and tuple(row["shape"]) == shape:
                tuned = [LayerPlan(m, mode, TilePlan.parse(a), TilePlan.parse(b)) for m, mode, a, b in row["plans"]]
                return cls((w13, w2), shape, tuned)
        return cls((w13, w2), shape)

    def at(self, tokens: int) -> LayerPlan:
        """The plan for this many tokens."""
        if tokens not in self._found:
            tuned = next((p for p in self.tuned if tokens <= p.tokens), None)
            self._found[tokens] = tuned or heuristic(self.codecs, self.shape, tokens)
        return self._found[tokens]


def heuristic(codecs: tuple[Codec, Codec], shape: Shape, tokens: int) -> LayerPlan:
    """By routes an expert that is hit (uniform routing): see docs/gpu-notes.md for the measurements behind it."""
    E, top_k, H, I = shape
    hit = E * (1.0 - (1.0 - min(1.0, top_k / E)) ** tokens)
    each = tokens * top_k / hit
    mode = "table" if tokens * top_k <= TABLE_ROUTES else "lists"
    if tokens == 1:
        mode = "ids"

    def one(codec: Codec, K: int, first: bool) -> TilePlan:
        """Stages of 16 to 32 KiB of weights; a stage of one operand where two do not pay."""
        deep = 4 if codec.bits == 4 and K >= 1024 else 2 if codec.bits < 16 else 1
        shallow = 2 if codec.bits < 16 else 1
        if each <= 5:
            return TilePlan("block", 8, 1, 4, deep, 3, SK=min(2, deep))
        if each <= 12:
            return TilePlan("block", 16, 2, 4, shallow, 3, SK=shallow)
        if each <= 24:
            return TilePlan("block", 32, 2, 4, shallow, 3, V=1)
        if each <= 96:
            return TilePlan("block", 64, 4, 8, shallow, 3, V=3, D=2 if first or K >= 1024 else 1, R=128)
        stages = {4: 4, 8: 3, 16: 4}[codec.bits]
        return TilePlan("ws", 128, 4, 8, shallow, stages, V=1 if each < 1000 else 0)

    w13, w2 = one(codecs[0], H, True), one(codecs[1], I, False)
    if mode == "table" and w13.kind == "ws":
        mode = "lists"
    return LayerPlan(tokens, mode, w13, w2)
