"""The row `flashinfer_trtllm`: layouts there and back, against the package's own layout helpers, and whole layers
through stand-ins for its entry points that read the weights with those helpers."""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from vendor import bits, functions, package_folder

from expertd_kernels import NAMED_DEVICES, Activation, ActivationKind, ActivationQuant, decide, problem_of
from expertd_kernels.backends import flashinfer_trtllm as backend
from expertd_kernels.backends.rounding import round_groups, round_mx, round_nvfp4, round_static
from expertd_kernels.backends.trtllm_layout import MULTIPLES, swizzle
from expertd_kernels.canonical import QuantTensor, Weights
from expertd_kernels.checkpoint import open_checkpoint
from expertd_kernels.float32 import reference
from expertd_kernels.numerics import relative_error, tolerance
from expertd_kernels.oracle import Refused
from expertd_kernels.probe import assumed_packages
from expertd_kernels.scheme import ScaleType, Scheme
from expertd_kernels.synthetic import random_inputs, random_weights
from expertd_kernels.table import BACKENDS

SM100 = NAMED_DEVICES["sm100"]
NAME = "flashinfer_trtllm"
FORMS = {"bf16": "bf16", "int4_g32": "int4", "mxfp4": "mxfp4", "mxfp8": "mxfp8", "e4m3_block128": "block",
         "nvfp4": "nvfp4", "e4m3_tensor": "tensor"}  # fmt: skip
ROUNDED = {"e4m3_block128": ActivationQuant.E4M3_GROUP128, "mxfp8": ActivationQuant.MXFP8,
           "nvfp4": ActivationQuant.NVFP4, "e4m3_tensor": ActivationQuant.E4M3_TENSOR}  # fmt: skip
STATIC = ("nvfp4", "e4m3_tensor")
SIZES = [(256, 256), (384, 128)]


def layer(scheme, H=256, I=128, E=3, **kw):
    w = random_weights(scheme, E, H, I, bias=kw.pop("bias", scheme == "mxfp4"), **kw)
    if scheme not in STATIC:
        return w
    steps = torch.tensor([[0.008, 0.011], [0.01, 0.007], [0.009, 0.009]])[:E]
    return replace(w, input_scales=steps / 6 if scheme == "nvfp4" else steps)


def problem(w, **kw):
    rounding = ROUNDED.get(w.w13.scheme.name, ActivationQuant.NONE)
    return problem_of(
        w, SM100, top_k=2, packages=dict(assumed_packages(BACKENDS)), **{"activation_quant": rounding, **kw}
    )


