"""The row `flashinfer_trtllm`: whole layers through stand-ins for the package's entry points, which read the weights
with its own helpers, and how rows are rounded for them."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import trtllm_checks as checks
from trtllm_cases import FORMS, NAME, STATIC, EntryPoints, e2m1, layer, package_helpers, problem, refusals, rounded
from vendor import bits, functions, package_folder

from expertd_kernels import Activation, ActivationQuant, decide
from expertd_kernels.backends import flashinfer_trtllm as backend
from expertd_kernels.backends.rounding import round_groups, round_mx, round_nvfp4
from expertd_kernels.checkpoint import open_checkpoint
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.sources.synthetic import random_inputs
from expertd_kernels.weights.canonical import QuantTensor, Weights
from expertd_kernels.weights.float32 import reference
from expertd_kernels.weights.numerics import relative_error, tolerance
from expertd_kernels.weights.scheme import ScaleType, Scheme

ACTIVATIONS = [Activation(), Activation(limit=0.5), Activation.parse("swigluoai")]


@pytest.fixture(scope="module")
def helpers():
    return package_helpers()


@pytest.mark.parametrize(
    ("scheme", "activation"),
    [(s, a) for s in FORMS for a in ACTIVATIONS if s not in STATIC or a == Activation()],
    ids=lambda x: x if isinstance(x, str) else x.name,
)
def test_a_layer_through_the_entry_points(helpers, scheme, activation):
    w = layer(scheme, activation=activation, seed=5)
    p = problem(w)
    assert refusals(w) == ()
    first = w.input_scales[:, 0].max() if scheme in STATIC else None
    run = backend.TrtllmExperts(backend.pack(w, p), EntryPoints(helpers), torch.device("cpu"))
    x, ids, weights = random_inputs(6, 256, 3, 2)
    ids[2], ids[3, 0] = -1, -1
    out = torch.full_like(x, float("nan"))
    assert run(x, ids, weights, out=out) is out
    assert relative_error(out, reference(w, rounded(x, p.activation_quant, first), ids, weights)) < 1e-2
    if activation.limit is None:
        assert relative_error(out, reference(w, x, ids, weights)) < tolerance("bf16", p.activation_quant)
    assert not out[2].any()


@pytest.mark.parametrize("E", [8, 60, 128, 256])
@pytest.mark.parametrize("scheme", FORMS)
def test_common_numbers_of_experts(helpers, scheme, E):
    """The package wants a multiple of 4 for some forms: one expert more than ours is none."""
    w = layer(scheme, 128, 128, E, seed=7)
    p = problem(w)
    assert refusals(w) == ()
    run = backend.TrtllmExperts(backend.pack(w, p), EntryPoints(helpers), torch.device("cpu"))
    x, ids, weights = random_inputs(3, 128, E, 8)
    ids[1, 2], ids[2, 0] = -1, E - 1
    first = w.input_scales[:, 0].max() if scheme in STATIC else None
    want = reference(w, rounded(x, p.activation_quant, first), ids, weights)
    assert relative_error(run(x, ids, weights), want) < 1e-2


def test_the_stand_in_refuses_what_the_package_refuses(helpers):
    """One expert more than ours, as this row told the package until now."""
    w = layer("mxfp8", 128, 128, 8, seed=7)
    run = backend.TrtllmExperts(backend.pack(w, problem(w)), EntryPoints(helpers), torch.device("cpu"))
    run.sizes["num_experts"] = 9
    with pytest.raises(checks.RefusedError, match="divisible by 4"):
        run(*random_inputs(3, 128, 8, 2))


def test_mxfp4_on_rounded_activations(helpers):
    w = layer("mxfp4", activation=Activation.parse("swigluoai"), seed=6)
    p = problem(w, activation_quant=ActivationQuant.MXFP8)
    assert next(v for v in decide(p).verdicts if v.backend == NAME).eligible
    run = backend.TrtllmExperts(backend.pack(w, p), EntryPoints(helpers), torch.device("cpu"))
    x, ids, weights = random_inputs(6, 256, 3, 2)
    error = relative_error(run(x, ids, weights), reference(w, x, ids, weights))
    assert 5e-3 < error < tolerance("bf16", ActivationQuant.MXFP8), "the activations are rounded, and not too much"


def test_rounding_to_mxfp8():
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    x[1], x[2, :32] = 0, 0
    x[3, 0] = 448 * 4.0
    codes, exponents = round_mx(x)
    assert exponents.dtype == torch.uint8
    back = codes.float() * torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    assert relative_error(back, x.float()) < 4e-2
    assert float(back[3, 0]) == 448 * 4.0
    assert int(exponents[3, 0]) == 127 + 2, "448 itself needs no larger scale"
    assert not back[1].any()


def test_padding_and_the_router_weight_on_the_input(helpers):
    w = layer("mxfp4", 192, 160, activation=Activation.parse("swigluoai"))
    run = backend.TrtllmExperts(backend.pack(w, problem(w)), EntryPoints(helpers), torch.device("cpu"))
    x, ids, weights = random_inputs(5, 192, 3, 1)
    weights = weights * 0.5
    want = reference(w, x, ids, weights, router_weight_on_input=True)
    assert relative_error(run(x, ids, weights, router_weight_on_input=True), want) < 1e-2
    assert run(x[:0], ids[:0], weights[:0]).shape == (0, 192)


def test_rounding_in_groups():
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    x[1] = 0
    codes, scale = round_groups(x)
    assert codes.dtype == torch.float8_e4m3fn
    assert scale.shape == (5, 2)
    back = codes.float().view(5, 2, 128) * scale[..., None]
    assert relative_error(back.view(5, 256), x.float()) < 4e-2
    assert float(codes.float().abs().max()) == 448.0
    assert not back[1].any()


def test_rounding_to_nvfp4():
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    x[1], x[2, :16], x[3, 0] = 0, 0, 1000.0
    second = torch.tensor(0.005)
    codes, scale = round_nvfp4(x, second)
    assert codes.shape == (5, 32)
    assert scale.shape == (5, 4)
    assert scale.dtype == torch.float8_e4m3fn
    back = e2m1(codes) * scale.float().repeat_interleave(16, 1) * second
    assert relative_error(back[[0, 1, 2, 4]], x[[0, 1, 2, 4]].float()) < 0.12
    assert not back[1].any()
    assert not back[2, :16].any()
    assert float(back[3, 0]) == pytest.approx(448 * 6 * 0.005), "beyond the static scale it saturates"


def test_factors_are_those_of_the_packages_own_preparation(helpers):
    """Weights that its function rounded, given to ours as codes and scales, come out as its tensors and factors."""
    prepare = functions(
        package_folder("flashinfer") / "fused_moe" / "prepare.py",
        {"_fp8_per_tensor_scale", "_quantize_fp8_per_expert", "prepare_trtllm_fp8_per_tensor_weights"},
        ModuleType("expertd_stand_in.prepare"),
    )  # fmt: skip
    package, core, api = (ModuleType(f"expertd_stand_in{n}") for n in ("", ".core", ".api"))
    core.__dict__.update({n: getattr(helpers, n) for n in (
        "_maybe_get_cached_w3_w1_permute_indices", "get_w2_permute_indices_with_cache")})  # fmt: skip
    api.SwiGLUStep = type("SwiGLUStep", (), {})
    prepare.__package__ = package.__name__
    prepare._TRTLLM_FP8_PER_TENSOR_PERMUTE_CACHE = {}
    prepare._normalize_activation = lambda activation: SimpleNamespace(is_gated=True)
    prepare._gemm1_rows = lambda intermediate, activation: 2 * intermediate
    E, H, I = 3, 256, 128
    g = torch.Generator().manual_seed(8)
    up_gate_rows, down = (torch.randn(s, generator=g).bfloat16() / 16 for s in ((E, 2 * I, H), (E, H, I)))
    with pytest.MonkeyPatch.context() as patch:
        for module in (package, core, api):
            patch.setitem(sys.modules, module.__name__, module)
        theirs = prepare.prepare_trtllm_fp8_per_tensor_weights(
            up_gate_rows, down, hidden_states_scale_global=1 / 0.01, intermediate_scale_global=1 / 0.02,
            num_local_experts=E, hidden_size=H, intermediate_size=I,
        )  # fmt: skip
    (q13, m13), (q2, m2) = (prepare._quantize_fp8_per_expert(t) for t in (up_gate_rows, down))
    scheme = Scheme.parse("e4m3_tensor")
    gate_up = torch.cat(q13.view(torch.uint8).chunk(2, 1)[::-1], 1).contiguous().view(torch.float8_e4m3fn)
    w = Weights(
        QuantTensor(scheme, (E, 2 * I, H), gate_up, (1 / m13)[:, None, None].expand(E, 2, 1).contiguous(), segments=2),
        QuantTensor(scheme, (E, H, I), q2, (1 / m2)[:, None, None].contiguous()),
        input_scales=torch.tensor([[0.01, 0.02]]).expand(E, 2).contiguous(),
    )
    run = backend.TrtllmExperts(backend.pack(w, problem(w)), EntryPoints(helpers), torch.device("cpu"))
    for name in ("gemm1_weights", "gemm2_weights"):
        assert torch.equal(run.matrices[name].view(torch.uint8), theirs[name].view(torch.uint8))
    assert set(run.scalars) == {n for n in theirs if n.startswith("output")}
    for name, factor in run.scalars.items():
        torch.testing.assert_close(factor, theirs[name], rtol=1e-6, atol=0)


def test_exponents_as_scales_of_blocks_are_read_as_numbers(helpers, checkpoint_folder):
    w = open_checkpoint(checkpoint_folder("hf-fp8-dsstyle-ue8m0-qwen3moe1l")).load(0)
    assert w.w13.scheme.scale is ScaleType.E8M0
    p = problem(w, activation_quant=w.checkpoint_activation)
    assert next(v for v in decide(p).verdicts if v.backend == NAME).eligible
    packed = backend.pack(w, p)
    assert bits(backend.unpack(packed)) == bits(w)
    run = backend.TrtllmExperts(packed, EntryPoints(helpers), torch.device("cpu"))
    x, ids, weights = random_inputs(6, w.hidden_size, w.num_experts, 2)
    want = reference(w, rounded(x, w.checkpoint_activation), ids, weights)
    assert relative_error(run(x, ids, weights), want) < 1e-2


@pytest.mark.parametrize("name", ["ct-fp8-static-tensor-qwen3moe1l", "modelopt-nvfp4-qwen3moe1l"])
def test_checkpoints_with_static_scales(helpers, checkpoint_folder, name):
    """Other people's calibration: scales of the gate's and the up projection's own, input scales of each expert."""
    w = open_checkpoint(checkpoint_folder(name)).load(0)
    p = problem(w, activation_quant=w.checkpoint_activation)
    assert next(v for v in decide(p).verdicts if v.backend == NAME).eligible
    packed = backend.pack(w, p)
    assert bits(backend.unpack(packed)) == bits(w)
    run = backend.TrtllmExperts(packed, EntryPoints(helpers), torch.device("cpu"))
    x, ids, weights = random_inputs(6, w.hidden_size, w.num_experts, 2)
    want = reference(w, rounded(x, w.checkpoint_activation, w.input_scales[:, 0].max()), ids, weights)
    assert relative_error(run(x, ids, weights), want) < 1e-2
    assert relative_error(want, reference(w, x, ids, weights)) < tolerance("bf16", w.checkpoint_activation)


def test_the_row_says_that_it_was_not_run_on_hardware():
    assert next(b for b in BACKENDS if b.name == NAME).hardware == "not run on hardware"
