"""Backend gluon_sm90 on a Hopper GPU, against the float32 reference: every scheme and feature of its row of the table,
every kernel and mode, ragged sizes, skewed routing, poisoned outputs, repeatability, CUDA graphs."""

from dataclasses import dataclass, replace

import pytest
import torch
from poisoned import counters_are_zero, poison_scratch

from expertd_kernels import Activation, Scheme, decide, detect_device, reference, relative_error
from expertd_kernels.measure.timing import captured
from expertd_kernels.oracle.decision import NoBackendError
from expertd_kernels.oracle.probe import installed_packages
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.packed.builder import build, problem_of
from expertd_kernels.sources.synthetic import random_inputs, random_weights
from expertd_kernels.weights.scheme import ScaleType

pytestmark = pytest.mark.gpu
LIMIT = 5e-3
"""Relative error for bf16 operands and a bf16 intermediate on exact weights; tighter than the row's tolerance."""
ROW = next(b for b in BACKENDS if b.name == "gluon_sm90")


@dataclass(frozen=True)
class Case:
    """A layer.  Sizes are no multiples of a tile unless said."""

    scheme: str
    activation: str = "silu_and_mul"
    bias: bool = False
    experts: int = 8
    top_k: int = 2
    hidden: int = 1024
    inner: int = 512
    scale: ScaleType | None = None
    w2_scheme: str | None = None

    def __str__(self) -> str:
        schemes = self.scheme if self.w2_scheme is None else f"{self.scheme}-{self.w2_scheme}"
        return f"{schemes}-{self.activation}-{self.hidden}x{self.inner}-E{self.experts}" + ("-bias" * self.bias)


SCHEMES = [
    "int4_g128", "int4_g64", "int4_g32", "int4_channel", "int4_g128_zp", "int4_g32_zp", "int8_channel", "int8_g128",
    "int8_g32_zp", "mxfp4", "mxfp8", "e4m3_block128", "e4m3_channel", "e4m3_tensor", "bf16",
]  # fmt: skip
FEATURES = [
    Case("int4_g128", experts=60, top_k=6, hidden=1000, inner=200),
    Case("int4_g128", scale=ScaleType.F16),
    Case("int4_g128_zp", scale=ScaleType.F16, hidden=2048),
    Case("mxfp4", "swigluoai", True, hidden=2880, inner=2880, experts=5, top_k=4),
    Case("int4_g128", "gelu_and_mul", experts=1, top_k=1),
    Case("int4_g32", "gelu_tanh_and_mul", True, experts=3, inner=96),
    Case("int8_channel", "relu2", True, inner=320),
    Case("bf16", "silu_and_mul_limit1.5", experts=16, top_k=4, hidden=328, inner=72),
    Case("e4m3_block128", "relu2", hidden=576, inner=192),
    Case("mxfp8", "swigluoai", True, hidden=320, inner=192),
    Case("int4_g128", experts=512, top_k=10, hidden=256, inner=128),
    Case("bf16", "swigluoai", True, hidden=2880, inner=2880, experts=5, top_k=4),
    Case("bf16", "relu2", True, experts=9, top_k=3, hidden=1088, inner=320),
    Case("bf16", w2_scheme="int4_g128"),
    Case("int8_channel", bias=True, w2_scheme="bf16"),
]


def layer(case: Case, seed: int = 0):
    """(weights on the GPU, experts); skipped with the oracle's sentence where the row does not apply."""
    scheme = Scheme.parse(case.scheme)
    if case.scale is not None:
        scheme = scheme.with_scale(case.scale)
    device = detect_device("auto")
    if all(refused := [r.refusal(device) for r in ROW.devices]):
        pytest.skip("; ".join(map(str, refused)))  # drawing the weights takes half a minute of all these cases
    weights = random_weights(
        scheme,
        case.experts,
        case.hidden,
        case.inner,
        activation=Activation.parse(case.activation),
        bias=case.bias,
        w2_scheme=case.w2_scheme,
        signed_scales=True,
        seed=seed,
        device="cuda" if device.kind == "cuda" else "cpu",
    )
    problem = problem_of(weights, device, top_k=case.top_k, packages=installed_packages(BACKENDS), deterministic=True)
    try:
        decision = decide(problem, pin="gluon_sm90")
        decision.require()
    except NoBackendError:
        pytest.skip("; ".join(next(v for v in decision.verdicts if v.backend == "gluon_sm90").refusals))
    return weights, build(decision, weights)


