"""Backend gluon_w8a8 on a Hopper GPU, against the float32 reference: schemes and roundings of its row of the table,
features, ragged sizes, skewed routing, poisoned outputs, repeatability, batches, CUDA graphs."""

from dataclasses import dataclass, replace

import pytest
import torch
import triton
from poisoned import counters_are_zero, poison_scratch

from expertd_kernels import Activation, decide, detect_device, reference, relative_error
from expertd_kernels.backends.gluon.w8a8.plan import Few8, Plan8
from expertd_kernels.backends.gluon.w8a8.prepare import round_to_places
from expertd_kernels.common.protocol import takes_e4m3
from expertd_kernels.measure.timing import captured
from expertd_kernels.oracle.decision import NoBackendError
from expertd_kernels.oracle.probe import installed_packages
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.packed.builder import build, problem_of
from expertd_kernels.sources.synthetic import random_inputs, random_weights
from expertd_kernels.weights.numerics import tolerance
from expertd_kernels.weights.scheme import ActivationQuant

pytestmark = pytest.mark.gpu
ROW = next(b for b in BACKENDS if b.name == "gluon_w8a8")


@dataclass(frozen=True)
class Case:
    """A layer.  H = 1152 and I = 384: the last column tile of w2 is half empty."""

    scheme: str = "e4m3_block128"
    rounding: ActivationQuant = ActivationQuant.E4M3_GROUP128
    activation: str = "silu_and_mul"
    bias: bool = False
    experts: int = 8
    top_k: int = 2
    hidden: int = 1152
    inner: int = 384

    def __str__(self) -> str:
        return f"{self.scheme}-{self.rounding.value}-{self.activation}-E{self.experts}" + ("-bias" * self.bias)


CASES = [
    Case(),
    Case("e4m3_channel", ActivationQuant.E4M3_TOKEN),
    Case("e4m3_tensor", ActivationQuant.E4M3_TOKEN, bias=True),
    Case("e4m3_tensor", ActivationQuant.E4M3_TENSOR),
    Case(activation="swigluoai", bias=True, experts=60, top_k=6),
    Case(activation="gelu_tanh_and_mul", experts=1, top_k=1),
    Case(activation="silu_and_mul_limit1.5", experts=512, top_k=10, hidden=256, inner=128),
]


def layer(case: Case, **more):
    """(weights on the GPU, experts); skipped with the oracle's sentence where the row does not apply."""
    device = detect_device("auto")
    if all(refused := [r.refusal(device) for r in ROW.devices]):
        pytest.skip("; ".join(map(str, refused)))  # drawing the weights takes half a minute of all these cases
    weights = random_weights(
        case.scheme,
        case.experts,
        case.hidden,
        case.inner,
        activation=Activation.parse(case.activation),
        bias=case.bias,
        signed_scales=True,
        device="cuda" if device.kind == "cuda" else "cpu",
    )
    if case.rounding is ActivationQuant.E4M3_TENSOR:
        given = torch.full((case.experts, 2), 0.04, device=weights.device)
        weights = replace(weights, input_scales=given)
    packages = installed_packages(BACKENDS)
    problem = problem_of(
        weights, device, top_k=case.top_k, packages=packages, activation_quant=case.rounding, deterministic=True, **more
    )
    try:
        decision = decide(problem, pin="gluon_w8a8")
        decision.require()
    except NoBackendError:
        pytest.skip("; ".join(next(v for v in decision.verdicts if v.backend == "gluon_w8a8").refusals))
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
    elif how == "nowhere":
        ids = torch.full_like(ids, -1)
    if case.top_k == 1:  # not all the same: a softmax over one expert is 1
        w = w * (0.5 + torch.arange(M, device="cuda")[:, None] % 4 / 4)
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
    assert counters_are_zero()
    if how == "nowhere":
        assert not bool(outs[0].any())
        return
    error = relative_error(outs[0], reference(weights, x, ids, w, router_weight_on_input=on_input))
    assert error <= tolerance("bf16", case.rounding), f"M = {M}, {how}, {more}: relative error {error:.2e}"
    assert torch.equal(outs[0], outs[1]), f"M = {M}, {how}: two runs differ"


SIZES = (
    (1, "even"),
    (1, "nowhere"),
    (3, "one"),
    (7, "even"),
    (30, "nowhere"),
    (33, "skewed"),
    (64, "absent"),
    (200, "one"),
    (900, "nowhere"),
    (1000, "even"),
    (4096, "skewed"),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_over_ragged_sizes_and_routings(case):
    weights, experts = layer(case)
    for M, how in SIZES:
        check(case, weights, experts, M, how)


FEW = [
    # plans of the kernel for few tokens that sizes alone would not pick for these small layers
    (Few8(8, 16), Few8(8, 16)),
    (Few8(8, 8, 2), Few8(8, 8, 4, 2)),
    (Few8(16, 32), Few8(8, 32)),
]


@pytest.mark.parametrize("few", FEW, ids=["16", "parts", "32"])
@pytest.mark.parametrize("case", [Case(inner=512), Case(inner=512, experts=40, top_k=6, bias=True), CASES[1]], ids=str)
def test_the_kernel_for_few_tokens(case, few):
    case = replace(case, inner=512)
    weights, experts = layer(case)
    for M, how in ((1, "even"), (5, "absent"), (33, "skewed"), (100, "one"), (128, "even")):
        check(case, weights, experts, M, how, plan=Plan8(few=few))


@pytest.mark.parametrize("listed", [False, True], ids=["gathered", "listed"])
@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[4]], ids=str)
def test_short_blocks_which_both_warpgroups_compute(case, listed):
    weights, experts = layer(case)
    for M, how in ((1, "even"), (32, "one"), (33, "one"), (60, "absent"), (130, "skewed"), (700, "even")):
        check(case, weights, experts, M, how, plan=Plan8(listed=listed))


