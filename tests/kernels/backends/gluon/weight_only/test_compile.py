"""The Gluon kernels compiled for sm_90 by Triton's offline target, no GPU needed: they compile, keep to their
registers, spill little or nothing, and ptxas leaves their wgmma instructions asynchronous."""

import pytest

triton = pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")

from ptxas import disassembled, predicated_sums, resources  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from expertd_kernels.backends.gluon.shared.routing import combine, count_routes, group_few, place_routes, table_routes  # noqa: E402
from expertd_kernels.backends.gluon.weight_only.block import block  # noqa: E402
from expertd_kernels.backends.gluon.weight_only.codec import codec_of  # noqa: E402
from expertd_kernels.backends.gluon.weight_only.constants import Gemm, tile  # noqa: E402
from expertd_kernels.backends.gluon.weight_only.plan import TilePlan  # noqa: E402
from expertd_kernels.backends.gluon.weight_only.planning import WIDE, WIDER  # noqa: E402
from expertd_kernels.backends.gluon.weight_only.wide import wide  # noqa: E402
from expertd_kernels.backends.gluon.weight_only.ws import both, ws  # noqa: E402
from expertd_kernels.weights.scheme import Scheme  # noqa: E402

pytestmark = pytest.mark.usefixtures("kept_triton_cache")


def gemm(scheme: str, first: bool, **more) -> Gemm:
    """Qwen3-30B-A3B's w13 or w2."""
    facts = (
        {"K": 2048, "rows": 24, "x_columns": 2048, "x_stride": 2048, "out_columns": 768}
        if first
        else {"K": 768, "rows": 32, "x_columns": 768, "x_stride": 768, "out_columns": 2048}
    )
    facts |= {"experts": 128, "top_k": 8, "first": first, "gated": first, "weight": not first, "bias": False}
    return Gemm(codec_of(Scheme.parse(scheme)), **(facts | more))


def compiled(g: Gemm, plan: TilePlan, mode: str, words: int = 0, listed: bool = False, counted: int = 0):
    """Triton's compiled kernel of this GEMM under this plan."""
    c = tile(g, plan, mode, True, words, listed, counted)
    kernel = {"block": block, "ws": ws, "wide": wide}[plan.kernel]
    words_type = f"tensordesc<i32[{c.T}, {16 * c.stage_units}, 32],{c.SW!r}>"
    scale = "*u8" if c.codec.e8m0 else "*bf16"
    out = "*bf16" if g.first or plan.kernel == "ws" else "*fp32"  # w2's results are f32 up to 64 tokens
    results = ["*i32", out] if plan.kernel == "ws" else [out, "*i32"]
    types = ["*bf16", words_type, scale, "*fp32", "*i32", "*i32", "*fp32", *results, "fp32", "i32", "constexpr"]
    if plan.kernel == "wide":
        h = f"tensordesc<bf16[64, 64],{c.SX!r}>"
        types = ["*bf16", h, words_type, "*fp32", "*i32", "*i32", "*fp32", "*i32", "*bf16", "constexpr"]
    signature = dict(zip(kernel.arg_names, types, strict=True))
    aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(types) if t.startswith("*")}
    source = GluonASTSource(kernel, signature, {(len(types) - 1,): c}, aligned)
    options = {"num_warps": plan.warps, "launch_pdl": True} | ({"maxnreg": plan.registers} if plan.registers else {})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


