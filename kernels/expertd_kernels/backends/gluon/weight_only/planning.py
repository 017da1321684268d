"""The plans of a layer by its number of tokens: tuned ones, and the rules for all others.  Pure: imports no torch and
no triton."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from expertd_kernels.backends.gluon.weight_only.codec import Codec
from expertd_kernels.backends.gluon.weight_only.plan import LayerPlan, TilePlan
from expertd_kernels.backends.gluon.weight_only.rules import Rules, rules_of
from expertd_kernels.common.sizes import CAPTURED_TOKENS, planned

__all__ = ["Plans", "heuristic", "one_plan"]

TABLE_ROUTES = 1024
"""Routes up to which one program of the routing kernel looks at all of them at once."""

WIDE, WIDER = (TilePlan("wide", rows, tiles=4, columns=64, stages=4) for rows in (128, 192))
"""Kernel "wide" with two and with three warpgroups that multiply."""

Shape = tuple[int, int, int, int]
"""(E, top_k, H, I)."""


class Plans:
    """The plans of one layer: tuned ones for some ranges of tokens, the heuristic elsewhere."""

    def __init__(
        self,
        codecs: tuple[Codec, Codec],
        shape: Shape,
        tuned: Sequence[LayerPlan] = (),
        rules: Rules | None = None,
        invariant: bool = False,
    ) -> None:
        """invariant: a row's bits must not depend on the batch: only kernels that add up its products in one order."""
        self.codecs, self.shape, self.rules = codecs, shape, rules or rules_of()
        if invariant:
            self.rules = replace(self.rules, gemv_tokens=0)
            tuned = [p for p in tuned if p.w13.kernel != "gemv" and p.w2.parts == 1]
            if 16 in (c.bits for c in codecs):
                tuned = [replace(one_plan(codecs), tokens=1 << 30)]
        self.tuned = sorted(tuned, key=lambda p: p.tokens)
        self._found: dict[int, LayerPlan] = {}

    @classmethod
    def for_layer(
        cls, gpu: str, multiprocessors: int, w13: Codec, w2: Codec, shape: Shape, invariant: bool = False
    ) -> Plans:
        """With the committed table of this GPU, if it has the shape and the codecs."""
        path = Path(__file__).parent / "plans" / (re.sub(r"\W+", "_", gpu.lower()) + ".json")
        table = json.loads(path.read_text()) if path.exists() else None
        rows = table["layers"] if table and table["multiprocessors"] == multiprocessors else []
        wanted = [w13.name, w2.name], list(shape)
        tuned = [
            LayerPlan(p["tokens"], p["mode"], TilePlan.parse(p["w13"]), TilePlan.parse(p["w2"]))
            for row in rows
            if (row["codecs"], row["shape"]) == wanted
            for p in row["plans"]
        ]
        return cls((w13, w2), shape, tuned, rules_of(multiprocessors), invariant)

    def at(self, tokens: int) -> LayerPlan:
        """The plan for this many tokens."""
        plan = self._at(planned(tokens))
        # a table's kernel is compiled for the next power of two of the routes, and those are met below CAPTURED_TOKENS
        return self._at(2 * CAPTURED_TOKENS) if plan.mode != "lists" and tokens > CAPTURED_TOKENS else plan

    def _at(self, tokens: int) -> LayerPlan:
        if tokens not in self._found:
            tuned = next((p for p in self.tuned if tokens <= p.tokens), None)
            self._found[tokens] = tuned or heuristic(self.codecs, self.shape, tokens, self.rules)
        return self._found[tokens]


def one_plan(codecs: tuple[Codec, Codec]) -> LayerPlan:
    """With bf16 weights kernel `wide` for every number of tokens: it has tokens on the other side of the product than
    `block`, which nobody has shown to give the same bits."""
    blocks = TilePlan("ws", 64, tiles=4, warps=8, stages=4, narrower=2)
    plans = {4: replace(blocks, columns=256, stages=3), 8: blocks, 16: WIDE}
    w13, w2 = (plans[c.bits] for c in codecs)
    return LayerPlan(0, "lists", w13, w2)


