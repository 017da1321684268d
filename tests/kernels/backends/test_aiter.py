"""The row `aiter`: its layout against the package's own shuffle, and whole layers through a stand-in for its entry
point that undoes the layout and computes with the package's own torch code."""

import ast
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from aiter_cases import Vendor
from vendor import bits, functions, package_folder

from expertd_kernels import NAMED_DEVICES, Activation, ActivationQuant, decide, problem_of
from expertd_kernels.backends import aiter as backend
from expertd_kernels.backends import aiter_layout as layouts
from expertd_kernels.common.refused import Refused
from expertd_kernels.oracle.probe import assumed_packages
from expertd_kernels.oracle.rules import judge
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.sources.synthetic import random_inputs, random_weights
from expertd_kernels.weights.float32 import reference
from expertd_kernels.weights.numerics import relative_error

NAME = "aiter"
HOW = {"bf16": ActivationQuant.NONE, "e4m3_channel": ActivationQuant.E4M3_TOKEN,
       "e4m3_block128": ActivationQuant.E4M3_GROUP128, "mxfp4": ActivationQuant.NONE}  # fmt: skip
GPT_OSS = Activation.parse("swigluoai")


def layer(scheme, H=256, I=128, E=3, **kw):
    more = {"activation": GPT_OSS, "bias": True} if scheme == "mxfp4" else {}
    return random_weights(scheme, E, H, I, **{**more, **kw})


def problem(w, device="gfx950", how=None):
    how = HOW.get(w.w13.scheme.name, ActivationQuant.NONE) if how is None else how
    packages = dict(assumed_packages(BACKENDS))
    return problem_of(w, NAMED_DEVICES[device], top_k=2, activation_quant=how, packages=packages)


def refusals(w, device="gfx950", how=None):
    return next(v for v in decide(problem(w, device, how)).verdicts if v.backend == NAME).refusals


@pytest.mark.parametrize("scheme", HOW)
def test_unpacking_gives_back_every_bit(scheme):
    w = layer(scheme)
    assert refusals(w) == ()
    before = bits(w)
    packed = backend.pack(w, problem(w))
    assert bits(backend.unpack(packed)) == before
    for t in packed.tensors.values():
        t.view(-1).view(torch.uint8).fill_(1)
    assert bits(w) == before, "packing shares no memory"