def routed(case: Case, M: int, how: str):
    """Inputs with uniform ("even"), skewed, single-expert or partly absent (-1) routes."""
    x, ids, w = random_inputs(M, case.hidden, case.experts, case.top_k, seed=M + 1, device="cuda")
    if how == "skewed":
        ids = (ids.float() ** 2 / case.experts).int()  # repeats an expert within a token, too
    elif how == "one":
        ids = torch.full_like(ids, case.experts - 1)
    elif how == "absent":
        ids = torch.where(torch.rand(ids.shape, device="cuda") < 0.4, -1, ids).int()
        ids[0] = -1
    return x, ids, w


def check(case, weights, experts, M, how, **more):
    """Error of a poisoned output, and bit-identical repeats."""
    x, ids, w = routed(case, M, how)
    outs = []
    for _ in range(2):
        out = torch.full_like(x, float("nan"))
        poison_scratch()
        on_input = more.get("router_weight_on_input", False)
        assert experts(x, ids, w, out=out, **more) is out
        outs.append(out)
    error = relative_error(outs[0], reference(weights, x, ids, w, router_weight_on_input=on_input))
    assert error <= LIMIT, f"M = {M}, {how}, {more}: relative error {error:.2e}"
    assert torch.equal(outs[0], outs[1]), f"M = {M}, {how}: two runs differ"
    assert counters_are_zero()
    return error


SIZES = ((1, "even"), (7, "even"), (33, "skewed"), (64, "absent"), (200, "one"), (1000, "even"), (4096, "skewed"))


@pytest.mark.parametrize("case", [*[Case(s) for s in SCHEMES], *FEATURES], ids=str)
def test_error_over_ragged_sizes_and_routings(case):
    weights, experts = layer(case)
    for M, how in (
        (1, "even"),
        (7, "even"),
        (33, "skewed"),
        (64, "absent"),
        (200, "one"),
        (1000, "even"),
        (4096, "skewed"),
    ):
        check(case, weights, experts, M, how)
    check(case, weights, experts, 9, "even", router_weight_on_input=True)


FOUR_QUARTERS = "ws: rows 64, tiles 4, stages 3, narrower 1, registers 128, ctas 2"
PLANS = {
    "ids": [
        ("block: rows 8, columns 256, mma columns 128", "block: rows 8, mma columns 128, late"),
        ("block: rows 8, tiles 2", "block: rows 8, tiles 1"),
        ("block: rows 16, tiles 2, mma columns 128, narrower 1", "block: rows 8, columns 256, mma columns 128"),
        ("block: rows 8, columns 256, mma columns 128", "block: rows 8, mma columns 128, follows"),
        ("block: rows 8, tiles 2", "block: rows 8, tiles 1, late, follows"),
        ("block: rows 8, tiles 2, columns 256, stages 2", "block: rows 8, tiles 2, columns 256, stages 2, follows"),
        (
            "gemv: rows 1, tiles 2, warps 8, columns 64, stages 8",
            "gemv: rows 1, tiles 1, warps 8, columns 64, stages 4",
        ),
        ("gemv: rows 1, tiles 4, columns 64, stages 4", "gemv: rows 1, tiles 4, warps 16, columns 64, stages 16"),
    ],
    "table": [
        ("block: rows 8, mma columns 128", "block: rows 8, columns 256, mma columns 128"),
        ("block: rows 16, tiles 2, narrower 1", "block: rows 16, tiles 2, mma columns 128"),
        ("block: rows 32, tiles 2, narrower 1", "block: rows 32, tiles 2, narrower 1"),
        ("block: rows 8, columns 256, mma columns 128", "block: rows 8, mma columns 128, follows"),
        ("block: rows 16, tiles 2, mma columns 128", "block: rows 16, tiles 2, narrower 1, follows"),
        ("block: rows 8, tiles 2, columns 256, stages 2", "block: rows 8, tiles 2, columns 256, stages 2, follows"),
        ("block: rows 8, columns 256", "block: rows 8, columns 256, stages 2, follows"),
        ("block: rows 16, tiles 2", "block: rows 16, tiles 2, follows"),
    ],
    "lists": [
        ("block: rows 8, columns 256, mma columns 128", "block: rows 8, columns 256, mma columns 128"),
        (
            "block: rows 64, tiles 4, warps 8, narrower 3, delay 2, registers 128",
            "block: rows 64, tiles 4, warps 8, narrower 3, registers 128",
        ),
        ("block: rows 16, tiles 2, columns 256, mma columns 128", "block: rows 16, tiles 2, mma columns 128, follows"),
        (
            "block: rows 64, tiles 2, stages 2, narrower 3, registers 128",
            "block: rows 64, tiles 2, stages 2, narrower 3, registers 128, follows",
        ),
        (
            "block: rows 64, tiles 2, stages 2, narrower 1, registers 168, stretch 16",
            "block: rows 64, tiles 2, stages 2, narrower 1, registers 168, stretch 16, follows",
        ),
        (
            "ws: rows 64, tiles 4, warps 8, columns 256, stages 3, narrower 2",
            "ws: rows 32, tiles 4, stages 4, narrower 1, registers 128, ctas 2",
        ),
        (
            "ws: rows 128, tiles 4, warps 8, stages 4, narrower 1",
            "ws: rows 128, tiles 4, warps 8, stages 4, narrower 2",
        ),
        (
            "ws: rows 64, tiles 4, warps 8, stages 4, narrower 2, stretch 16",
            "ws: rows 32, tiles 4, warps 8, stages 4, narrower 1, stretch 16",
        ),
        ("ws: rows 128, tiles 4, warps 8, stages 4", "ws: rows 128, tiles 4, warps 8, stages 4"),
        (FOUR_QUARTERS, FOUR_QUARTERS),
        (FOUR_QUARTERS, FOUR_QUARTERS + ", follows"),
        (
            "ws: rows 64, tiles 4, warps 8, stages 4, narrower 2, stretch 16",
            "ws: rows 64, tiles 4, warps 8, stages 4, narrower 2, stretch 16, follows",
        ),
    ],
}