def heuristic(codecs: tuple[Codec, Codec], shape: Shape, tokens: int, rules: Rules | None = None) -> LayerPlan:
    """By routes an expert that is hit (uniform routing) and by how many CTAs there are to fill the GPU.  The
    measurements behind each line: docs/log.  rules: None = those of the GPU that they were measured on."""
    r = rules or rules_of()
    if tokens <= r.gemv_tokens and _alone(codecs, shape, tokens, r):
        return _gemv(codecs, shape, tokens, r)
    E, top_k, H, I = shape
    hit = E * (1.0 - (1.0 - min(1.0, top_k / E)) ** tokens)
    each = tokens * top_k / hit
    rows = (-(-2 * I // 64), -(-H // 64))
    follows = tokens > 1 and _follows(I, hit * rows[1], r)
    if together := _together(codecs, E, each, follows):
        return LayerPlan(tokens, "lists", together, replace(together, follows=E <= 256))
    w13 = _gemm_plan(codecs[0], H, each, hit * rows[0], tokens, follows, r)
    w2 = _gemm_plan(codecs[1], I, each, hit * rows[1], tokens, follows, r, first=False)
    listed = (w13.kernel, w2.kernel) != ("block", "block") or w13.stretch or w2.stretch
    if listed or tokens * top_k > TABLE_ROUTES or tokens > CAPTURED_TOKENS:
        mode = "lists"
    else:
        alone = tokens * top_k <= r.few_routes * w13.tiles and hit >= 0.8 * tokens * top_k
        listing = "table" if w13.rows == w2.rows else "lists"  # a table has blocks of one size
        mode = "ids" if alone or tokens == 1 else listing
    if w13.kernel == w2.kernel == "block" and (w13.rows, w13.stretch) == (w2.rows, w2.stretch):
        w2 = replace(w2, follows=follows and (codecs[1].bits < 16 or w2.rows == 8))
    return LayerPlan(tokens, mode, w13, w2)


def _follows(K: int, row_tiles: float, r: Rules) -> bool:
    """Whether w2's tiles follow w13's, block by block.  Many short tiles gain (1 to 3 %, they fill the end of w13);
    few, or long ones, lose as much: those that start first end first, and the rest does not fill the GPU.
    With bf16 weights only blocks of 8 tokens were timed (0 to 2.5 %)."""
    return row_tiles >= r.many and r.short >= K


def _together(codecs: tuple[Codec, Codec], experts: int, each: float, follows: bool) -> TilePlan | None:
    """Kernel `ws` for both GEMMs where that was ahead (docs/log/h200-band.md), in one launch but with 512 experts: one
    warpgroup a CTA, two CTAs an SM, whose ends lie beside each other's products; and blocks of 128 tokens."""
    c = codecs[0]
    if not follows or c != codecs[1] or c.planes == 0:
        return None
    light = c.bits == 4 and (c.planes == 1 or c.group >= 64)
    if light and 12 < each <= 24:
        return TilePlan("ws", 32, tiles=4, stages=4, narrower=1, registers=128, ctas=2)
    quarters = TilePlan("ws", 64, tiles=4, stages=3, narrower=1, registers=128, ctas=2)
    if c.kind == "int" and c.bits == 4 and c.group >= 64:
        if experts > 256:
            return quarters if 24 < each <= 200 else None
        if 24 < each <= 48 or 80 < each <= 96:
            return quarters
    long = _eight_warps(c, 0, each)
    return long if experts <= 256 and 96 < each <= 300 and long.rows == 128 and long.stretch else None


def _gemm_plan(
    codec: Codec, K: int, each: float, row_tiles: float, tokens: int, follows: bool, r: Rules, first: bool = True
) -> TilePlan:
    """row_tiles: 64-row tiles of all experts that are hit: CTAs, where each takes one and an expert has one block."""
    if tokens == 1:
        return _one_token(codec, K, row_tiles, r)
    if codec.bits == 16:
        return _bf16(each, r)
    if each <= 5:
        return _few(codec, K, each, row_tiles, follows, first, r)
    if each <= 24:
        return _some(codec, K, each, row_tiles, r)
    # CTAs of four warps, three or four an SM: while one starts or ends, the others compute
    four_warps = TilePlan("block", 64, tiles=2, stages=2)
    if each <= 56 and follows and (codec.bits == 4 or codec.group >= 64):
        return replace(four_warps, narrower=3, registers=128 if codec.bits == 4 else 168)
    # an expert's routes scatter by the root of their mean: where half of the experts would need one more, nearly empty
    # block, the last one stretches
    if each <= 80 and follows and codec.bits == 4:
        return replace(four_warps, narrower=1, registers=168, stretch=16)
    return _eight_warps(codec, K, each)


def _some(codec: Codec, K: int, each: float, row_tiles: float, r: Rules) -> TilePlan:
    """6 to 24 routes an expert: blocks of 16 and of 32 tokens, two row tiles a CTA."""
    deep = row_tiles <= 2 * r.thin  # few CTAs need longer rings
    columns = 256 if deep else 128
    if each <= 12:
        mma_columns = 64 if codec.bits == 4 and not deep else 128
        return TilePlan("block", 16, tiles=2, columns=columns, mma_columns=mma_columns)
    if codec.bits == 4 and codec.integer and codec.group >= 64 and row_tiles >= 4 * r.thin and K >= 2048:
        return TilePlan("ws", 32, tiles=4, stages=4, narrower=1, registers=128, ctas=2)
    return TilePlan("block", 32, tiles=2, columns=columns, narrower=1, mma_columns=128 if deep else 64)


def _eight_warps(codec: Codec, K: int, each: float) -> TilePlan:
    """From 24 routes an expert on: two consumer warpgroups, blocks of 64 and of 128 tokens."""
    blocks = TilePlan("ws", 64, tiles=4, warps=8, stages=4, narrower=2)
    long = replace(blocks, rows=128, stages=4 if codec.bits == 4 else 3, narrower=1 if each < 1000 else 0)
    if codec.planes == 1 or codec.group >= 64:
        if 56 < each <= 80:
            return replace(blocks, stretch=16)
        if _stretches(codec, K, each):
            return replace(long, narrower=0, stretch=16)
    if each <= 96:
        if codec.bits > 4:
            return blocks
        if codec.integer and K >= 1024 and codec.group >= 64:
            return replace(blocks, columns=256, stages=3)
        return TilePlan("block", 64, tiles=4, warps=8, narrower=3, delay=2 if K >= 1024 else 1, registers=128)
    return long


def _stretches(codec: Codec, K: int, each: float) -> bool:
    """Whether an expert's last block of 128 tokens takes up to 16 more.  Gained 1 to 9 % with 112 to 136 tokens an
    expert and with 256, up to 5 % with 512 and 768 (4 bits with 512: up to 2 % where columns are long, else nothing);
    nothing with 144, and lost 13 % with 160 and 1 to 4 % from 1024 on."""
    blocks = max(1, round(each / 128))
    beyond = each - 128 * blocks
    if blocks == 1:
        return -20 < beyond <= 12
    return abs(beyond) <= 8 and blocks <= (6 if codec.bits == 8 else 4 if K > 2048 else 2)


def _few(codec: Codec, K: int, each: float, row_tiles: float, follows: bool, first: bool, r: Rules) -> TilePlan:
    """Blocks of 8 tokens.  Where w2's tiles fill the end of w13: two row tiles a CTA, which share inputs, copies and
    barriers; MMAs of 64 columns leave registers for five or seven CTAs an SM.  1.07: what the longer stages of the
    former save; w2's rounds do not matter as much, since they follow w13's."""
    pairs = row_tiles / 2
    five, seven = TilePlan("block", 8, tiles=2, columns=256, stages=2), TilePlan("block", 8, tiles=2)
    sevens = follows and pairs >= 7 * r.multiprocessors
    if codec.bits == 8:
        if codec.kind == "int" and sevens:
            return seven
        return TilePlan("block", 8, stages=4 if codec.kind != "float2" or each < 2 else 3, mma_columns=128)
    whole = -(-K // 256) * 256 <= 1.15 * K  # else stages of 256 columns compute with too many that do not exist
    if sevens and not (whole and (not first or _idle(pairs, 5, r) <= 1.07 * _idle(pairs, 7, r))):
        return seven
    if not follows or not whole or row_tiles < 2 * r.thin:
        return TilePlan("block", 8, columns=256 if K >= 1024 else 128, mma_columns=128)
    if pairs < r.pairs or _idle(pairs, 5, r) > 1.65:  # a second round with few CTAs
        return TilePlan("block", 8, columns=256, stages=3 if K >= 1024 else 2)
    return five


def _idle(ctas: float, an_sm: int, r: Rules) -> float:
    """Rounds of CTAs that begin over those that the CTAs would fill: at least 1."""
    return math.ceil(ctas / (r.multiprocessors * an_sm)) * r.multiprocessors * an_sm / ctas


def _alone(codecs: tuple[Codec, Codec], shape: Shape, tokens: int, r: Rules) -> bool:
    """Whether so few tokens take kernel gemv."""
    _, top_k, H, I = shape
    bits = (2 * codecs[0].bits + codecs[1].bits) * tokens * top_k * H * I
    light = all(c.bits == 4 and c.planes == 1 for c in codecs)  # the others' bytes take it longer than block
    few = bits <= 8 * r.gemv_bytes or (light and tokens * top_k * -(-H // 64) <= r.gemv_tiles)
    return few and max(H, top_k * I) <= r.gemv_columns


def _gemv(codecs: tuple[Codec, Codec], shape: Shape, tokens: int, r: Rules) -> LayerPlan:
    """Two launches of kernel gemv.  w13: from 23 warps an SM on, in CTAs that fill all SMs alike; w2: eight parts, so
    that a token's inputs lie in shared memory once for eight warps."""
    _, top_k, H, I = shape
    blocks13, blocks2 = -(-H // 64), -(-I // 64)
    n13, n2 = tokens * top_k * 4 * -(-2 * I // 64), tokens * 4 * -(-H // 64)
    parts = next((p for p in (1, 2, 4) if n13 * p >= 23 * r.multiprocessors), 8)
    tiles = next((t for t in (4, 2) if t * parts <= 16 and _idle(n13 / t, 1, r) <= 1.11), 1)
    splits = max(1, 8 // (1 << (top_k - 1).bit_length()))
    steps = -(-top_k * splits // 8) * -(-blocks2 // splits)
    ahead13 = _ahead(codecs[0], n13 * parts, -(-blocks13 // parts), r)
    w13 = TilePlan("gemv", 1, tiles=tiles, warps=tiles * parts, columns=64, stages=ahead13)
    w2 = TilePlan("gemv", 1, warps=8, columns=64, stages=_ahead(codecs[1], n2 * 8, steps, r))
    return LayerPlan(tokens, "ids", w13, w2)


def _ahead(codec: Codec, warps: int, steps: int, r: Rules) -> int:
    """Steps of kernel gemv under way: 32 to 128 KiB an SM, as far as all warps find registers at once."""
    each = 16 if warps <= 10 * r.multiprocessors else 8 if warps <= 24 * r.multiprocessors else 4
    return min(max(2, each // codec.units), 1 << (steps - 1).bit_length())


def _bf16(each: float, r: Rules) -> TilePlan:
    """Weights that need no unpacking."""
    if each <= 12:
        return TilePlan("block", 8 if each <= 3.5 else 16, mma_columns=128)
    if each <= 24:
        return TilePlan("block", 32, tiles=2, columns=64, stages=4, narrower=1)
    return WIDER if r.wider_from < each <= r.wider_to else WIDE


def _one_token(codec: Codec, K: int, row_tiles: float, r: Rules) -> TilePlan:
    """Latency: the fewer the CTAs, the more each must have in flight."""
    short = TilePlan("block", 8, mma_columns=128)
    if codec.bits == 16 or (codec.bits == 8 and codec.kind == "float2" and K < 4096):
        return short
    if codec.bits == 8 or row_tiles > r.rings:
        return replace(short, columns=256, stages=4)
    return replace(short, columns=512, stages=4 if row_tiles <= r.multiprocessors or K >= 4096 else 3)