REFUSED = {
    "e4m3 on CDNA3": (
        lambda: refusals(layer("e4m3_channel"), "gfx942"),
        "e4m3_channel: runs on gfx950, this is rocm:gfx942",
    ),
    "RDNA": (lambda: refusals(layer("bf16"), "gfx1100"), "runs on gfx942, gfx950, this is rocm:gfx1100"),
    "NVIDIA": (lambda: refusals(layer("bf16"), "sm90"), "runs on rocm"),
    "weight-only e4m3": (
        lambda: refusals(layer("e4m3_channel"), how=ActivationQuant.NONE),
        "rounds activations (e4m3_token), and these are to stay in bf16",
    ),
    "bias": (lambda: refusals(layer("bf16", bias=True)), "does not add expert biases"),
    "swigluoai": (lambda: refusals(layer("bf16", activation=GPT_OSS)), "does not compute swigluoai with bf16 weights"),
    "silu of mxfp4": (
        lambda: refusals(layer("mxfp4", activation=Activation())),
        "does not compute silu_and_mul with mxfp4 weights",
    ),
    "another curve": (
        lambda: refusals(layer("mxfp4", activation=replace(GPT_OSS, alpha=1.5))),
        "computes swigluoai with alpha 1.702, beta 1.0, limit 7.0 only, alpha 1.5",
    ),
    "mxfp4 on CDNA3": (lambda: refusals(layer("mxfp4"), "gfx942"), "mxfp4: runs on gfx950, this is rocm:gfx942"),
    "mxfp4 activations": (
        lambda: refusals(layer("mxfp4"), how=ActivationQuant.MXFP4),
        "does not round activations to mxfp4",
    ),
    "clamp": (lambda: refusals(layer("bf16", activation=Activation(limit=3.0))), "does not clamp"),
    "sizes": (lambda: refusals(layer("bf16", I=96)), "I = 96 is no multiple of 128"),
    "int4": (lambda: refusals(layer("int4_g128")), "does not compute on int4 weights"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_package_cannot_do_is_refused_before_packing(case):
    ask, sentence = REFUSED[case]
    assert any(sentence in r for r in ask()), ask()


def test_bf16_is_served_on_both_generations_behind_the_portable_kernels():
    for device in ("gfx942", "gfx950"):
        assert refusals(layer("bf16"), device) == ()
        assert decide(problem(layer("bf16"), device)).chosen.name == "triton"
    assert decide(problem(layer("e4m3_block128"))).chosen.name == NAME, "nothing else rounds like this there"


def test_another_layout_version_is_refused():
    w = layer("e4m3_channel")
    packed = backend.pack(w, problem(w))
    with pytest.raises(Refused, match="layout version 0, want 2"):
        backend.experts(replace(packed, meta={**packed.meta, "layout_version": 0}), problem(w))


@pytest.fixture(scope="module")
def folder():
    return package_folder("aiter")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_codes_are_where_the_packages_shuffle_puts_them(folder, dtype):
    own = functions(folder / "ops" / "shuffle.py", {"shuffle_weight"}, ModuleType("shuffle"))
    t = torch.randn(2, 64, 128, generator=torch.Generator().manual_seed(1)).to(dtype)
    theirs = own.shuffle_weight(t, layout=(16, 16))
    assert torch.equal(layouts.shuffle(t).view(torch.uint8), theirs.view(torch.uint8))
    assert torch.equal(layouts.unshuffle(layouts.shuffle(t)).view(torch.uint8), t.view(torch.uint8))


@pytest.mark.parametrize("segments", [1, 2])
def test_mxfp4_is_where_the_packages_functions_put_it(folder, segments):
    names = {"shuffle_weight_a16w4", "shuffle_scale_a16w4"}
    own = functions(folder / "ops" / "shuffle.py", names, ModuleType("shuffle"))
    g = torch.Generator().manual_seed(1)
    codes, scales = (torch.randint(256, (3, 512, k), generator=g, dtype=torch.uint8) for k in (384, 24))
    theirs = own.shuffle_weight_a16w4(codes, 16, segments == 2)
    assert torch.equal(layouts.shuffle_mxfp4(codes, segments), theirs)
    assert torch.equal(layouts.unshuffle_mxfp4(theirs, segments), codes)
    theirs = own.shuffle_scale_a16w4(scales.view(-1, 24), 3, segments == 2).view(3, 512, 24)
    assert torch.equal(layouts.shuffle_scales(scales, segments), theirs)
    assert torch.equal(layouts.unshuffle_scales(theirs, segments), scales)


@pytest.mark.parametrize(("H", "I", "bias"), [(320, 320, True), (256, 96, False), (512, 256, True)])
def test_mxfp4_with_padding_biases_and_the_clamped_curve(folder, H, I, bias):
    """320 is to 256 what gpt-oss's 2880 is: 64 more than a multiple."""
    w = layer("mxfp4", H, I, bias=bias, seed=5)
    assert refusals(w) == ()
    packed = backend.pack(w, problem(w))
    assert bits(backend.unpack(packed)) == bits(w)
    run = backend.AiterExperts(packed, Vendor(folder), torch.device("cpu"))
    x, ids, weights = random_inputs(6, H, 3, 2)
    ids[2], ids[3, 0] = -1, -1
    x = x * 8  # so that the clamp does something
    want = reference(w, x, ids, weights)
    out = run(x, ids, weights, out=torch.full_like(x, float("nan")))
    assert relative_error(out, want) < 1e-2
    assert not out[2].any()
    unclamped = replace(w, activation=replace(GPT_OSS, limit=None))
    assert relative_error(reference(unclamped, x, ids, weights), want) > 2e-2, "too weak a test"


def test_gpt_oss_is_taken_as_it_is():
    row = next(b for b in BACKENDS if b.name == NAME)
    assert judge(row, replace(problem(layer("mxfp4")), hidden_size=2880, intermediate_size=2880)) == ()


def test_the_entry_point_has_these_parameters(folder):
    tree = ast.parse((folder / "fused_moe.py").read_text())
    call = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "fused_moe")
    names = [a.arg for a in call.args.args]
    assert names[:5] == ["hidden_states", "w1", "w2", "topk_weight", "topk_ids"]
    used = {"expert_mask", "activation", "quant_type", "w1_scale", "w2_scale"}
    assert used | {"hidden_pad", "intermediate_pad", "bias1", "bias2"} <= set(names)


@pytest.mark.parametrize("scheme", HOW)
def test_a_layer_through_the_entry_point(folder, scheme):
    w = layer(scheme, seed=5)
    run = backend.AiterExperts(backend.pack(w, problem(w)), Vendor(folder), torch.device("cpu"))
    x, ids, weights = random_inputs(6, 256, 3, 2)
    ids[2], ids[3, 0] = -1, -1
    out = torch.full_like(x, float("nan"))
    assert run(x, ids, weights, out=out) is out
    assert relative_error(out, reference(w, x, ids, weights)) < 1e-2
    assert not out[2].any()
    on_input = run(x, ids[:, :1], weights[:, :1] * 0.5, router_weight_on_input=True)
    want = reference(w, x, ids[:, :1], weights[:, :1] * 0.5, router_weight_on_input=True)
    assert relative_error(on_input, want) < 1e-2
    assert run(x[:0], ids[:0], weights[:0]).shape == (0, 256)


def test_the_row_says_that_it_was_not_run_on_hardware():
    assert next(b for b in BACKENDS if b.name == NAME).hardware == "not run on hardware"