CASES = [
    # scheme, w13 or w2, plan, mode, words, most registers, most bytes spilled
    ("int4_g128", True, "block: rows 8, columns 256, stages 3, mma columns 128", "table", 0, 96, 0),
    ("int4_g128", False, "block: rows 8, stages 3, mma columns 128", "ids", 2, 72, 0),
    ("int4_g128", True, "block: rows 8, tiles 2, columns 256, stages 2", "table", 0, 72, 0),
    ("int4_g128", True, "block: rows 8, tiles 2, stages 3", "table", 0, 72, 0),
    ("int4_g128", True, "block: rows 8, columns 256, stages 3", "table", 0, 56, 0),
    ("int4_g128", False, "block: rows 16, tiles 2, stages 3", "table", 0, 80, 0),
    ("int4_g32_zp", True, "block: rows 8, tiles 2, columns 256, stages 2", "table", 0, 96, 0),
    ("mxfp4", False, "block: rows 8, tiles 2, stages 3", "table", 0, 72, 0),
    ("int4_g128", False, "block: rows 8, stages 3, mma columns 128, parts 2", "ids", 0, 72, 0),
    ("int4_g128", True, "block: rows 64, tiles 4, warps 8, narrower 3, delay 2, registers 128", "lists", 0, 128, 32),
    ("int4_g128", True, "block: rows 64, tiles 2, stages 2, narrower 3, registers 128", "lists", 0, 128, 32),
    ("mxfp4", True, "block: rows 64, tiles 2, stages 2, narrower 3, registers 128", "lists", 0, 128, 32),
    ("e4m3_block128", True, "block: rows 64, tiles 2, stages 2, narrower 3, registers 168", "lists", 0, 168, 0),
    ("int8_channel", False, "block: rows 64, tiles 2, stages 2, narrower 3, registers 168", "lists", 0, 168, 0),
    ("int4_g128", True, "block: rows 64, tiles 2, stages 2, narrower 1, registers 168, stretch 16", "lists", 0, 168, 0),
    (
        "int4_g32_zp",
        False,
        "block: rows 64, tiles 2, stages 2, narrower 1, registers 168, stretch 16",
        "lists",
        0,
        168,
        0,
    ),
    ("int4_g128", True, "ws: rows 128, tiles 4, warps 8, stages 4, narrower 1", "lists", 0, 168, 256),
    ("int4_g128", True, "ws: rows 64, tiles 4, warps 8, stages 4, narrower 2, stretch 16", "lists", 0, 168, 128),
    ("mxfp4", False, "ws: rows 64, tiles 4, warps 8, stages 4, narrower 2, stretch 16", "lists", 0, 168, 128),
    ("int4_g32_zp", True, "block: rows 8, columns 256, stages 3, mma columns 128", "table", 0, 96, 0),
    ("mxfp4", False, "block: rows 8, columns 256, stages 3, mma columns 128", "table", 0, 96, 0),
    ("int8_channel", False, "block: rows 16, tiles 2, mma columns 128", "lists", 0, 128, 0),
    ("int8_channel", True, "block: rows 8, tiles 2, stages 3", "table", 0, 80, 0),
    ("int4_g128", True, "block: rows 8, tiles 2, columns 256, stages 2", "ids", 2, 72, 0),
    ("int4_g128", False, "block: rows 16, tiles 2, columns 256, stages 2", "table", 0, 96, 0),
    ("e4m3_block128", True, "block: rows 8, stages 3, mma columns 128", "table", 0, 80, 0),
    ("e4m3_block128", True, "ws: rows 128, tiles 4, warps 8, stages 3, stretch 16", "lists", 0, 168, 256),
    ("int8_channel", True, "ws: rows 128, tiles 4, warps 8, stages 3, stretch 16", "lists", 0, 168, 256),
    ("int4_g128_zp", True, "ws: rows 128, tiles 4, warps 8, stages 4, stretch 16", "lists", 0, 168, 256),
    ("e4m3_block128", False, "ws: rows 64, tiles 4, warps 8, stages 4, narrower 2, stretch 16", "lists", 0, 168, 128),
    ("bf16", True, "block: rows 8, stages 3, mma columns 128", "table", 0, 40, 0),
    ("bf16", False, "block: rows 32, tiles 2, columns 64, stages 4, narrower 1", "lists", 0, 72, 0),
    ("bf16", True, "wide: rows 128, tiles 4, columns 64, stages 4", "lists", 0, 168, 96),
    ("bf16", False, "wide: rows 128, tiles 4, columns 64, stages 4", "lists", 0, 168, 64),
    ("bf16", True, "wide: rows 192, tiles 4, columns 64, stages 4", "lists", 0, 128, 256),
    ("bf16", False, "wide: rows 192, tiles 4, columns 64, stages 4", "lists", 0, 128, 0),
]


