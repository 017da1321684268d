"""The row `xpu`: layouts there and back, against the vendor's own dequantization, and whole layers through its class.

The vendor's Python is run as it is; only the native operators that it calls are replaced, by their documented meaning
in plain torch, whose weights come from the vendor's own dequant functions wherever it has one.
"""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from vendor import bits, refused
from xpu_cases import vendor as package

from expertd_kernels import NAMED_DEVICES, Activation, ActivationKind, decide, problem_of
from expertd_kernels.backends import xpu as backend
from expertd_kernels.backends.xpu_layout import GROUPS
from expertd_kernels.common.problem import Device
from expertd_kernels.common.refused import Refused
from expertd_kernels.oracle.probe import assumed_packages
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.sources.synthetic import random_inputs, random_weights
from expertd_kernels.weights.float32 import reference
from expertd_kernels.weights.numerics import relative_error
from expertd_kernels.weights.scheme import Element, ScaleType, Scheme

XE2 = NAMED_DEVICES["xpu-xe2"]
ROW = next(b for b in BACKENDS if b.name == "xpu")
SCHEMES = (
    "int4_g32",
    "int4_g64",
    "int4_g128",
    "int4_channel",
    "mxfp4",
    "mxfp8",
    "e4m3_block128",
    "e4m3_tensor",
    "bf16",
)
KINDS = [Activation(), Activation(limit=0.5), Activation(ActivationKind.GELU_AND_MUL), Activation.parse("swigluoai"),
         Activation(ActivationKind.GELU_TANH_AND_MUL), Activation(ActivationKind.RELU2)]  # fmt: skip


def layer(scheme, E=3, H=256, I=128, **kw):
    w = random_weights(scheme, E, H, I, **kw)
    if scheme == "e4m3_tensor":  # one scale for gate and up, as most checkpoints have it
        w = replace(w, w13=replace(w.w13, scales=w.w13.scales[:, :1].expand_as(w.w13.scales).contiguous()))
    return w


def problem(w, **kw):
    return problem_of(w, XE2, top_k=2, packages=dict(assumed_packages(BACKENDS)), **kw)


def verdict(w, **kw):
    return next(v for v in decide(problem(w, **kw)).verdicts if v.backend == "xpu").refusals


def same_bits(a, b):
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("activation", KINDS, ids=lambda a: a.name)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_unpacking_gives_back_every_bit_and_packing_again_the_same(scheme, activation):
    w = layer(scheme, bias=True, activation=activation)
    if verdict(w):
        assert "does not compute swigluoai with e4m3_block128 weights" in refused("xpu", w, problem(w))
        return
    before = bits(w)
    packed = backend.pack(w, problem(w))
    assert bits(w) == before
    again = backend.unpack(packed)
    assert bits(again) == before
    assert again.activation == activation
    twice = backend.pack(again, problem(w))
    assert all(same_bits(t, packed.tensors[n]) for n, t in twice.tensors.items())
    assert all(t.is_contiguous() for t in packed.tensors.values())


def test_scales_that_bf16_does_not_hold_are_rounded_for_the_kernel_and_kept():
    for kind in (ScaleType.F16, ScaleType.F32):
        w = layer(Scheme.parse("int4_g64", kind))
        packed = backend.pack(w, problem(w))
        assert packed.tensors["w13.scales"].dtype == torch.bfloat16
        assert "w13.exact_scales" in packed.tensors
        assert bits(backend.unpack(packed)) == bits(w)


def test_tensor_scales_that_differ_between_gate_and_up_become_blocks():
    w = random_weights("e4m3_tensor", 2, 256, 128)
    assert not torch.equal(w.w13.scales[:, 0], w.w13.scales[:, 1])
    packed = backend.pack(w, problem(w))
    assert packed.tensors["w13.scales"].shape == (2, 2, 2)
    assert packed.tensors["w2.scales"].shape == (2, 1, 2), "the package knows one form for both matrices"
    assert bits(backend.unpack(packed)) == bits(w)
    w = random_weights("e4m3_tensor", 2, 256, 96)
    with pytest.raises(Refused, match="no whole blocks of 128 x 128 to carry them"):
        backend.pack(w, problem(w))


