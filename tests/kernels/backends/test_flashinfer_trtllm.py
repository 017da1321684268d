"""The row `flashinfer_trtllm`: layouts there and back, against the package's own layout helpers, and refusals."""

from dataclasses import replace

import pytest
import torch
from trtllm_cases import FORMS, NAME, SIZES, STATIC, layer, package_helpers, problem, refusals, up_gate, vendor_rows
from vendor import bits, check_packing, refused

from expertd_kernels import NAMED_DEVICES, Activation, ActivationKind, ActivationQuant, decide, problem_of
from expertd_kernels.backends import flashinfer_trtllm as backend
from expertd_kernels.backends.trtllm_layout import MULTIPLES, swizzle
from expertd_kernels.common.refused import Refused
from expertd_kernels.weights.scheme import ScaleType, Scheme


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", FORMS)
def test_unpacking_gives_back_every_bit(scheme, size):
    w = layer(scheme, *size)
    assert refusals(w) == ()
    check_packing(backend, w, problem(w))


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
        "rounds activations (e4m3_group128), and these are to stay in bf16",
    ),
    "weight-only nvfp4": (
        lambda: decide(problem(layer("nvfp4"), activation_quant=ActivationQuant.NONE)),
        "rounds activations (nvfp4), and these are to stay in bf16",
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


def test_another_layout_version_is_refused():
    w = layer("mxfp4")
    packed = backend.pack(w, problem(w))
    with pytest.raises(Refused, match="layout version 0, want 1"):
        backend.experts(replace(packed, meta={**packed.meta, "layout_version": 0}), problem(w))


@pytest.mark.parametrize("scheme", STATIC)
def test_without_static_input_scales_there_is_nothing_to_round_with(scheme):
    promised = layer(scheme)
    w = replace(promised, input_scales=None)
    assert "with static scales, and the checkpoint has none" in "; ".join(refusals(w))
    assert "with static scales, and the checkpoint has none" in refused(NAME, w, problem(promised))


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
    return package_helpers()


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