def _first_of_each_kernel(cases):
    """The first case of each kernel and mode is compiled in `make test`, all others in `make soak`."""
    seen = set()
    for scheme, first, plan, mode, *_ in cases:
        kernel = plan.partition(":")[0]
        name = f"{scheme}-{'w13' if first else 'w2'}-{mode}-{kernel}"
        yield name, [] if (kernel, mode) not in seen else [pytest.mark.soak]
        seen.add((kernel, mode))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=marks)
        for case, (name, marks) in zip(CASES, _first_of_each_kernel(CASES), strict=True)
    ],
)
def test_it_compiles_within_its_registers_and_stays_asynchronous(case):
    scheme, first, plan, mode, words, most_registers, most_spilled = case
    kernel = compiled(gemm(scheme, first), TilePlan.parse(plan), mode, words, plan.startswith("wide"))
    registers, spilled, serialized = resources(kernel)
    assert not serialized, "ptxas serialized wgmma: the plan needs more registers than it may have"
    assert registers <= most_registers
    assert spilled <= most_spilled
    assert kernel.metadata.shared <= 232448


QUARTERS = "ws: rows 64, tiles 4, stages 3, narrower 1, registers 128, ctas 2"


@pytest.mark.parametrize(
    ("scheme", "plan", "most_spilled"),
    [
        ("int4_g128", QUARTERS, 160),
        ("mxfp4", QUARTERS, 160),
        ("int4_g128_zp", "ws: rows 128, tiles 4, warps 8, stages 4, stretch 16", 256),
        ("e4m3_block128", "ws: rows 128, tiles 4, warps 8, stages 3, stretch 16", 256),
    ],
)
@pytest.mark.parametrize("tabled", [False, True])
@pytest.mark.soak  # test_launches.py compiles it as a layer launches it
def test_both_gemms_in_one_launch_stay_asynchronous(scheme, plan, most_spilled, tabled, tmp_path):
    """The consumers spill nothing in their loops; what is spilled are addresses of the threads that copy."""
    p = TilePlan.parse(plan)
    C, D = (tile(gemm(scheme, first), p, "lists", True, tabled=tabled) for first in (True, False))
    words = [f"tensordesc<i32[{c.T}, {16 * c.stage_units}, 32],{c.SW!r}>" for c in (C, D)]
    scale = "*u8" if C.codec.e8m0 else "*bf16"
    types = ["*bf16", words[0], scale, "*fp32", "*bf16", words[1], scale, "*fp32", "*i32", "*i32", "*fp32", "*i32",
             "*bf16", "fp32", "fp32", "i32", "constexpr", "constexpr"]  # fmt: skip
    signature = dict(zip(both.arg_names, types, strict=True))
    aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(types) if t.startswith("*")}
    source = GluonASTSource(both, signature, {(16,): C, (17,): D}, aligned)
    options = {"num_warps": p.warps, "launch_pdl": True} | ({"maxnreg": p.registers} if p.registers else {})
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    registers, spilled, serialized = resources(kernel)
    assert not serialized
    assert registers <= (p.registers or 168)
    assert spilled <= most_spilled
    assert p.ctas * (kernel.metadata.shared + 1024) <= 233472
    assert not predicated_sums(kernel, tmp_path)


@pytest.mark.parametrize("experts", [8, pytest.param(60, marks=pytest.mark.soak)])
def test_no_sum_is_taken_under_a_predicate(experts, tmp_path):
    """With few experts a branch around a sum is short enough for ptxas to turn it into predicates."""
    for first, plan, mode, words in (
        (True, "ws: rows 128, tiles 4, warps 8, stages 4, stretch 16", "lists", 0),
        (False, "ws: rows 32, tiles 4, stages 4, narrower 1, registers 128, ctas 2", "lists", 0),
        (False, "block: rows 64, tiles 2, stages 2, narrower 1, registers 168, stretch 16", "lists", 0),
        (True, "block: rows 8, tiles 2, stages 3", "ids", 2),
    ):
        kernel = compiled(gemm("int4_g128", first, experts=experts), TilePlan.parse(plan), mode, words)
        assert any("REDUX" in line for line in disassembled(kernel, tmp_path)), "sums have another name here"
        assert not predicated_sums(kernel, tmp_path)


