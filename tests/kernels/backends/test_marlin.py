"""The row `marlin`: its layout there and back and against the package's own functions.  Whole layers: test_glue.py."""

import inspect
from dataclasses import replace
from types import ModuleType

import numpy
import pytest
import torch
from glue_cases import MARLIN_SCHEMES
from vendor import bits, check_packing, functions, package_folder, refused

from expertd_kernels import NAMED_DEVICES, Activation, ActivationQuant, decide, problem_of
from expertd_kernels.backends import marlin as backend
from expertd_kernels.common.refused import Refused
from expertd_kernels.oracle.probe import assumed_packages
from expertd_kernels.oracle.rules import judge
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.sources.synthetic import random_weights
from expertd_kernels.weights.canonical import unpack_nibbles
from expertd_kernels.weights.scheme import Element, ScaleType, Scheme

SM90 = NAMED_DEVICES["sm90"]
ROW = next(b for b in BACKENDS if b.name == "marlin")


def layer(scheme, H=256, I=128, E=3, **kw):
    return random_weights(scheme, E, H, I, **{"bias": True, "signed_scales": scheme not in ("mxfp4", "mxfp8"), **kw})


def problem(w, device=SM90):
    return problem_of(w, device, top_k=2, packages=dict(assumed_packages(BACKENDS)))


def refusals(w, device=SM90):
    return next(v for v in decide(problem(w, device)).verdicts if v.backend == "marlin").refusals


@pytest.mark.parametrize("activation", [Activation(), Activation.parse("relu2")], ids=lambda a: a.name)
@pytest.mark.parametrize("scheme", MARLIN_SCHEMES)
def test_unpacking_gives_back_every_bit(scheme, activation):
    w = layer(scheme, activation=activation)
    assert refusals(w) == ()
    check_packing(backend, w, problem(w))


@pytest.mark.parametrize("kind", [ScaleType.F16, ScaleType.F32])
def test_scales_that_bf16_does_not_hold_are_kept(kind):
    w = layer(Scheme.parse("int4_g64_zp", kind))
    packed = backend.pack(w, problem(w))
    assert packed.tensors["w13.scales"].dtype == torch.bfloat16
    assert bits(backend.unpack(packed)) == bits(w)