@pytest.mark.parametrize("mode", PLANS)
@pytest.mark.parametrize("scheme", ["int4_g128", "mxfp4", "int4_g32_zp"])
def test_every_kernel_and_mode(scheme, mode):
    from expertd_kernels.backends.gluon.weight_only.plan import LayerPlan, TilePlan

    case = Case(scheme)
    weights, experts = layer(case)
    for w13, w2 in PLANS[mode]:
        plan = LayerPlan(0, mode, TilePlan.parse(w13), TilePlan.parse(w2))
        for M, how in ((1, "even"), (5, "absent"), (37, "skewed"), (64, "one"), (300, "even"), (2, "one")):
            if mode == "ids" and M * case.top_k > 128:
                continue
            check(case, weights, experts, M, how, plan=plan)


@pytest.mark.parametrize(
    "tiles",
    [
        "wide: rows 128, tiles 4, columns 64, stages 4",
        "wide: rows 192, tiles 4, columns 64, stages 4",
        "block: rows 8, columns 64, stages 4",
        "block: rows 16, tiles 2, columns 64",
        "block: rows 32, mma columns 128, narrower 2",
    ],
)
@pytest.mark.parametrize(
    "case",
    [Case("bf16", bias=True), Case("bf16", "swigluoai", True, experts=9, top_k=3, hidden=1088, inner=320)],
    ids=str,
)
def test_every_kernel_for_bf16(case, tiles):
    from expertd_kernels.backends.gluon.weight_only.plan import LayerPlan, TilePlan

    weights, experts = layer(case)
    plan = LayerPlan(0, "lists", TilePlan.parse(tiles), TilePlan.parse(tiles))
    for M, how in ((1, "even"), (5, "absent"), (37, "skewed"), (64, "one"), (300, "even"), (700, "skewed")):
        check(case, weights, experts, M, how, plan=plan)
    check(case, weights, experts, 90, "even", plan=plan, router_weight_on_input=True)
    x, ids, w = routed(case, 33, "even")
    assert not experts(x, torch.full_like(ids, -1), w, plan=plan).any(), "all experts elsewhere"
    check(case, weights, experts, 33, "even", plan=plan)


@pytest.mark.parametrize(
    "case",
    [
        Case("bf16", "swigluoai", True, experts=9, top_k=3, hidden=1088, inner=320),
        Case("int8_g32_zp", "relu2", True, experts=60, top_k=6, hidden=1000, inner=200),
        Case("e4m3_block128", experts=512, top_k=10, hidden=2048, inner=512),
        Case("mxfp8", "swigluoai", True, experts=5, top_k=1),
    ],
    ids=str,
)
def test_each_route_by_itself(case):
    """Kernel gemv: parts of K, of a token's experts, or both; bias and router weight on either side."""
    from expertd_kernels.backends.gluon.weight_only.plan import LayerPlan, TilePlan

    weights, experts = layer(case)
    for w13, w2 in (
        ("tiles 1, warps 8", "tiles 1, warps 8"),
        ("tiles 4, warps 4", "tiles 1, warps 4"),
        ("tiles 2, warps 8", "tiles 2, warps 2"),
        ("tiles 4, warps 16, even", "tiles 1, warps 8, even"),
    ):
        plan = LayerPlan(0, "ids", *(TilePlan.parse(f"gemv: rows 1, {p}, columns 64, stages 4") for p in (w13, w2)))
        for M, how in ((1, "even"), (3, "absent"), (4, "one"), (2, "skewed")):
            check(case, weights, experts, M, how, plan=plan)
            check(case, weights, experts, M, how, plan=plan, router_weight_on_input=True)