def test_w2_following_w13_costs_no_registers():
    """w13 counts its tiles with a release at the end, after a barrier; w2 asks before it reads, weights under way, and
    waits for the kernel only at its own end."""
    for first, plan, most in (
        (True, "block: rows 8, tiles 2, stages 3", 72),
        (False, "block: rows 8, tiles 2, columns 256, stages 2, follows", 72),
    ):
        kernel = compiled(gemm("int4_g128", first), TilePlan.parse(plan), "table", counted=24)
        registers, spilled, serialized = resources(kernel)
        assert (registers <= most, spilled, serialized) == (True, 0, False)
        text = kernel.asm["ptx"]
        if first:
            assert text.rindex("bar.sync") < text.index("gpu.release.add") < text.rindex("ret;")
        else:
            asks = text.index("ld.acquire.gpu")
            assert text.index("cp.async.bulk.tensor") < asks < text.index("griddepcontrol.wait")
            assert asks < text.index("bar.sync", asks) < text.index("cp.async.cg", asks)


def test_every_feature_compiles():
    """Bias, swigluoai with limits, router weight on the input, padded K and output, a number of experts that is no
    power of two."""
    g = gemm("mxfp4", True, K=2880, rows=90, x_columns=2880, x_stride=2880, out_columns=2880, experts=60, bias=True,
             weight=True, act="swigluoai", alpha=1.702, beta=1.0, limit=7.0, limited=True)  # fmt: skip
    kernel = compiled(g, TilePlan.parse("block: rows 32, tiles 4, narrower 1"), "lists")
    _, _, serialized = resources(kernel)
    assert not serialized


@pytest.mark.parametrize("plan", [WIDE, pytest.param(WIDER, marks=pytest.mark.soak)], ids=str)
@pytest.mark.parametrize("listed", [True, pytest.param(False, marks=pytest.mark.soak)])
@pytest.mark.parametrize("first", [True, False])
def test_every_feature_of_the_kernel_for_bf16_compiles(first, listed, plan):
    """Not listed: the other GEMM is another kernel's, and w2's inputs are gathered, too."""
    facts = {"K": 2880, "x_columns": 2880, "x_stride": 2880, "out_columns": 2880, "experts": 60, "bias": True,
             "weight": True}  # fmt: skip
    act = {"rows": 90, "act": "swigluoai", "alpha": 1.702, "beta": 1.0, "limit": 7.0, "limited": True}
    g = gemm("bf16", first, **facts, **(act if first else {"rows": 45}))
    kernel = compiled(g, plan, "lists", 0, listed)
    _, spilled, serialized = resources(kernel)
    assert not serialized
    assert spilled <= 384
    assert kernel.metadata.shared <= 232448


def test_a_wide_kernel_without_gate_compiles():
    g = gemm("bf16", True, gated=False, act="relu2", rows=13, out_columns=800)
    _, _, serialized = resources(compiled(g, WIDE, "lists", 0, True))
    assert not serialized


