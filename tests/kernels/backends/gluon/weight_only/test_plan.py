"""Plans of backend gluon_sm90: their text, the committed table, the heuristic on shapes that nobody tuned for."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from expertd_kernels.backends.gluon.weight_only import planning
from expertd_kernels.backends.gluon.weight_only.codec import Codec, codec_of
from expertd_kernels.backends.gluon.weight_only.plan import LayerPlan, TilePlan
from expertd_kernels.backends.gluon.weight_only.planning import Plans, heuristic
from expertd_kernels.common.sizes import planned
from expertd_kernels.weights.scheme import Scheme

SHARED_BYTES = 232448
"""Shared memory that a CTA of an H100 or H200 may have (CUDA programming guide, compute capability 9.0)."""
SHAPES = [
    (128, 8, 2048, 768), (64, 8, 7168, 2048), (8, 2, 4096, 14336), (128, 4, 2880, 2880), (60, 6, 3584, 1280),
    (16, 1, 5120, 8192), (512, 10, 2048, 512), (1, 1, 256, 128), (256, 8, 7168, 2048),
]  # fmt: skip
TOKENS = [1, 2, 3, 7, 8, 16, 33, 64, 100, 128, 256, 500, 512, 1000, 2048, 5000, 8192]


def shared_bytes(plan: TilePlan, codec: Codec) -> int:
    """The ring: weights, inputs, scales of each stage (epilogues reuse it or need little)."""
    weights = plan.tiles * 32 * plan.columns * codec.units
    scales = plan.tiles * (plan.columns // codec.chunk) * codec.chunk_scales * codec.scale_bytes if codec.planes else 0
    return plan.stages * (weights + (plan.rows + plan.stretch) * plan.columns * 2 + scales + 16)


def by_tokens(scheme: str, shape: tuple[int, int, int, int]):
    """(codec, tokens, experts that are hit under uniform routing, the heuristic's plan)."""
    E, top_k, _, _ = shape
    codec = codec_of(Scheme.parse(scheme))
    for tokens in TOKENS:
        yield codec, tokens, E * (1 - (1 - top_k / E) ** tokens), heuristic((codec, codec), shape, tokens)


def check_gemv(plan: LayerPlan, codecs: tuple[Codec, Codec]) -> None:
    """Warps by powers of two, at most eight parts, and a ring of at most 16 loads of 16 bytes a lane."""
    assert plan.mode == "ids"
    for p, codec in zip((plan.w13, plan.w2), codecs, strict=True):
        assert p.tiles in (1, 2, 4), p
        assert p.warps in (p.tiles, 2 * p.tiles, 4 * p.tiles, 8 * p.tiles), p
        assert p.warps <= 16, p
        assert p.columns == 64, p
        assert p.stages & (p.stages - 1) == 0, p
        assert 2 <= p.stages * codec.units <= 16 or p.stages <= 2, p


def check(plan: LayerPlan, codecs: tuple[Codec, Codec], routes: int) -> None:
    if plan.w13.kernel == "gemv":
        check_gemv(plan, codecs)
        return
    for p, codec in zip((plan.w13, plan.w2), codecs, strict=True):
        assert p.columns % codec.chunk == 0, p
        assert p.columns % p.mma_columns == 0, p
        assert p.mma_columns == 64 or p.delay == 1, p
        assert p.stages > p.delay, p
        assert p.tiles * 4 >= p.warps, p
        assert shared_bytes(p, codec) <= SHARED_BYTES, p
        assert (p.kernel == "wide") <= (not codec.planes), p
        narrow = p.kernel == "block" and p.delay == 1 and (p.tiles == 1 or p.columns == 64)
        assert codec.planes or p.kernel == "wide" or narrow, p
    assert plan.mode == "lists" or routes <= 1024
    assert plan.mode != "ids" or routes <= 128 or plan.tokens == 1


def test_text_and_plan_are_inverse():
    for text in (
        "block: rows 8, tiles 1, warps 4, columns 256, stages 3, mma columns 128",
        "ws: rows 128, tiles 4, warps 8, columns 128, stages 4, narrower 1",
        "block: rows 8, tiles 1, warps 4, columns 128, stages 3, mma columns 128, registers 80, late",
        "ws: rows 64, tiles 4, warps 8, columns 128, stages 4, narrower 2, stretch 16",
        "block: rows 8, tiles 1, warps 4, columns 256, stages 4, mma columns 128, parts 4",
        "block: rows 64, tiles 2, warps 4, columns 128, stages 2, narrower 1, registers 168, stretch 16, follows",
        "wide: rows 128, tiles 4, warps 4, columns 64, stages 4",
        "wide: rows 192, tiles 4, warps 4, columns 64, stages 4",
        "block: rows 8, tiles 1, warps 4, columns 128, stages 3, mma columns 128, follows",
        "gemv: rows 1, tiles 4, warps 16, columns 64, stages 8, even",
        "gemv: rows 1, tiles 4, warps 16, columns 64, stages 8",
    ):
        assert str(TilePlan.parse(text)) == text
    with pytest.raises(ValueError, match="'queues 9' is unknown"):
        TilePlan.parse("block: rows 8, queues 9")
    with pytest.raises(ValueError, match="want rows"):
        TilePlan.parse("block: tiles 2")


def test_plans_that_do_not_go_together_are_refused():
    a, b = TilePlan.parse("block: rows 8"), TilePlan.parse("block: rows 16, tiles 2")
    with pytest.raises(ValueError, match="blocks of the same rows"):
        LayerPlan(8, "table", a, b)
    follows = TilePlan.parse("block: rows 8, follows")
    for w13, w2 in (
        (b, follows),
        (follows, a),
        (TilePlan.parse("ws: rows 8, tiles 4"), follows),
        (replace(a, stretch=8), follows),
    ):
        with pytest.raises(ValueError, match="follows goes with w2"):
            LayerPlan(8, "lists", w13, w2)
    with pytest.raises(ValueError, match="lists for kernels ws and wide"):
        LayerPlan(
            8, "table", TilePlan.parse("ws: rows 64, tiles 4, warps 8"), TilePlan.parse("ws: rows 64, tiles 4, warps 8")
        )
    with pytest.raises(ValueError, match="lists for kernels ws and wide, and stretch"):
        LayerPlan(8, "table", replace(a, stretch=8), replace(a, stretch=8))
    for mode, w13, w2 in (
        ("ids", a, "gemv: rows 1"),
        ("ids", "gemv: rows 1", a),
        ("table", "gemv: rows 1", "gemv: rows 1"),
    ):
        with pytest.raises(ValueError, match="kernel gemv takes both GEMMs, and mode ids"):
            LayerPlan(2, mode, TilePlan.parse(str(w13)), TilePlan.parse(str(w2)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scheme", ["int4_g128", "int4_g32_zp", "mxfp4", "int8_channel", "e4m3_block128", "bf16"])
def test_the_heuristic_fits_the_hardware(scheme, shape):
    for codec, tokens, _, plan in by_tokens(scheme, shape):
        check(plan, (codec, codec), tokens * shape[1])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("schemes", [("bf16", "int4_g128"), ("int4_g128", "bf16"), ("int8_channel", "mxfp4")], ids=str)
def test_a_layer_of_two_schemes_has_a_plan_at_every_size(schemes, shape):
    """Blocks of different sizes need lists: a table has blocks of one."""
    w13, w2 = (codec_of(Scheme.parse(s)) for s in schemes)
    for tokens in (*range(1, 120), *TOKENS):
        check(heuristic((w13, w2), shape, tokens), (w13, w2), tokens * shape[1])


@pytest.mark.parametrize(
    ("scheme", "stretched", "not_stretched"),
    [
        ("int4_g128", (1792, 2048, 2176, 4096), (2560, 3072, 8192, 16384)),
        ("mxfp4", (2048, 4096), (2560, 8192)),
        ("e4m3_block128", (1792, 2048, 4096, 8192, 12288), (2560, 9216, 16384)),
        ("int8_channel", (2048, 4096, 8192), (2560, 3072)),
        ("int4_g32_zp", (), (2048, 4096)),
    ],
)
def test_an_experts_last_block_stretches_where_blocks_would_be_just_full(scheme, stretched, not_stretched):
    """Tokens of Qwen3-30B-A3B: 16 for each token of an expert."""
    codec = codec_of(Scheme.parse(scheme))
    for tokens in (*stretched, *not_stretched):
        plan = heuristic((codec, codec), (128, 8, 2048, 768), tokens)
        assert {plan.w13.stretch, plan.w2.stretch} == {16 if tokens in stretched else 0}, tokens
        assert {plan.w13.rows, plan.w2.rows} == {128}


@pytest.mark.parametrize("scheme", ["int4_g128", "mxfp4", "int8_channel", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_w2_follows_w13_where_it_has_many_short_tiles(scheme, shape):
    _, _, H, I = shape
    for codec, tokens, hit, plan in by_tokens(scheme, shape):
        tiles = hit * -(-H // 64)
        blocks = plan.w13.kernel == plan.w2.kernel == "block" and plan.w13.rows == plan.w2.rows
        many = tokens > 1 and tiles >= 900 and I <= 4096 and (codec.bits < 16 or plan.w2.rows == 8)
        if blocks:
            assert many == plan.w2.follows, (plan, tiles)
        elif plan.w2.follows:  # in one launch
            assert many, (plan, tiles)
            assert replace(plan.w2, follows=False) == plan.w13
        assert not plan.w13.follows


@pytest.mark.parametrize("scheme", ["int4_g128", "int4_g128_zp", "mxfp4", "int8_channel"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_of_64_tokens_take_four_warps_where_w2_follows(scheme, shape):
    """From 24 to 56 tokens an expert; with 4 bits to 80, where the last block stretches.  Unless both GEMMs take
    kernel ws."""
    _, top_k, H, I = shape
    for codec, tokens, hit, plan in by_tokens(scheme, shape):
        if tokens == 1 or (plan.w13.kernel == "ws" and replace(plan.w2, follows=False) == plan.w13):
            continue
        each = tokens * top_k / hit
        many = hit * -(-H // 64) >= 900 and I <= 4096
        for p in (plan.w13, plan.w2):
            mine = (p.kernel, p.rows, p.tiles, p.warps) == ("block", 64, 2, 4)
            assert mine == (24 < each <= (80 if codec.bits == 4 else 56) and many), plan
            assert not mine or (16 if each > 56 else 0) == p.stretch, plan


@pytest.mark.parametrize("scheme", ["int4_g128", "int4_g128_zp", "int4_g32_zp", "mxfp4"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_few_tokens_take_two_row_tiles_where_those_fill_the_gpu(scheme, shape):
    """And only where w2's tiles fill the end of w13: elsewhere the last, longer CTAs run alone."""
    _, _, H, I = shape
    for _, tokens, hit, plan in by_tokens(scheme, shape):
        if tokens == 1:
            continue
        for p, rows in ((plan.w13, -(-2 * I // 64)), (plan.w2, -(-H // 64))):
            if p.kernel == "block" and p.rows == 8:
                assert p.tiles == 1 or (plan.w2.follows and hit * rows >= 1200), plan
                assert p.tiles == 2 or not (plan.w2.follows and hit * rows >= 1848), plan
                assert p.tiles == 1 or (p.mma_columns, p.columns * p.stages) in ((64, 512), (64, 384)), plan


def test_the_plan_with_fewer_idle_ctas_is_taken():
    """w13 in rounds of 660 CTAs of 256-column stages or of 924 of 128-column ones: 989 CTAs are 1.5 or 1.07 rounds at
    16 tokens, 1342 are 2.03 or 1.45 at 32.  CTAs of one row tile where 684 of two would be 1.04 rounds."""
    c = codec_of(Scheme.parse("int4_g128"))
    assert [heuristic((c, c), (128, 8, 2048, 768), m).w13.columns for m in (16, 32)] == [256, 128]
    assert [heuristic((c, c), (60, 6, 3584, 1280), m).w13.tiles for m in (8, 16)] == [1, 2]
    assert heuristic((c, c), (128, 8, 2048, 768), 8).mode == "ids"


def test_stages_do_not_reach_far_beyond_short_columns():
    c = codec_of(Scheme.parse("mxfp4"))
    plan = heuristic((c, c), (256, 8, 2048, 320), 32)
    assert (plan.w13.columns, plan.w2.tiles, plan.w2.columns) == (256, 2, 128)


def test_w2_follows_w13_on_qwen3_and_not_on_mixtral():
    c = codec_of(Scheme.parse("int4_g128"))
    qwen3, mixtral = (128, 8, 2048, 768), (8, 2, 4096, 14336)
    for plans in (lambda shape: Plans.for_layer("NVIDIA H200", 132, c, c, shape), lambda shape: Plans((c, c), shape)):
        assert [plans(qwen3).at(m).w2.follows for m in (1, 2, 4, 8, 32, 100)] == [0, 0, 0, 1, 1, 1]
        assert not any(plans(mixtral).at(m).w2.follows for m in (1, 2, 4, 8, 32, 100))


@pytest.mark.parametrize("scheme", ["int4_g128", "mxfp4", "e4m3_block128", "bf16"])
def test_up_to_four_tokens_of_small_layers_take_kernel_gemv(scheme):
    c = codec_of(Scheme.parse(scheme))
    for m in (1, 2, 3, 4, 5):
        small, large = (heuristic((c, c), shape, m) for shape in ((128, 8, 1024, 384), (8, 2, 16384, 32768)))
        assert (small.w13.kernel == "gemv") == (m <= 4), small
        assert large.w13.kernel != "gemv", large  # its inputs do not fit a CTA's shared memory


@pytest.mark.parametrize(
    ("scheme", "shape", "tokens"),
    [
        ("int4_g128", (128, 8, 2048, 768), 4), ("mxfp4", (128, 4, 2880, 2880), 2),  # by bytes
        ("int4_g128", (16, 1, 5120, 8192), 4), ("int4_g128", (8, 2, 4096, 14336), 2),  # by tiles
        ("int8_channel", (128, 8, 2048, 768), 2), ("bf16", (128, 8, 2048, 768), 1),
        ("bf16", (128, 4, 2880, 2880), 0), ("e4m3_block128", (64, 8, 7168, 2048), 0),
    ],
)  # fmt: skip
def test_tokens_up_to_which_each_route_is_computed_by_itself(scheme, shape, tokens):
    c = codec_of(Scheme.parse(scheme))
    assert [m for m in range(1, 9) if heuristic((c, c), shape, m).w13.kernel == "gemv"] == list(range(1, tokens + 1))


def test_ctas_of_kernel_gemv_fill_the_gpu():
    """Qwen3-30B's w13 has 768 slices of 16 rows: 192 CTAs of four would be 1.5 an SM, 384 of two are 2.9."""
    c = codec_of(Scheme.parse("int4_g128"))
    plan = heuristic((c, c), (128, 8, 2048, 768), 1)
    assert (str(plan.w13), str(plan.w2)) == (
        "gemv: rows 1, tiles 2, warps 8, columns 64, stages 8",
        "gemv: rows 1, tiles 1, warps 8, columns 64, stages 16",
    )
    assert heuristic((c, c), (16, 1, 5120, 8192), 1).w13 == TilePlan.parse(
        "gemv: rows 1, tiles 4, warps 16, columns 64, stages 4"
    )


def test_the_committed_tables_parse_and_fit():
    files = list((Path(planning.__file__).parent / "plans").glob("nvidia_*.json"))
    assert files
    for file in files:
        table = json.loads(file.read_text())
        for row in table["layers"]:
            w13, w2 = (next(c for c in map(codec_of, ALL) if c.name == n) for n in row["codecs"])
            plans = Plans.for_layer(table["gpu"], table["multiprocessors"], w13, w2, tuple(row["shape"]))
            assert plans.tuned, row
            for p in plans.tuned:
                check(p, (w13, w2), min(p.tokens, 8192) * row["shape"][1])


ALL = [Scheme.parse(s) for s in ("int4_g128", "int4_g64", "int4_g32", "int4_g128_zp", "int8_channel", "mxfp4", "mxfp8",
                                 "e4m3_block128", "bf16")]  # fmt: skip


def test_tuned_plans_come_first_and_the_heuristic_fills_in():
    c = codec_of(Scheme.parse("int4_g128"))
    tuned = LayerPlan(16, "table", TilePlan.parse("block: rows 8"), TilePlan.parse("block: rows 8"))
    plans = Plans((c, c), (128, 8, 2048, 768), [tuned])
    assert plans.at(16) is tuned
    assert plans.at(17) == heuristic((c, c), (128, 8, 2048, 768), 17)


@pytest.mark.parametrize("scheme", ["int4_g128", "int4_g128_zp", "mxfp4", "int8_channel", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_large_batches_are_planned_for_powers_of_two(scheme, shape):
    """With one mode of routing, too: its kernels are compiled for powers of two of the routes."""
    codec = codec_of(Scheme.parse(scheme))
    plans = Plans.for_layer("NVIDIA H200", 132, codec, codec, shape)
    for tokens in range(513, 8193, 77):
        found = plans.at(tokens)
        assert found in (plans.at(planned(tokens)), plans.at(1024))
        assert found.mode == "lists"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scheme", ["int4_g128", "int4_g32_zp", "int8_channel", "mxfp4", "e4m3_block128", "bf16"])
def test_where_bits_must_not_depend_on_the_batch_every_kernel_adds_up_in_one_order(scheme, shape):
    """Kernel gemv and w2 over several CTAs cut columns into parts; wide and block were not compared."""
    codec = codec_of(Scheme.parse(scheme))
    plans = Plans.for_layer("NVIDIA H200", 132, codec, codec, shape, invariant=True)
    found = [plans.at(m) for m in TOKENS]
    kernels = {p.kernel for plan in found for p in (plan.w13, plan.w2)}
    assert kernels <= ({"wide"} if scheme == "bf16" else {"block", "ws"})
    assert {plan.w2.parts for plan in found} == {1}
    for plan, tokens in zip(found, TOKENS, strict=True):
        check(plan, (codec, codec), tokens * shape[1])


def test_both_gemms_in_one_launch_have_one_plan():
    quarters = TilePlan.parse("ws: rows 64, tiles 4, stages 3, narrower 1, registers 128, ctas 2")
    together = LayerPlan(512, "lists", quarters, replace(quarters, follows=True))
    assert together.w2.follows
    with pytest.raises(ValueError, match="follows goes with w2"):
        LayerPlan(512, "lists", quarters, replace(quarters, follows=True, stages=2))