def test_a_channel_scale_is_repeated_for_the_widest_group_that_fits():
    w = layer("int4_channel", H=384, I=96)
    packed = backend.pack(w, problem(w))
    assert packed.tensors["w13.scales"].shape == (3, 192, 384 // 128)
    assert packed.tensors["w2.scales"].shape == (3, 384, 96 // 32)
    assert GROUPS[0] == 256


REFUSED = {
    "zero points": ({"scheme": "int4_g128_zp"}, "zero points are not computed"),
    "activation order": ({"scheme": "int4_g128", "act_order": True}, "does not permute columns"),
    "int8": ({"scheme": "int8_g128"}, "does not compute on int8 weights"),
    "nvfp4": ({"scheme": "nvfp4"}, "second-level scales are not computed"),
    "channel e4m3": ({"scheme": "e4m3_channel"}, "group size channel"),
    "cut group": ({"scheme": "int4_g128", "I": 96}, "I = 96 is no multiple of 128"),
    "cut block": ({"scheme": "e4m3_block128", "I": 192}, "I = 192 is no multiple of 128"),
    "limit": ({"scheme": "mxfp4", "activation": Activation.parse("swigluoai_limit5")}, "computes swigluoai with alpha"),
    "mixed": ({"scheme": "int4_g128", "w2_scheme": "bf16"}, "different schemes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_package_cannot_do_is_refused_before_packing(case):
    facts, sentence = REFUSED[case]
    found = verdict(layer(**facts))
    assert any(sentence in r for r in found), found


def test_other_intel_generations_and_a_missing_package_are_refused():
    w = layer("int4_g128")
    old = decide(problem_of(w, Device("xpu", "xe")), (ROW,), order={}).verdicts[0].refusals
    assert any("runs on xe2, xe3" in r for r in old)
    assert any("vllm-xpu-kernels>=0.1.16,<0.2 is not installed" in r for r in old)
    assert "not run on hardware" in ROW.hardware


@pytest.fixture(scope="module")
def vendor():
    return package()


def test_signed_nibbles_are_what_the_vendors_own_conversion_makes(vendor):
    w = layer("int4_g64")
    packed = backend.pack(w, problem(w))
    for name, q in (("w13", w.w13), ("w2", w.w2)):
        assert torch.equal(packed.tensors[f"{name}.codes"], vendor.face.implement_zp(q.codes))


DEQUANT = {"mxfp4": "mxfp4", "mxfp8": "mxfp8", "e4m3_block128": "fp8block", "e4m3_tensor": "fp8", "bf16": "bf16"}


@pytest.mark.parametrize("scheme", DEQUANT)
def test_the_vendors_dequantization_reads_our_layout(vendor, scheme):
    w = layer(scheme)
    packed = backend.pack(w, problem(w))
    for name, q in (("w13", w.w13), ("w2", w.w2)):
        codes, scales = packed.tensors[f"{name}.codes"], packed.tensors.get(f"{name}.scales")
        for e in range(3):
            got = vendor.utils.dequant_wei(codes[e], None if scales is None else scales[e], DEQUANT[scheme]).float()
            want = q.dequantize()[e]
            assert torch.equal(got if scheme == "mxfp4" else got.t(), want)


@pytest.mark.parametrize("activation", KINDS, ids=lambda a: a.name)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_layer_through_the_vendors_class(vendor, scheme, activation):
    w = layer(scheme, bias=True, activation=activation, seed=3)
    if verdict(w):
        pytest.skip("; ".join(verdict(w)))
    packed = backend.pack(w, problem(w))
    kept = {n: t.clone() for n, t in packed.tensors.items()}
    x, ids, weights = random_inputs(9, 256, 3, 2, dtype=torch.bfloat16)
    ids[4], ids[5, 1] = -1, -1
    want = reference(w, x, ids, weights)
    for _ in range(2):  # a second build from the same packed tensors is the same layer
        run = backend.XpuExperts(packed, vendor.face, torch.device("cpu"))
        out = torch.full_like(x, float("nan"))
        assert run(x, ids, weights, out=out) is out
        assert relative_error(out, want) < 1e-2
        assert not out[4].any()
    for n, t in packed.tensors.items():
        assert t.dtype == kept[n].dtype
        assert same_bits(t, kept[n]), f"{n} was changed by the package"


@pytest.mark.parametrize("k", [1, 3, 5, 17])
def test_any_number_of_routes(vendor, k):
    w = layer("int4_g64", E=20)
    run = backend.XpuExperts(backend.pack(w, problem(w)), vendor.face, torch.device("cpu"))
    x, ids, weights = random_inputs(4, 256, 20, k, dtype=torch.bfloat16)
    assert relative_error(run(x, ids, weights), reference(w, x, ids, weights)) < 1e-2


def test_router_weight_on_the_input(vendor):
    w = layer("mxfp4", bias=True, activation=Activation.parse("swigluoai"))
    run = backend.XpuExperts(backend.pack(w, problem(w)), vendor.face, torch.device("cpu"))
    x, ids, weights = random_inputs(4, 256, 3, 1, dtype=torch.bfloat16)
    weights = weights * 0.5
    want = reference(w, x, ids, weights, router_weight_on_input=True)
    assert relative_error(run(x, ids, weights, router_weight_on_input=True), want) < 1e-2
    assert relative_error(run(x, ids, weights), want) > 5e-2


def test_missing_native_parts_are_an_import_error_with_the_packages_reason(monkeypatch):
    broken = ModuleType("vllm_xpu_kernels.fused_moe_interface")
    broken.FUSEDMOE_AVAILABLE, broken.FUSEDMOE_UNAVAILABLE_REASON = False, "libsycl.so.9: cannot open"
    monkeypatch.setitem(sys.modules, "vllm_xpu_kernels", ModuleType("vllm_xpu_kernels"))
    monkeypatch.setitem(sys.modules, "vllm_xpu_kernels.fused_moe_interface", broken)
    w = layer("int4_g64")
    packed = backend.pack(w, problem(w))
    with pytest.raises(ImportError, match="libsycl"):
        backend.experts(packed, problem(w))
    stale = replace(packed, meta={**packed.meta, "layout_version": 0})
    with pytest.raises(Refused, match="layout version 0, want 1"):
        backend.experts(stale, problem(w))


def test_only_what_the_row_claims_is_packed():
    w = random_weights("e4m3_channel", 1, 64, 64)
    assert "group size channel" in refused("xpu", w, problem(w))
    assert {x.element for x in ROW.schemes} == {Element.INT4, Element.E2M1, Element.E4M3, Element.BF16}