def refusals(w, **kw):
    return next(v for v in decide(problem(w, **kw)).verdicts if v.backend == NAME).refusals


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", FORMS)
def test_unpacking_gives_back_every_bit(scheme, size):
    w = layer(scheme, *size)
    assert refusals(w) == ()
    before = bits(w)
    packed = backend.pack(w, problem(w))
    assert bits(backend.unpack(packed)) == before == bits(w)
    twice = backend.pack(backend.unpack(packed), problem(w))
    for name, t in packed.tensors.items():
        assert t.is_contiguous()
        assert torch.equal(t.reshape(-1).view(torch.uint8), twice.tensors[name].reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("scheme", ["bf16", "int4_g32", "mxfp4", "mxfp8", "nvfp4", "e4m3_tensor"])
def test_odd_sizes_are_padded_and_come_back(scheme):
    w = layer(scheme, 2 * 96, 160)
    packed = backend.pack(w, problem(w))
    multiple = MULTIPLES[FORMS[scheme]]
    assert packed.meta["w13"]["cols"] % multiple == packed.meta["w13"]["rows"] % multiple == 0
    assert packed.meta["w13"]["shape"] == [3, 320, 192]
    assert bits(backend.unpack(packed)) == bits(w)


def test_scales_that_bf16_does_not_hold_are_kept():
    w = layer(Scheme.parse("int4_g32", ScaleType.F32))
    packed = backend.pack(w, problem(w))
    assert packed.tensors["w13.scales"].dtype == torch.bfloat16
    assert bits(backend.unpack(packed)) == bits(w)


REFUSED = {
    "SM90": (lambda: decide(problem_of(layer("bf16"), NAMED_DEVICES["sm90"])), "needs compute capability 10.0 to 10.9"),
    "bias": (lambda: decide(problem(layer("bf16", bias=True))), "does not add expert biases"),
    "zero points": (lambda: decide(problem(layer("int4_g32_zp"))), "zero points are not computed"),
    "group": (lambda: decide(problem(layer("int4_g128"))), "group size 128 (has: 32)"),
    "weight-only e4m3": (
        lambda: decide(problem(layer("e4m3_block128"), activation_quant=ActivationQuant.NONE)),
        "rounds activations (e4m3_group128); weight-only is asked",
    ),
    "weight-only nvfp4": (
        lambda: decide(problem(layer("nvfp4"), activation_quant=ActivationQuant.NONE)),
        "rounds activations (nvfp4); weight-only is asked",
    ),
    "clamped nvfp4": (
        lambda: decide(problem(layer("nvfp4", activation=Activation(limit=3.0)))),
        "does not clamp before the activation with nvfp4 weights",
    ),
    "swigluoai with static scales": (
        lambda: decide(problem(layer("e4m3_tensor", activation=Activation.parse("swigluoai")))),
        "does not compute swigluoai with e4m3_tensor weights",
    ),
    "bias of nvfp4": (lambda: decide(problem(layer("nvfp4", bias=True))), "does not add expert biases"),
    "gelu": (
        lambda: decide(problem(layer("bf16", activation=Activation(ActivationKind.GELU_AND_MUL)))),
        "does not compute gelu_and_mul",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_package_cannot_do_is_refused_before_packing(case):
    ask, sentence = REFUSED[case]
    found = next(v for v in ask().verdicts if v.backend == NAME).refusals
    assert any(sentence in r for r in found), found


def test_packing_refuses_by_itself_too():
    w = layer("bf16", bias=True)
    with pytest.raises(Refused, match="adds no biases"):
        backend.pack(w, problem(w))
    w = layer("mxfp4")
    with pytest.raises(Refused, match="not computed with activations nvfp4"):
        backend.pack(w, replace(problem(w), activation_quant=ActivationQuant.NVFP4))
    packed = backend.pack(w, problem(w))
    with pytest.raises(Refused, match="layout version 0, want 1"):
        backend.experts(replace(packed, meta={**packed.meta, "layout_version": 0}), problem(w))


@pytest.mark.parametrize("scheme", STATIC)
def test_without_static_input_scales_there_is_nothing_to_round_with(scheme):
    w = replace(layer(scheme), input_scales=None)
    with pytest.raises(Refused, match="the checkpoint has no static input scales"):
        backend.pack(w, problem(w))


def test_scales_that_the_kernel_would_read_without_their_sign_are_refused():
    w = layer("nvfp4", signed_scales=True)
    with pytest.raises(Refused, match="negative scales of nvfp4"):
        backend.pack(w, problem(w))


def test_a_second_level_scale_that_divides_comes_back_exactly():
    w = layer("nvfp4")
    exact = w.w2.global_scales.double() * (1 + 2**-30)
    w = replace(w, w2=replace(w.w2, global_exact=exact))
    assert bits(backend.unpack(backend.pack(w, problem(w)))) == bits(w)


@pytest.fixture(scope="module")
def helpers():
    """The package's own layout functions, from its sources."""
    folder = package_folder("flashinfer")
    utils = functions(
        folder / "utils.py",
        {
            "srcToDstBlk16RowMap",
            "srcToDstBlk32RowMap",
            "get_shuffle_block_size",
            "get_shuffle_matrix_a_row_indices",
            "get_shuffle_matrix_sf_a_row_indices",
        },
        ModuleType("utils"),
    )
    names = {
        "_maybe_get_cached_w3_w1_permute_indices",
        "get_w2_permute_indices_with_cache",
        "get_reorder_rows_for_gated_act_gemm_row_indices",
        "convert_to_block_layout",
    }
    core = functions(folder / "fused_moe" / "core.py", names, utils)
    return functions(folder / "fused_moe" / "prepare.py", {"_swizzle_cutile_fp4_scales"}, core)


def vendor_rows(helpers, t, w13, scales=False):
    """One expert's [N, bytes] in the package's order, from [up, gate] rows."""
    more = {"num_elts_per_sf": 16} if scales else {}
    if w13:
        order = helpers._maybe_get_cached_w3_w1_permute_indices({}, t, 128, is_gated_act_gemm=True, **more)
    else:
        order = helpers.get_w2_permute_indices_with_cache({}, t, 128, **more)
    return t[order].contiguous()


def up_gate(t, w13):
    return torch.cat(t.chunk(2)[::-1]) if w13 else t


@pytest.mark.parametrize("scheme", ["bf16", "int4_g32", "mxfp4", "mxfp8", "nvfp4", "e4m3_tensor"])
def test_codes_and_scales_are_where_the_packages_helpers_put_them(helpers, scheme):
    w = layer(scheme, 512, 256)
    packed = backend.pack(w, problem(w))
    for name, q in (("w13", w.w13), ("w2", w.w2)):
        w13 = name == "w13"
        for e in range(3):
            codes = up_gate(q.codes[e].view(torch.uint8), w13)
            codes = vendor_rows(helpers, codes ^ 0x88 if scheme == "int4_g32" else codes, w13)
            if scheme in ("bf16", "int4_g32"):
                codes = helpers.convert_to_block_layout(codes, 128)
            assert torch.equal(packed.tensors[f"{name}.codes"][e].view(torch.uint8), codes)
            if q.scales is None or scheme == "e4m3_tensor":
                continue
            scales = q.scales[e].view(torch.uint8) if scheme == "nvfp4" else q.scales[e]
            scales = vendor_rows(helpers, up_gate(scales, w13), w13, scales=True)
            tiled = helpers._swizzle_cutile_fp4_scales(scales[None], scale_block_size=16 if scheme == "nvfp4" else 32)
            assert torch.equal(packed.tensors[f"{name}.scales"][e].flatten(), tiled.flatten())
            if q.bias is not None:
                bias = vendor_rows(helpers, up_gate(q.bias[e][:, None], w13), w13)
                assert torch.equal(packed.tensors[f"{name}.bias"][e], bias[:, 0])


def test_the_swizzle_is_the_documented_one():
    s = torch.arange(2 * 256 * 8).view(2, 256, 8)
    flat = swizzle(s).view(2, -1)
    for r, c in ((0, 0), (1, 0), (31, 3), (32, 0), (127, 2), (128, 5), (200, 7)):
        tile = (r // 128) * 2 + c // 4
        place = tile * 512 + 16 * (r % 32) + 4 * (r % 128 // 32) + c % 4
        assert flat[1, place] == s[1, r, c]


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def e2m1(codes):
    """[M, K / 2] u8 -> [M, K] f32."""
    return E2M1[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()]


class EntryPoints:
    """Stand-ins for the package's functions: they undo its layout with its helpers and compute in f32."""

    def __init__(self, helpers):
        self.helpers = helpers

    def _matrix(self, codes, scales, form, w13):
        """[E, N, K] f32 in [up, gate] order."""
        t = codes.view(torch.uint8)
        t = t.permute(0, 2, 1, 3).flatten(2) if form in ("bf16", "int4") else t
        out = []
        for e in range(len(t)):
            N = t.shape[1]
            order = torch.arange(N)[:, None]
            order = order if form == "block" else vendor_rows(self.helpers, order, w13)
            natural = torch.empty_like(t[e])
            natural[order[:, 0]] = t[e]
            if form == "bf16":
                out.append(natural.view(torch.bfloat16).float())
                continue
            if form == "block":
                big = scales[e].repeat_interleave(128, 0).repeat_interleave(128, 1)
                out.append(natural.view(torch.float8_e4m3fn).float() * big)
                continue
            if form == "tensor":
                out.append(natural.view(torch.float8_e4m3fn).float())
                continue
            n = torch.stack((natural & 15, natural >> 4), -1).flatten(-2).long()
            values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
            number = torch.where(n >= 8, n - 16, n).float() if form == "int4" else values[n]
            number = natural.view(torch.float8_e4m3fn).float() if form == "mxfp8" else number
            group = 16 if form == "nvfp4" else 32
            sf, S = scales[e], number.shape[1] // group
            sf = sf.view(torch.uint8) if form in ("mxfp4", "mxfp8") else sf
            sf = sf.reshape(N // 128, S // 4, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(N, S)
            sf = torch.exp2(sf.float() - 127) if form in ("mxfp4", "mxfp8") else sf.float()
            placed = torch.empty_like(sf)
            placed[order[:, 0]] = sf
            out.append(number * placed.repeat_interleave(group, 1))
        return torch.stack(out)

    def _run(self, form, x, ids, weights, k):
        E = k["local_num_experts"]
        assert k["num_experts"] > E
        assert k["local_expert_offset"] == 0
        assert int(ids.min()) >= 0
        assert int(ids.max()) < k["num_experts"]
        w13 = self._matrix(k["gemm1_weights"], k.get("gemm1_weights_scale"), form, True)
        w2 = self._matrix(k["gemm2_weights"], k.get("gemm2_weights_scale"), form, False)
        assert w2.shape[2] == k["intermediate_size"]
        out = torch.zeros(x.shape[0], w2.shape[1])
        scalars = [k.get(f"output{i}") for i in ("1_gate", "1", "2")]
        for row, j in (ids < E).nonzero().tolist():
            e = int(ids[row, j])
            h = w13[e] @ x[row].float()
            if k.get("gemm1_bias") is not None:
                h = h + self._bias(k["gemm1_bias"][e], True)
            up, gate = h.chunk(2)
            if scalars[0] is not None:  # to the steps of the second input scale and back
                out[row] += weights[row, j].float() * self._static(e, up, gate, w2[e], scalars)
                continue
            alpha, beta, limit = (k[n] for n in ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit"))
            if limit is not None:
                up, gate = up.clamp(-limit[e], limit[e]), gate.clamp(max=limit[e])
            a, b = (1.0 if alpha is None else alpha[e]), (0.0 if beta is None else beta[e])
            y = w2[e] @ (gate * torch.sigmoid(a * gate) * (up + b))
            if k.get("gemm2_bias") is not None:
                y = y + self._bias(k["gemm2_bias"][e], False)
            out[row] += weights[row, j].float() * y
        return out.to(torch.bfloat16)

    def _static(self, e, up, gate, w2, scalars):
        """The contract of the package's scalars: the gate's makes it a number, the up's also steps of w2's input."""
        gate_scalar, up_scalar, down_scalar = (float(s[e]) for s in scalars)
        gate = gate * gate_scalar
        return (w2 @ (gate * torch.sigmoid(gate) * up * up_scalar)) * down_scalar

    def trtllm_fp8_per_tensor_scale_routed_moe(self, topk_ids, hidden_states, **k):
        assert hidden_states.dtype == torch.float8_e4m3fn
        assert not k.pop("use_routing_scales_on_input")
        given = dict.fromkeys(("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit"))
        given |= {"output1_gate": k.pop("output1_scales_gate_scalar"), "output1": k.pop("output1_scales_scalar")}
        return self._run("tensor", hidden_states, *topk_ids, {**k, **given, "output2": k.pop("output2_scales_scalar")})

    def _bias(self, bias, w13):
        order = vendor_rows(self.helpers, torch.arange(len(bias))[:, None], w13)[:, 0]
        natural = torch.empty_like(bias)
        natural[order] = bias
        return natural

    def trtllm_bf16_routed_moe(self, topk_ids, hidden_states, use_shuffled_weight, weight_layout, **k):
        assert use_shuffled_weight
        assert weight_layout == 2
        return self._run("bf16", hidden_states, *topk_ids, k)

    def trtllm_mxint4_block_scale_routed_moe(self, topk_ids, hidden_states, **k):
        weights = (topk_ids & 0xFFFF).to(torch.int16).view(torch.bfloat16)
        return [self._run("int4", hidden_states, topk_ids >> 16, weights, k)]

    def trtllm_fp4_block_scale_routed_moe(self, topk_ids, hidden_states, hidden_states_scale, **k):
        if hidden_states.dtype == torch.uint8:
            return [self._nvfp4(topk_ids, hidden_states, hidden_states_scale, k)]
        if hidden_states_scale is not None:
            assert k["hidden_states_scale_layout"] == 2
            assert hidden_states_scale.dtype == torch.float8_e4m3fn
            hidden_states = self._mx(hidden_states, hidden_states_scale.view(torch.uint8))
        assert k["gemm1_weights_scale"].dtype == torch.float8_e4m3fn
        return [self._run("mxfp4", hidden_states, *topk_ids, k)]

    def trtllm_fp8_block_scale_routed_moe(self, topk_ids, hidden_states, hidden_states_scale, **k):
        assert k["weight_layout"] == 0
        assert k["use_shuffled_weight"] == (k["fp8_quantization_type"] == 2)
        if k["fp8_quantization_type"] == 2:
            return self._run("mxfp8", self._mx(hidden_states, hidden_states_scale), *topk_ids, k)
        x = hidden_states.float() * hidden_states_scale.t().repeat_interleave(128, 1)
        return self._run("block", x, *topk_ids, k)

    def _nvfp4(self, topk_ids, codes, scales, k):
        assert k["hidden_states_scale_layout"] == 2
        assert torch.equal(k["gemm1_alpha"], torch.ones(k["local_num_experts"]))
        assert scales.shape == (codes.shape[0], codes.shape[1] // 8)
        x = e2m1(codes) * scales.float().repeat_interleave(16, 1)
        scalars = {"output1_gate": k["output1_scale_gate_scalar"], "output1": k["output1_scale_scalar"]}
        return self._run("nvfp4", x, *topk_ids, {**k, **scalars, "output2": k["output2_scale_scalar"]})

    def _mx(self, codes, exponents):
        assert exponents.shape == (codes.shape[0], codes.shape[1] // 32)
        return codes.float() * torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)


ACTIVATIONS = [Activation(), Activation(limit=0.5), Activation.parse("swigluoai")]


def rounded(x, how, scale=None):
    """x as the kernel multiplies it."""
    if how is ActivationQuant.NONE:
        return x
    if how is ActivationQuant.E4M3_TENSOR:
        return round_static(x, scale).float() * scale
    if how is ActivationQuant.NVFP4:
        codes, block = round_nvfp4(x, scale)
        return e2m1(codes) * block.float().repeat_interleave(16, 1) * scale
    if how is ActivationQuant.MXFP8:
        codes, exponents = round_mx(x)
        return codes.float() * torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    codes, scale = round_groups(x)
    return codes.float() * scale.repeat_interleave(128, 1)


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
    assert decide(p).chosen.name == NAME
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
