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
from expertd_kernels.sizes import CAPTURED_TOKENS, planned

__all__ = ["Plans", "heuristic", "one_plan"]

TABLE_ROUTES = 1024
"""Routes up to which one program of the routing kernel looks at all of them at once."""
FEW_ROUTES = 32
"""Routes for each row tile of w13's CTAs, up to which each CTA of the GEMMs finds its block itself, if few share an
expert; beyond, the routing kernel is cheaper."""
THIN = 512
"""CTAs under which a GEMM does not fill an H100 or H200 (132 SMs with four CTAs each)."""
SMS = 132
GEMV_TOKENS = 4
"""Tokens up to which each route may be computed by itself: with more, routes share experts."""
GEMV_COLUMNS = 32768
"""Inputs of a CTA of kernel gemv, which lie in shared memory."""
GEMV_BYTES = 100_000_000
"""Bytes of the routes' weights up to which kernel gemv gains: it did with 76 and 100 MB, block with 165 and 199."""
GEMV_TILES = 330
"""64-row tiles of w2 up to which it gains with more bytes, too, because block's CTAs do not fill the GPU: gained with
320 and fewer, lost with 512."""
PAIRS = 600
"""CTAs of two row tiles from which on they beat twice as many of one: gained with 619 and more."""

WIDE, WIDER = "wide BM128 T4 S1 ST4", "wide BM192 T4 S1 ST4"
"""Kernel "wide" with two and with three warpgroups that multiply."""
WIDER_FROM, WIDER_TO = 96, 1500
"""Tokens an expert between which the second is ahead: at 128 half of the experts would need another block of 128 tokens
(2 to 20 %); at 2048 it was 3 % behind."""

MANY = 900
"""64-row tiles of w2 from which on they follow w13's: gained with 910 and more, lost with 512 and fewer."""
SHORT = 4096
"""Columns of w2 up to which its tiles follow: gained with 768 and 2048, lost with 14,336."""

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
        plan = self._at(planned(tokens))
        # a table's kernel is compiled for the next power of two of the routes, and those are met below CAPTURED_TOKENS
        return self._at(2 * CAPTURED_TOKENS) if plan.mode != "lists" and tokens > CAPTURED_TOKENS else plan

    def _at(self, tokens: int) -> LayerPlan:
        if tokens not in self._found:
            tuned = next((p for p in self.tuned if tokens <= p.tokens), None)
            self._found[tokens] = tuned or heuristic(self.codecs, self.shape, tokens)
        return self._found[tokens]


def one_plan(codecs: tuple[Codec, Codec], shape: Shape) -> Plans:
    """The same plan for every number of tokens: each row of a GEMM is computed by the same steps in any batch, and w2's
    results are rounded alike.  Blocks of 64 tokens (bf16: 128), between decoding and prefill."""
    plans = {4: "ws BM64 T4 W8 S4 ST3 V2", 8: "ws BM64 T4 W8 S2 ST4 V2", 16: WIDE}
    w13, w2 = (TilePlan.parse(plans[c.bits]) for c in codecs)
    return Plans(codecs, shape, [LayerPlan(1 << 30, "lists", w13, w2)])


