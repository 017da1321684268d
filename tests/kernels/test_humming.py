"""The row `humming`: its input form there and back, and whole layers through a stand-in for the package's layer that
reads the tensors by the package's documented schema."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vendor import bits

from expertd_kernels import NAMED_DEVICES, Activation, ActivationKind, ActivationQuant, decide, problem_of
from expertd_kernels.backends import humming as backend
from expertd_kernels.float32 import reference
from expertd_kernels.numerics import relative_error
from expertd_kernels.oracle import Refused
from expertd_kernels.probe import assumed_packages
from expertd_kernels.scheme import ScaleType, Scheme
from expertd_kernels.synthetic import random_inputs, random_weights
from expertd_kernels.table import BACKENDS

SM90 = NAMED_DEVICES["sm90"]
SCHEMES = (
    "int4_g32", "int4_g128", "int4_g64_zp", "int4_channel", "int8_g128", "int8_channel_zp", "mxfp4", "mxfp8",
    "e4m3_block128",
)  # fmt: skip
KINDS = [Activation(), Activation.parse("swigluoai"), Activation(ActivationKind.RELU2), Activation(limit=0.5)]


def layer(scheme, H=256, I=128, E=3, **kw):
    return random_weights(scheme, E, H, I, bias=kw.pop("bias", True), **kw)


def problem(w):
    return problem_of(w, SM90, top_k=2, packages=dict(assumed_packages(BACKENDS)))


def refusals(w):
    return next(v for v in decide(problem(w)).verdicts if v.backend == "humming").refusals


@pytest.mark.parametrize("scheme", SCHEMES)
def test_unpacking_gives_back_every_bit(scheme):
    w = layer(scheme)
    assert refusals(w) == ()
    before = bits(w)
    packed = backend.pack(w, problem(w))
    assert bits(backend.unpack(packed)) == before == bits(w)
    twice = backend.pack(backend.unpack(packed), problem(w))
    for name, t in packed.tensors.items():
        assert t.is_contiguous()
        assert torch.equal(t.reshape(-1).view(torch.uint8), twice.tensors[name].reshape(-1).view(torch.uint8))


def test_scales_that_bf16_does_not_hold_are_kept():
    w = layer(Scheme.parse("int4_g64_zp", ScaleType.F32))
    packed = backend.pack(w, problem(w))
    assert packed.tensors["w13.weight_scale"].dtype == torch.bfloat16
    assert bits(backend.unpack(packed)) == bits(w)


REFUSED = {
    "activation order": (lambda: layer("int4_g128", act_order=True), "does not permute columns"),
    "e4m3 channel": (lambda: layer("e4m3_channel"), "group size channel"),
    "nvfp4": (lambda: layer("nvfp4"), "second-level scales are not computed"),
    "bf16": (lambda: layer("bf16"), "does not compute on bf16 weights"),
    "cut group": (lambda: layer("int4_g128", I=192), "I = 192 is no multiple of 128"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_exact_or_not_there_is_refused_before_packing_and_in_packing(case):
    make, sentence = REFUSED[case]
    w = make()
    assert any(sentence in r for r in refusals(w)), refusals(w)
    with pytest.raises(Refused):
        backend.pack(w, problem(w))


def test_rounded_activations_and_stale_layouts_are_refused():
    w = layer("int4_g128")
    with pytest.raises(Refused, match="rounds no activations"):
        backend.pack(w, replace(problem(w), activation_quant=ActivationQuant.INT8_TOKEN))
    packed = backend.pack(w, problem(w))
    with pytest.raises(Refused, match="layout version 0, want 1"):
        backend.experts(replace(packed, meta={**packed.meta, "layout_version": 0}), problem(w))


class Layer:
    """The package's HummingLayer by its documented schema, in f32."""

    def __init__(self, shape_n, shape_k, weight_config, num_experts, has_bias, torch_dtype):
        self.n, self.k, self.config, self.e = shape_n, shape_k, weight_config, num_experts
        self.has_bias, self.ready = has_bias, False
        assert torch_dtype is torch.bfloat16
        assert weight_config["quant_method"] == "humming"

    def load_from_tensors(self, tensors):
        assert set(tensors) == {"weight", "weight_scale"} | ({"bias"} if self.has_bias else set()) | (
            {"zero_point"} if self.config["has_zero_point"] else set()
        )
        self.t = tensors

    def to(self, device):
        return self

    def transform(self):
        dtype, group = self.config["dtype"], self.config["group_size"] or self.k
        wide = {"uint4": 4, "float4e2m1": 4, "uint8": 8, "float8e4m3": 8}[dtype]
        weight, scale = self.t["weight"], self.t["weight_scale"]
        assert weight.dtype == torch.int32
        assert weight.shape == (self.e, self.n, self.k * wide // 32)
        codes = self._split(weight, wide)
        if dtype.startswith("uint"):
            zero = torch.tensor(float(1 << (wide - 1)))
            if self.config["has_zero_point"]:
                words = self.t["zero_point"]
                assert words.shape == (self.e, self.n * wide // 32, self.k // group)
                zero = self._split(words.transpose(1, 2).contiguous(), wide).transpose(1, 2).float()
                zero = zero.repeat_interleave(group, 2)
            w = codes.float() - zero
        elif dtype == "float4e2m1":
            w = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])[codes.long()]
        else:
            w = codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
        if self.config.get("scale_dtype") == "float8e8m0":
            assert scale.dtype == torch.float8_e8m0fnu
        else:
            assert scale.dtype == (torch.float32 if "group_size_n" in self.config else torch.bfloat16)
        rows = self.config.get("group_size_n", 1)
        assert scale.shape == (self.e, self.n // rows, self.k // group)
        self.w = w * scale.float().repeat_interleave(rows, 1).repeat_interleave(group, 2)
        self.ready = True

    @staticmethod
    def _split(words, wide):
        """[..., W] int32 -> [..., W * 32 / wide]: fields, low bits first."""
        return torch.stack([(words >> at) & ((1 << wide) - 1) for at in range(0, 32, wide)], -1).flatten(-2)

    def __call__(self, x, expert_layout, compute_config):
        assert self.ready
        assert compute_config == {"gemm_type": "grouped_contiguous"}
        assert expert_layout.dtype == torch.int64
        assert expert_layout.shape == (self.e + 1,)
        out = torch.full((x.shape[0], self.n), float("nan"), dtype=torch.bfloat16)
        for e in range(self.e):
            rows = slice(int(expert_layout[e]), int(expert_layout[e + 1]))
            y = x[rows].float() @ self.w[e].t()
            out[rows] = (y + self.t["bias"][e].float() if self.has_bias else y).to(torch.bfloat16)
        return out


VENDOR = SimpleNamespace(HummingLayer=Layer)


@pytest.mark.parametrize("activation", KINDS, ids=lambda a: a.name)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_layer_through_the_packages_layer(scheme, activation):
    w = layer(scheme, activation=activation, seed=5)
    run = backend.HummingExperts(backend.pack(w, problem(w)), VENDOR, torch.device("cpu"))
    x, ids, weights = random_inputs(7, 256, 3, 2)
    ids[2], ids[3, 0] = -1, -1
    out = torch.full_like(x, float("nan"))
    assert run(x, ids, weights, out=out) is out
    assert relative_error(out, reference(w, x, ids, weights)) < 1e-2
    assert not out[2].any()


def test_no_bias_no_tokens_and_the_router_weight_on_the_input():
    w = layer("int4_g32", bias=False)
    run = backend.HummingExperts(backend.pack(w, problem(w)), VENDOR, torch.device("cpu"))
    x, ids, weights = random_inputs(5, 256, 3, 1)
    weights = weights * 0.5
    want = reference(w, x, ids, weights, router_weight_on_input=True)
    assert relative_error(run(x, ids, weights, router_weight_on_input=True), want) < 1e-2
    assert run(x[:0], ids[:0], weights[:0]).shape == (0, 256)


def test_the_row_says_that_it_was_not_run_on_hardware():
    assert next(b for b in BACKENDS if b.name == "humming").hardware == "not run on hardware"