REFUSED = {
    "activation order": (lambda: layer("int4_g128", act_order=True), "does not permute columns"),
    "int8 with zero points": (lambda: layer("int8_g128_zp"), "zero points are not computed"),
    "e4m3 in groups of 32": (lambda: layer("mxfp8", bias=False), "scales of type e8m0"),
    "nvfp4": (lambda: layer("nvfp4"), "second-level scales are not computed"),
    "cut group": (lambda: layer("int4_g128", I=192), "I = 192 is no multiple of 128"),
    "odd size": (lambda: layer("int4_g32", H=96), "H = 96 is no multiple of 64"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_package_cannot_do_is_refused_before_packing(case):
    make, sentence = REFUSED[case]
    w = make()
    assert any(sentence in r for r in refusals(w)), refusals(w)


@pytest.mark.parametrize(("H", "I", "relu2"), [(320, 320, False), (192, 64, False), (192, 64, True)])
def test_rows_that_the_kernel_needs_are_added_and_taken_away(H, I, relu2):
    """gpt-oss's 2880 is 64 more than a multiple of 128, as these are."""
    w = layer("int4_g64_zp", H, I, activation=Activation.parse("relu2") if relu2 else Activation())
    assert refusals(w) == ()
    packed = backend.pack(w, problem(w))
    rows = {name: packed.tensors[f"{name}.scales"].shape[2] for name in ("w13", "w2")}
    assert rows == {"w13": -(-w.w13.shape[1] // 128) * 128, "w2": -(-H // 128) * 128}
    check_packing(backend, w, problem(w))


def test_gpt_oss_is_taken_as_it_is():
    w = layer("mxfp4", activation=Activation.parse("swigluoai"))
    assert judge(ROW, replace(problem(w), hidden_size=2880, intermediate_size=2880)) == ()


def test_scales_that_overflow_once_multiplied_are_refused():
    w = layer("e4m3_channel", signed_scales=False)
    large = replace(w, w2=replace(w.w2, scales=w.w2.scales * 0 + 200))
    assert "a scale above 128 of e4m3 weights" in refused("marlin", large, problem(large))


def test_rounded_activations_older_devices_and_stale_layouts_are_refused():
    w = layer("int4_g128")
    rounded = replace(problem(w), activation_quant=ActivationQuant.INT8_TOKEN)
    assert "does not round activations to int8_token" in refused("marlin", w, rounded)
    assert any("runs on cuda" in r for r in refusals(w, NAMED_DEVICES["gfx942"]))
    packed = backend.pack(w, problem(w))
    with pytest.raises(Refused, match="layout version 0, want 2"):
        backend.experts(replace(packed, meta={**packed.meta, "layout_version": 0}), problem(w))


def test_blocks_follow_the_load_of_the_experts():
    assert [backend.block_rows(8 * m, 128) for m in (1, 64, 128, 256, 512, 640, 4096)] == [8, 8, 16, 32, 48, 48, 64]


@pytest.fixture(scope="module")
def package():
    """The package's own Python for the layout: how it packs weights, scales and zero points in its tests."""
    folder = package_folder("sglang")
    into = ModuleType("marlin_sources")
    into.numpy = into.np = numpy
    into.GPTQ_MARLIN_TILE = 16
    into.get_pack_factor = lambda bits: 32 // bits
    functions(folder / "srt/layers/quantization/utils.py", {"pack_cols"}, into)
    scales = {"get_scale_perms", "marlin_permute_scales", "marlin_zero_points"}
    functions(folder / "srt/layers/quantization/marlin_utils.py", scales, into)
    functions(folder / "srt/layers/quantization/marlin_utils_fp4.py", {"mxfp4_marlin_process_scales"}, into)
    functions(folder / "srt/layers/quantization/marlin_utils_fp8.py", {"fp8_fused_exponent_bias_into_scales"}, into)
    names = {"get_weight_perm", "marlin_weights", "marlin_permute_weights"}
    return functions(folder / "test/test_marlin_utils.py", names, into)


@pytest.mark.parametrize("scheme", MARLIN_SCHEMES)
def test_codes_scales_and_zeros_are_where_the_packages_functions_put_them(package, scheme):
    w = layer(scheme)
    packed = backend.pack(w, problem(w))
    for name, q in (("w13", w.w13), ("w2", w.w2)):
        _, N, K = q.shape
        width = 4 if q.scheme.element.packed else 8
        group = q.scheme.cols or K
        for e in range(3):
            flip = 0x80 if q.scheme.element is Element.INT8 else 0
            codes = unpack_nibbles(q.codes[e], K) if width == 4 else q.codes[e].view(torch.uint8) ^ flip
            want = package.marlin_weights(codes.T.int().contiguous(), K, N, width, package.get_weight_perm(width))
            assert torch.equal(packed.tensors[f"{name}.codes"][e], want)
            scales = q.scales[e].T.contiguous()
            if scheme == "mxfp4":
                numbers = package.marlin_permute_scales(scales.view(torch.float8_e8m0fnu).bfloat16(), K, N, group)
                want = package.mxfp4_marlin_process_scales(numbers).view(torch.uint8)
            elif q.scheme.element is Element.E4M3:
                each = scales.repeat_interleave(N // scales.shape[1], 1)  # (their function has it for one linear layer)
                numbers = package.marlin_permute_scales(each.bfloat16(), K, N, group)
                want = package.fp8_fused_exponent_bias_into_scales(numbers)
            else:
                want = package.marlin_permute_scales(scales.bfloat16(), K, N, group)
            assert torch.equal(packed.tensors[f"{name}.scales"][e], want)
            if q.zeros is not None:
                want = package.marlin_zero_points(q.zeros[e].T.int().contiguous(), K // group, N, width)
                assert torch.equal(packed.tensors[f"{name}.zeros"][e], want)


def test_the_entry_point_and_its_rule_for_blocks_are_these():
    folder = package_folder("sglang")
    text = (folder / "kernels/ops/moe/moe_wna16_marlin.py").read_text()
    head = text.split("def moe_wna16_marlin_gemm(", 1)[1].split(") -> torch.Tensor", 1)[0]
    for name in ("b_q_weight", "b_scales", "b_zeros_or_none", "b_q_type", "sorted_token_ids", "expert_ids", "size_n",
                 "num_tokens_post_padded", "moe_block_size", "mul_topk_weights", "use_fp32_reduce"):  # fmt: skip
        assert f"    {name}: " in head
    rule = (folder / "srt/layers/moe/fused_moe_triton/fused_marlin_moe.py").read_text()
    assert "for block_size_m in [8, 16, 32, 48, 64]:\n        if M * topk / E / block_size_m < 0.9:" in rule
    assert "routes / experts / b < FULL" in inspect.getsource(backend.block_rows)


def test_the_row_says_where_it_was_run():
    assert ROW.hardware == "int4, int8, e2m1 run on SM90. All else not run on hardware"