def heuristic(codecs: tuple[Codec, Codec], shape: Shape, tokens: int) -> LayerPlan:
    """By routes an expert that is hit (uniform routing) and by how many CTAs there are to fill the GPU.  The
    measurements behind each line: docs/log."""
    if tokens <= GEMV_TOKENS and _alone(codecs, shape, tokens):
        return _gemv(codecs, shape, tokens)
    E, top_k, H, I = shape
    hit = E * (1.0 - (1.0 - min(1.0, top_k / E)) ** tokens)
    each = tokens * top_k / hit
    rows = (-(-2 * I // 64), -(-H // 64))
    follows = tokens > 1 and _follows(I, hit * rows[1])
    w13 = _gemm_plan(codecs[0], H, each, hit * rows[0], tokens, follows)
    w2 = _gemm_plan(codecs[1], I, each, hit * rows[1], tokens, follows, first=False)
    listed = (w13.kind, w2.kind) != ("block", "block") or w13.X or w2.X
    if listed or tokens * top_k > TABLE_ROUTES or tokens > CAPTURED_TOKENS:
        mode = "lists"
    else:
        alone = tokens * top_k <= FEW_ROUTES * w13.T and hit >= 0.8 * tokens * top_k
        listing = "table" if w13.BM == w2.BM else "lists"  # a table has blocks of one size
        mode = "ids" if alone or tokens == 1 else listing
    if w13.kind == w2.kind == "block" and (w13.BM, w13.X) == (w2.BM, w2.X):
        w2 = replace(w2, F=int(follows and (codecs[1].bits < 16 or w2.BM == 8)))
    return LayerPlan(tokens, mode, w13, w2)


def _follows(K: int, row_tiles: float) -> bool:
    """Whether w2's tiles follow w13's, block by block.  Many short tiles gain (1 to 3 %, they fill the end of w13);
    few, or long ones, lose as much: those that start first end first, and the rest does not fill the GPU.
    With bf16 weights only blocks of 8 tokens were timed (0 to 2.5 %)."""
    return row_tiles >= MANY and K <= SHORT


def _gemm_plan(
    codec: Codec, K: int, each: float, row_tiles: float, tokens: int, follows: bool, first: bool = True
) -> TilePlan:
    """row_tiles: 64-row tiles of all experts that are hit: the CTAs of a kernel with T = 1 and one block an expert."""
    if tokens == 1:
        return _one_token(codec, K, row_tiles)
    if codec.bits == 16:
        return _bf16(each)
    if each <= 5:
        return _few(codec, K, each, row_tiles, follows, first)
    deep = row_tiles <= 2 * THIN  # two row tiles a CTA: few CTAs need longer rings
    S = 4 if deep else 2
    if each <= 12:
        return TilePlan("block", 16, T=2, S=S, SK=1 if codec.bits == 4 and not deep else 2)
    if each <= 24:
        if codec.bits == 4 and codec.integer and codec.group >= 64 and row_tiles >= 4 * THIN and K >= 2048:
            return TilePlan("ws", 32, T=4, S=2, ST=4, V=1, R=128, C=2)
        return TilePlan("block", 32, T=2, S=S, SK=2 if deep else 1, V=1)
    # CTAs of four warps, three or four an SM: while one starts or ends, the others compute
    if each <= 56 and follows and (codec.bits == 4 or codec.group >= 64):
        return TilePlan("block", 64, T=2, S=2, ST=2, V=3, R=128 if codec.bits == 4 else 168)
    # an expert's routes scatter by the root of their mean: where half of the experts would need one more, nearly empty
    # block, the last one stretches
    if each <= 80 and follows and codec.bits == 4:
        return TilePlan("block", 64, T=2, S=2, ST=2, V=1, R=168, X=16)
    long = TilePlan("ws", 128, T=4, W=8, S=2, ST=4 if codec.bits == 4 else 3, V=1 if each < 1000 else 0)
    if codec.planes == 1 or codec.group >= 64:
        if 56 < each <= 80:
            return TilePlan("ws", 64, T=4, W=8, S=2, ST=4, V=2, X=16)
        if _stretches(codec, K, each):
            return replace(long, V=0, X=16)
    if each <= 96:
        if codec.bits > 4:
            return TilePlan("ws", 64, T=4, W=8, S=2, ST=4, V=2)
        if codec.integer and K >= 1024 and codec.group >= 64:
            return TilePlan("ws", 64, T=4, W=8, S=4, ST=3, V=2)
        return TilePlan("block", 64, T=4, W=8, S=2, ST=3, V=3, D=2 if K >= 1024 else 1, R=128)
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


def _few(codec: Codec, K: int, each: float, row_tiles: float, follows: bool, first: bool) -> TilePlan:
    """Blocks of 8 tokens.  Where w2's tiles fill the end of w13: two row tiles a CTA, which share inputs, copies and
    barriers; MMAs of 64 columns (SK = 1) leave registers for five or seven CTAs an SM.  1.07: what the longer stages of
    the former save; w2's rounds do not matter as much, since they follow w13's."""
    pairs = row_tiles / 2
    five, seven = TilePlan("block", 8, T=2, S=4, ST=2), TilePlan("block", 8, T=2, S=2, ST=3)
    if codec.bits == 8:
        if codec.kind == "int" and follows and pairs >= 7 * SMS:
            return seven
        return TilePlan("block", 8, S=2, ST=4 if codec.kind != "float2" or each < 2 else 3, SK=2)
    whole = -(-K // 256) * 256 <= 1.15 * K  # else stages of 256 columns compute with too many that do not exist
    if follows and pairs >= 7 * SMS and not (whole and (not first or _idle(pairs, 5) <= 1.07 * _idle(pairs, 7))):
        return seven
    if not follows or not whole or row_tiles < 2 * THIN:
        return TilePlan("block", 8, S=4 if K >= 1024 else 2, ST=3, SK=2)
    if pairs < PAIRS or _idle(pairs, 5) > 1.65:  # a second round with few CTAs
        return TilePlan("block", 8, S=4, ST=3 if K >= 1024 else 2)
    return five


def _idle(ctas: float, an_sm: int) -> float:
    """Rounds of CTAs that begin over those that the CTAs would fill: at least 1."""
    return math.ceil(ctas / (SMS * an_sm)) * SMS * an_sm / ctas


def _alone(codecs: tuple[Codec, Codec], shape: Shape, tokens: int) -> bool:
    """Whether so few tokens take kernel gemv."""
    _, top_k, H, I = shape
    bits = (2 * codecs[0].bits + codecs[1].bits) * tokens * top_k * H * I
    light = all(c.bits == 4 and c.planes == 1 for c in codecs)  # the others' bytes take it longer than block
    few = bits <= 8 * GEMV_BYTES or (light and tokens * top_k * -(-H // 64) <= GEMV_TILES)
    return few and max(H, top_k * I) <= GEMV_COLUMNS


def _gemv(codecs: tuple[Codec, Codec], shape: Shape, tokens: int) -> LayerPlan:
    """Two launches of kernel gemv.  w13: from 23 warps an SM on, in CTAs that fill all SMs alike; w2: eight parts, so
    that a token's inputs lie in shared memory once for eight warps."""
    _, top_k, H, I = shape
    blocks13, blocks2 = -(-H // 64), -(-I // 64)
    n13, n2 = tokens * top_k * 4 * -(-2 * I // 64), tokens * 4 * -(-H // 64)
    P = next((p for p in (1, 2, 4) if n13 * p >= 23 * SMS), 8)
    T = next((t for t in (4, 2) if t * P <= 16 and _idle(n13 / t, 1) <= 1.11), 1)
    splits = max(1, 8 // (1 << (top_k - 1).bit_length()))
    steps = -(-top_k * splits // 8) * -(-blocks2 // splits)
    w13 = TilePlan("gemv", 1, T=T, W=T * P, S=1, ST=_ahead(codecs[0], n13 * P, -(-blocks13 // P)))
    w2 = TilePlan("gemv", 1, T=1, W=8, S=1, ST=_ahead(codecs[1], n2 * 8, steps))
    return LayerPlan(tokens, "ids", w13, w2)


def _ahead(codec: Codec, warps: int, steps: int) -> int:
    """Steps of kernel gemv under way: 32 to 128 KiB an SM, as far as all warps find registers at once."""
    each = 16 if warps <= 10 * SMS else 8 if warps <= 24 * SMS else 4
    return min(max(2, each // codec.units), 1 << (steps - 1).bit_length())


def _bf16(each: float) -> TilePlan:
    """Weights that need no unpacking."""
    if each <= 12:
        return TilePlan("block", 8 if each <= 3.5 else 16, S=2, ST=3, SK=2)
    if each <= 24:
        return TilePlan("block", 32, T=2, S=1, ST=4, V=1)
    return TilePlan.parse(WIDER if WIDER_FROM < each <= WIDER_TO else WIDE)


def _one_token(codec: Codec, K: int, row_tiles: float) -> TilePlan:
    """Latency: the fewer the CTAs, the more each must have in flight."""
    if codec.bits == 16:
        return TilePlan("block", 8, S=2, ST=3, SK=2)
    if codec.bits == 8:
        return TilePlan("block", 8, S=2, ST=3, SK=2) if codec.kind == "float2" and K < 4096 else _ring(4, 4)
    if row_tiles > 320:
        return _ring(4, 4)
    return _ring(8, 4 if row_tiles <= 132 or K >= 4096 else 3)


def _ring(S: int, ST: int) -> TilePlan:
    return TilePlan("block", 8, S=S, ST=ST, SK=2)