@pytest.mark.parametrize("scheme", ["int8_channel", "e4m3_block128"])
def test_two_row_tiles_of_eight_bits(scheme):
    from expertd_kernels.backends.gluon.weight_only.plan import LayerPlan, TilePlan

    case = Case(scheme, bias=True, experts=9, top_k=3, hidden=1088, inner=320)
    weights, experts = layer(case)
    for mode, tiles in (
        ("table", "block: rows 8, tiles 2"),
        ("lists", "block: rows 64, tiles 2, stages 2, narrower 3, registers 168"),
    ):
        plan = LayerPlan(0, mode, TilePlan.parse(tiles), TilePlan.parse(tiles + ", follows"))
        for M, how in ((5, "absent"), (37, "skewed"), (64, "one"), (300, "even")):
            check(case, weights, experts, M, how, plan=plan)


@pytest.mark.parametrize(
    "scheme", ["int4_g32", "int4_g32_zp", "int8_g32", "int8_g32_zp", "mxfp4", "mxfp8", "int4_g128"]
)
@pytest.mark.parametrize(("hidden", "inner"), [(1000, 328), (2048, 768)])
def test_one_to_four_tokens_of_eight_experts(scheme, hidden, inner):
    """By the usual plans: w2's eight parts are the experts, all of whose columns are under way at once."""
    case = Case(scheme, "swigluoai", True, experts=128, top_k=8, hidden=hidden, inner=inner)
    weights, experts = layer(case)
    for M in (1, 2, 3, 4):
        check(case, weights, experts, M, "even")
        check(case, weights, experts, M, "absent")


@pytest.mark.parametrize("mode", ["ids", "table"])
def test_w2_split_over_its_columns(mode):
    from expertd_kernels.backends.gluon.weight_only.plan import LayerPlan, TilePlan

    case = Case("int4_g32", bias=True)
    weights, experts = layer(case)
    plan = LayerPlan(
        0,
        mode,
        TilePlan.parse("block: rows 8, columns 256, mma columns 128"),
        TilePlan.parse("block: rows 8, mma columns 128, parts 2"),
    )
    for M, how in ((1, "even"), (3, "absent"), (7, "even"), (5, "one")):
        check(case, weights, experts, M, how, plan=plan)
    with pytest.raises(ValueError, match="do not fit the scratch"):
        experts(*routed(case, 16, "even"), plan=plan)


@pytest.mark.parametrize(
    ("mode", "w13", "w2"),
    [
        ("table", "block: rows 8, columns 256, mma columns 128", "block: rows 8, mma columns 128, follows"),
        (
            "lists",
            "ws: rows 64, tiles 4, warps 8, stages 4, narrower 2, stretch 16",
            "ws: rows 128, tiles 4, warps 8, stages 4, narrower 1",
        ),
    ],
)
def test_a_call_that_fails_leaves_no_counters(mode, w13, w2, monkeypatch):
    from expertd_kernels.backends.gluon.weight_only import experts as module
    from expertd_kernels.backends.gluon.weight_only.plan import LayerPlan, TilePlan

    def broken(*args):
        raise RuntimeError("no such kernel")

    case = Case("int4_g128")
    weights, experts = layer(case)
    plan = LayerPlan(0, mode, TilePlan.parse(w13), TilePlan.parse(w2))
    with monkeypatch.context() as patch:
        patch.setattr(module, "add_up", broken)
        with pytest.raises(RuntimeError, match="no such kernel"):
            experts(*routed(case, 16, "even"), plan=plan)
    check(case, weights, experts, 16, "even", plan=plan)


@pytest.mark.parametrize("mode", ["ids", "table", "lists"])
def test_w2_following_w13_in_a_graph_of_many_layers(mode):
    """Calls in a row whose kernels overlap, on other inputs each: the same bits as with w2 waiting for all of w13."""
    from expertd_kernels.backends.gluon.weight_only.plan import LayerPlan, TilePlan

    case = Case("int4_g128", experts=32, top_k=4, hidden=2048, inner=768)
    _, experts = layer(case)
    w13, w2 = "block: rows 8, tiles 2", "block: rows 8, tiles 2, columns 256, stages 2"
    waits, follows = (LayerPlan(0, mode, TilePlan.parse(w13), TilePlan.parse(w2 + f)) for f in ("", ", follows"))
    sizes = (1, 4, 7) if mode == "ids" else (8, 33, 64, 8)
    sets = [routed(case, M, how) for M in sizes for how in ("even", "one", "absent")]
    right = [experts(*s, plan=waits).clone() for s in sets]
    outs = [torch.full_like(x, float("nan")) for x, _, _ in sets]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for s, out in zip(sets, outs, strict=True):
            experts(*s, out=out, plan=follows)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for s, out in zip(sets, outs, strict=True):
                experts(*s, out=out, plan=follows)
    for _ in range(20):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for out, want in zip(outs, right, strict=True):
            assert torch.equal(out, want)