@pytest.mark.parametrize(
    ("kernel", "types", "constants"),
    [
        (
            combine,
            ["*fp32", "*i32", "*bf16", "i32", "i32"],
            {"TOPK": 8, "B": 512, "PDL": True, "PARTS": 1, "done": None, "COUNTERS": 0, "weights": None},
        ),
        (
            combine,
            ["*fp32", "*i32", "*bf16", "i32", "i32", "*i32"],
            {"TOPK": 2, "B": 512, "PDL": True, "PARTS": 4, "COUNTERS": 1024, "weights": None},
        ),
        (
            combine,
            ["*bf16", "*i32", "*bf16", "i32", "i32", "*i32", "*fp32"],
            {"TOPK": 8, "B": 2048, "PDL": True, "PARTS": 1, "COUNTERS": 64},
        ),
        (group_few, ["*i32", "*i32", "*i32", "i32"], {"TH": 256, "CH": 4, "PDL": True}),
        (count_routes, ["*i32", "*i16", "i32"], {"E": 60, "EP": 64, "C": 512, "PDL": True}),
        (
            place_routes,
            ["*i32", "*i16", "*i32", "*i32", "i32", "i32"],
            {
                "places": None,
                "E": 512,
                "EP": 512,
                "C": 512,
                "BC": 8,
                "PDL": True,
                "blocks": None,
                "BM": 0,
                "X": 0,
                "MAXB": 0,
            },
        ),
        (
            place_routes,
            ["*i32", "*i16", "*i32", "*i32", "i32", "i32", "*i32"],
            {"places": None, "E": 60, "EP": 64, "C": 512, "BC": 8, "PDL": True, "BM": 64, "X": 16, "MAXB": 2048},
        ),
        (
            table_routes,
            ["*i32", "*i32", "*i32", "i32"],
            {"E": 60, "EP": 64, "MAXB": 128, "BM": 8, "B": 512, "PDL": True},
        ),
    ],
    ids=[
        "combine",
        "combine_parts",
        "combine_weighted",
        "group_few",
        "count_routes",
        "place_routes",
        "list_blocks",
        "table_routes",
    ],
)
def test_the_kernels_around_the_gemms_compile(kernel, types, constants, tmp_path):
    names = kernel.arg_names
    signature = dict.fromkeys(names, "constexpr")
    signature |= dict(zip((n for n in names if n not in constants), types, strict=True))
    source = ASTSource(kernel, signature, {(names.index(k),): v for k, v in constants.items()})
    out = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "launch_pdl": True})
    assert "griddepcontrol.wait" in out.asm["ptx"]
    assert resources(out)[1] == 0, "it spills"
    assert not predicated_sums(out, tmp_path)


def test_a_plan_that_splits_a_group_is_refused():
    with pytest.raises(ValueError, match="does not hold whole groups"):
        tile(gemm("int4_g128", True), TilePlan.parse("block: rows 8, columns 64"), "table", True)


def test_columns_that_do_not_split_are_refused():
    with pytest.raises(ValueError, match="768 columns in whole stages"):
        tile(gemm("int4_g128", False), TilePlan.parse("block: rows 8, columns 256, parts 2"), "ids", True)
    with pytest.raises(ValueError, match="parts go with w2"):
        tile(gemm("int4_g128", True), TilePlan.parse("block: rows 8, columns 256, parts 2"), "ids", True)


@pytest.mark.parametrize(
    ("scheme", "plan", "mode"),
    [
        ("int4_g128", "ws: rows 64, tiles 4, warps 8, stretch 4", "lists"),
        ("int4_g128", "ws: rows 64, tiles 4, warps 8, stretch 24", "lists"),
        ("int4_g128", "block: rows 64, tiles 2, stretch 16", "table"),
        ("bf16", "block: rows 32, mma columns 128, stretch 16", "lists"),
    ],
)
def test_a_stretch_that_no_kernel_has_is_refused(scheme, plan, mode):
    with pytest.raises(ValueError, match="stretch goes with kernels ws and block"):
        tile(gemm(scheme, True), TilePlan.parse(plan), mode, True)


@pytest.mark.parametrize(
    ("scheme", "plan"),
    [
        ("bf16", "ws: rows 64, tiles 4, warps 8"),
        ("bf16", "block: rows 32, tiles 2"),
        ("bf16", "block: rows 8, columns 64, delay 2"),
        ("int4_g128", str(WIDE)),
        ("bf16", "wide: rows 64, tiles 4, columns 64"),
    ],
)
def test_bf16_weights_have_kernels_of_their_own(scheme, plan):
    with pytest.raises(ValueError, match="bf16 weights"):
        tile(gemm(scheme, True), TilePlan.parse(plan), "lists", True)