def rounded(x):
    """Codes and scales of x by the rule of the row, as `collect` makes them."""
    M, H = x.shape
    places = torch.arange(M, dtype=torch.int32, device="cuda")
    codes = torch.empty(M, H, dtype=torch.float8_e4m3fn, device="cuda")
    scales = torch.full((M, H // 128), float("nan"), device="cuda")
    width = min(1024, triton.next_power_of_2(H))
    round_to_places[(M * -(-H // width),)](x, places, codes, scales, M, 1, H, True, False, 1, width, False)
    return codes, scales


@pytest.mark.parametrize("invariant", [False, True], ids=["", "batch-invariant"])
@pytest.mark.parametrize("on_input", [False, True], ids=["", "on-input"])
def test_inputs_that_are_e4m3_already_have_the_bits_of_those_that_it_rounds(invariant, on_input):
    """Eager and from a graph, over poisoned memory, at sizes of every kernel; then scales of another kind: powers of
    two, of which a second rounding would lose."""
    case = Case(inner=512)
    weights, experts = layer(case, batch_invariant=invariant)
    assert takes_e4m3(experts)
    for M in (1, 3, 33, 200, 1000, 4096):
        x, ids, w = routed(case, M, "absent" if M > 1 else "even")
        wanted = experts(x, ids, w, router_weight_on_input=on_input)
        codes, scales = rounded(x)
        out = torch.full_like(x, float("nan"))
        poison_scratch()
        assert experts.of_e4m3(codes, scales, ids, w, router_weight_on_input=on_input, out=out) is out
        assert torch.equal(out, wanted), M
        replay = captured(
            lambda _, q=(codes, scales, ids, w), out=out: experts.of_e4m3(*q, router_weight_on_input=on_input, out=out),
            1,
            x.device,
        )
        out.fill_(float("nan"))
        torch.cuda.synchronize()
        replay(0)
        torch.cuda.synchronize()
        assert torch.equal(out, wanted), M
        assert counters_are_zero()

        powers = torch.exp2(torch.ceil(torch.log2(scales)))
        codes = (x.float().view(M, -1, 128) / powers[:, :, None]).to(torch.float8_e4m3fn)
        meant = (codes.float() * powers[:, :, None]).view(x.shape).bfloat16()
        experts.of_e4m3(codes.view(x.shape), powers, ids, w, router_weight_on_input=on_input, out=out)
        rows = torch.arange(0, M, -(-M // 100), device="cuda")
        right = reference(weights, meant[rows], ids[rows], w[rows], router_weight_on_input=on_input)
        twice = experts(meant, ids, w, router_weight_on_input=on_input)
        assert relative_error(out[rows], right) < 0.9 * relative_error(twice[rows], right)


def test_the_router_weight_on_the_input():
    case = Case(top_k=1, inner=512)
    weights, experts = layer(case)
    for M in (5, 40, 700):
        check(case, weights, experts, M, "absent", router_weight_on_input=True)


def test_another_number_of_experts_a_token_has_a_layout_of_its_own():
    case = Case(top_k=4, inner=512)
    weights, experts = layer(case)
    for M, top_k in ((16, 4), (32, 2), (64, 1)):  # as many routes
        check(replace(case, top_k=top_k), weights, experts, M, "even")


def test_a_token_has_the_same_bits_in_every_batch():
    case = Case(inner=512)
    _, experts = layer(case, batch_invariant=True)
    x, ids, w = routed(case, 1500, "even")
    whole = experts(x, ids, w)
    for part in (slice(0, 1), slice(100, 140), slice(1000, 1400)):
        assert torch.equal(experts(x[part], ids[part], w[part]), whole[part])


def test_pieces_and_a_cuda_graph():
    case = Case()
    weights, experts = layer(case)
    x, ids, w = routed(case, 600, "even")
    whole = experts(x, ids, w)
    experts.most_tokens = 256
    assert torch.equal(experts(x, ids, w), whole)
    out = torch.empty_like(x)
    replay = captured(lambda i: experts(x, ids, w, out=out), 1, x.device)
    x.copy_(torch.randn_like(x))
    out.fill_(float("nan"))
    replay(0)
    torch.cuda.synchronize()
    assert relative_error(out, reference(weights, x, ids, w)) <= tolerance("bf16", case.rounding)