@pytest.mark.parametrize(
    "tiles",
    [
        "ws: rows 64, tiles 4, warps 8, stages 4, narrower 2, stretch 16",
        "ws: rows 128, tiles 4, warps 8, stages 4, narrower 1",
        FOUR_QUARTERS,
    ],
)
@pytest.mark.parametrize("follows", ["", ", follows"])
def test_tiles_by_tickets_in_a_graph_of_many_layers(tiles, follows):
    """More tiles than CTAs, fewer, and none; each call's tickets begin at zero, whatever the one before drew."""
    from expertd_kernels.backends.gluon.weight_only.plan import LayerPlan, TilePlan

    case = Case("int4_g128", experts=32, top_k=4, hidden=2048, inner=768)
    weights, experts = layer(case)
    plan = LayerPlan(0, "lists", TilePlan.parse(tiles), TilePlan.parse(tiles + follows))
    sets = [routed(case, M, how) for M in (700, 2, 1500) for how in ("even", "one", "absent")]
    x, ids, w = sets[0]
    sets.insert(4, (x, torch.full_like(ids, -1), w))
    outs = [torch.full_like(x, float("nan")) for x, _, _ in sets]

    def layers(i):
        for s, out in zip(sets, outs, strict=True):
            experts(*s, out=out, plan=plan)

    layers(0)
    right = [out.clone() for out in outs]
    assert not right[4].any(), "all experts elsewhere"
    for s, want in zip(sets, right, strict=True):
        if (s[1] >= 0).any():
            assert relative_error(want, reference(weights, *s)) <= LIMIT
    replay = captured(layers, 1, x.device)
    for _ in range(10):
        for out in outs:
            out.fill_(float("nan"))
        replay(0)
        torch.cuda.synchronize()
        assert all(torch.equal(out, want) for out, want in zip(outs, right, strict=True))


def test_more_blocks_than_counters_wait_for_all_of_w13():
    from expertd_kernels.backends.gluon.weight_only.experts import COUNTERS
    from expertd_kernels.backends.gluon.weight_only.plan import LayerPlan, TilePlan

    case = Case("int4_g128", experts=512, top_k=10, hidden=256, inner=128)
    weights, experts = layer(case)
    plan = LayerPlan(
        0,
        "lists",
        TilePlan.parse("block: rows 8, mma columns 128"),
        TilePlan.parse("block: rows 8, mma columns 128, follows"),
    )
    assert experts._blocks(1500 * 10, 8) > COUNTERS >= experts._blocks(40 * 10, 8)
    for M in (40, 1500):
        check(case, weights, experts, M, "even", plan=plan)


def test_graph_replays_follow_new_inputs():
    case = Case("int4_g128", experts=32, top_k=4)
    weights, experts = layer(case)
    x, ids, w = routed(case, 48, "even")
    out = torch.empty_like(x)
    replay = captured(lambda i: experts(x, ids, w, out=out), 1, x.device)
    x2, ids2, w2 = routed(replace(case), 48, "skewed")
    x.copy_(x2), ids.copy_(ids2), w.copy_(w2), out.fill_(float("nan"))
    replay(0)
    torch.cuda.synchronize()
    assert relative_error(out, reference(weights, x, ids, w)) <= LIMIT


def test_large_batches_go_in_pieces():
    case = Case("int4_g128")
    weights, experts = layer(case)
    experts.most_tokens = 256
    check(case, weights, experts, 1000, "even")


def test_no_tokens_give_no_rows():
    case = Case("int4_g128")
    _, experts = layer(case)
    x, ids, w = (t[:0] for t in routed(case, 4, "even"))
    assert experts(x, ids, w).shape == (0, case.hidden)


def test_inputs_of_another_shape_are_refused():
    case = Case("int4_g128")
    _, experts = layer(case)
    x, ids, w = routed(case, 4, "even")
    with pytest.raises(ValueError, match=r"want bf16 \[M, 1024\]"):
        experts(x[:, :512], ids, w)
