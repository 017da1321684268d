"""The row `flashinfer_cutlass`: layouts there and back, against the package's own layout code, and whole layers through
a stand-in for its entry point that undoes the layout as that code describes it."""

import re
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from cutlass_cases import BlackwellEntryPoint, EntryPoint, tile_slowly
from vendor import bits, check_packing, functions, package_folder, refused

from expertd_kernels import NAMED_DEVICES, Activation, ActivationKind, ActivationQuant, decide, problem_of
from expertd_kernels.backends import flashinfer_cutlass as backend
from expertd_kernels.backends.cutlass_layout import BITS
from expertd_kernels.common.refused import Refused
from expertd_kernels.oracle.probe import assumed_packages
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.sources.synthetic import random_inputs, random_weights
from expertd_kernels.weights.float32 import reference
from expertd_kernels.weights.numerics import relative_error, tolerance
from expertd_kernels.weights.scheme import Element, ScaleType, Scheme

NAME = "flashinfer_cutlass"
SM90, SM100 = NAMED_DEVICES["sm90"], NAMED_DEVICES["sm100"]
SCHEMES = ("bf16", "mxfp4", "e4m3_block128")
KINDS = [
    Activation(),
    Activation(limit=0.5),
    Activation.parse("swigluoai"),
    Activation(ActivationKind.GELU_AND_MUL),
    Activation(ActivationKind.GELU_TANH_AND_MUL),
    Activation(ActivationKind.RELU2),
]


STATIC = {"e4m3_tensor": ActivationQuant.E4M3_TENSOR, "nvfp4": ActivationQuant.NVFP4}
BLACKWELL = {"mxfp4": ActivationQuant.MXFP8, "mxfp8": ActivationQuant.MXFP8, **STATIC}
"""Schemes on SM100, and how activations are rounded there."""


def layer(scheme, H=256, I=128, E=3, **kw):
    w = random_weights(scheme, E, H, I, bias=kw.pop("bias", scheme in ("bf16", "mxfp4", "mxfp8")), **kw)
    if scheme not in STATIC:
        return w
    field = "global_scales" if scheme == "nvfp4" else "scales"
    scales = getattr(w.w13, field)
    steps = torch.tensor([[0.008, 0.011], [0.01, 0.007], [0.009, 0.009]])[:E]
    return replace(
        w,
        w13=replace(w.w13, **{field: scales[:, :1].expand_as(scales).contiguous()}),
        input_scales=steps / 6 if scheme == "nvfp4" else steps,
    )


def problem(w, device=SM90, how=None):
    rounded = {"e4m3_block128": ActivationQuant.E4M3_GROUP128, **STATIC}
    return problem_of(
        w,
        device,
        top_k=2,
        activation_quant=how or rounded.get(w.w13.scheme.name, ActivationQuant.NONE),
        packages=dict(assumed_packages(BACKENDS)),
    )


def refusals(w, device=SM90, how=None):
    return next(v for v in decide(problem(w, device, how)).verdicts if v.backend == NAME).refusals


@pytest.mark.parametrize("activation", KINDS, ids=lambda a: a.name)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_unpacking_gives_back_every_bit(scheme, activation):
    w = layer(scheme, activation=activation)
    assert refusals(w) == ()
    check_packing(backend, w, problem(w))


def test_exponents_as_scales_of_blocks_are_read_as_numbers():
    w = random_weights(Scheme(Element.E4M3, 128, 128, ScaleType.E8M0), 3, 256, 128)
    p = problem_of(w, SM90, top_k=2, activation_quant=ActivationQuant.E4M3_GROUP128)
    packed = backend.pack(w, p)
    assert bits(backend.unpack(packed)) == bits(w)
    run = backend.CutlassExperts(packed, EntryPoint(w), torch.device("cpu"))
    x, ids, weights = random_inputs(5, 256, 3, 2)
    assert relative_error(run(x, ids, weights), reference(w, x, ids, weights)) < 1e-2


@pytest.mark.parametrize(("scheme", "H", "I", "multiple"), [("bf16", 100, 60, 8), ("mxfp4", 192, 96, 128)])
def test_odd_sizes_are_padded_and_come_back(scheme, H, I, multiple):
    w = layer(scheme, H, I)
    packed = backend.pack(w, problem(w))
    assert packed.meta["w13"]["cols"] % multiple == packed.meta["w13"]["rows"] % multiple == 0
    assert bits(backend.unpack(packed)) == bits(w)


@pytest.mark.parametrize("size", [(256, 128), (192, 96)])
@pytest.mark.parametrize("scheme", BLACKWELL)
def test_layouts_for_blackwell_give_back_every_bit(scheme, size):
    w = layer(scheme, *size)
    p = problem(w, SM100, BLACKWELL[scheme])
    assert refusals(w, SM100, BLACKWELL[scheme]) == ()
    packed = backend.pack(w, p)
    assert bits(backend.unpack(packed)) == bits(w)
    own = {t.data_ptr() for m in (w.w13, w.w2) for _, t in m.tensors()}
    assert not own & {t.data_ptr() for n, t in packed.tensors.items() if n != "input_scales"}


def test_gate_and_up_rows_with_different_scales_are_refused_when_they_are_packed():
    for scheme in STATIC:
        w = random_weights(scheme, 3, 256, 128)
        w = replace(w, input_scales=torch.full((3, 2), 0.01))
        with pytest.raises(Refused, match="gate and up rows have different scales"):
            backend.pack(w, problem(w, SM100))
        found = refused("flashinfer_cutlass", replace(layer(scheme), input_scales=None), problem(w, SM100))
        assert "with static scales, and the checkpoint has none" in found
    negative = layer("nvfp4", signed_scales=True)
    with pytest.raises(Refused, match="negative scales of nvfp4"):
        backend.pack(negative, problem(negative, SM100))


REFUSED = {
    "rounded mxfp4 on Hopper": (
        lambda: refusals(layer("mxfp4"), SM90, ActivationQuant.MXFP8),
        "mxfp4: needs compute capability 10.0 to 12.9, this is cuda:sm90",
    ),
    "nvfp4 on Hopper": (lambda: refusals(layer("nvfp4")), "nvfp4: needs compute capability 10.0 to 12.9"),
    "mxfp8 beyond SM10x": (
        lambda: refusals(layer("mxfp8"), NAMED_DEVICES["sm120"], ActivationQuant.MXFP8),
        "mxfp8: needs compute capability 10.0 to 10.9, this is cuda:sm120",
    ),
    "weight-only nvfp4": (
        lambda: refusals(layer("nvfp4"), SM100, ActivationQuant.MXFP8),
        "does not round activations to mxfp8",
    ),
    "bias with static scales": (lambda: refusals(layer("e4m3_tensor", bias=True)), "does not add expert biases"),
    "mxfp4 off Hopper": (
        lambda: refusals(layer("mxfp4"), NAMED_DEVICES["sm100"]),
        "mxfp4: needs compute capability 9.0, this is cuda:sm100",
    ),
    "sm80": (lambda: refusals(layer("bf16"), NAMED_DEVICES["sm80"]), "needs compute capability 8.9 to 12.9"),
    "bias of e4m3": (lambda: refusals(layer("e4m3_block128", bias=True)), "does not add expert biases"),
    "int4": (lambda: refusals(layer("int4_g128")), "does not compute on int4 weights"),
    "clamped gelu": (
        lambda: refusals(layer("bf16", activation=Activation(ActivationKind.GELU_AND_MUL, limit=3.0))),
        "does not clamp before gelu_and_mul",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_package_cannot_do_is_refused_before_packing(case):
    ask, sentence = REFUSED[case]
    assert any(sentence in r for r in ask()), ask()


def test_bf16_is_served_from_ada_to_blackwell():
    for device in ("sm89", "sm90", "sm100", "sm103", "sm120"):
        assert refusals(layer("bf16"), NAMED_DEVICES[device]) == ()


def test_another_layout_version_is_refused():
    w = layer("mxfp4")
    packed = backend.pack(w, problem(w))
    with pytest.raises(Refused, match="layout version 0, want 1"):
        backend.experts(replace(packed, meta={**packed.meta, "layout_version": 0}), problem(w))


@pytest.fixture(scope="module")
def sources():
    folder = package_folder("flashinfer")
    kernel = folder / "data/csrc/nv_internal/tensorrt_llm/kernels/cutlass_kernels/moe_gemm/moe_gemm_mixed_utils.cu"
    if not kernel.is_file():
        pytest.skip(f"{kernel.name} of the package flashinfer is not unpacked")
    prepare = functions(
        folder / "fused_moe" / "prepare.py", {"interleave_moe_scales_for_sm90_mixed_gemm"}, ModuleType("prepare")
    )
    return SimpleNamespace(kernel=kernel.read_text(), fold=prepare.interleave_moe_scales_for_sm90_mixed_gemm)


def vendor_bits(text):
    """Where each bit of a word goes, from the masks and shifts of the package's interleaving kernel."""
    body = text.split("interleave_fp4_weights_for_sm90_mixed_gemm_kernel", 1)[1].split("__global__", 1)[0]
    steps = re.findall(r"mask = 0b([01]{32});\s*fp4x8_interleaved \|= \(fp4x8_raw & mask\) (<<|>>) (\d+)", body)
    assert len(steps) == 18
    out = {}
    for mask, way, by in steps:
        for i in range(32):
            if int(mask, 2) >> i & 1:
                out[i] = i + int(by) if way == "<<" else i - int(by)
    return tuple(out[i] for i in range(32))


def test_bits_of_a_word_go_where_the_packages_kernel_puts_them(sources):
    assert vendor_bits(sources.kernel) == BITS
    assert sorted(BITS) == list(range(32))


def test_codes_are_in_the_order_of_the_packages_threads():
    w = layer("mxfp4", 128, 128, E=1)
    packed = backend.pack(w, problem(w))
    for name, q in (("w13", w.w13), ("w2", w.w2)):
        natural = torch.cat(q.codes[0].chunk(2)[::-1]) if name == "w13" else q.codes[0]
        assert torch.equal(packed.tensors[f"{name}.codes"][0], tile_slowly(natural))


def test_exponents_are_where_the_packages_function_puts_them(sources):
    w = layer("mxfp4", 256, 128)
    packed = backend.pack(w, problem(w))
    for name, q in (("w13", w.w13), ("w2", w.w2)):
        natural = torch.cat(q.scales.chunk(2, 1)[::-1], 1) if name == "w13" else q.scales
        assert torch.equal(packed.tensors[f"{name}.scales"], sources.fold(natural.contiguous()))


@pytest.mark.parametrize("activation", KINDS, ids=lambda a: a.name)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_layer_through_the_entry_point(scheme, activation):
    w = layer(scheme, activation=activation, seed=5)
    run = backend.CutlassExperts(backend.pack(w, problem(w)), EntryPoint(w), torch.device("cpu"))
    x, ids, weights = random_inputs(5, 256, 3, 2)
    ids[2], ids[3, 0] = -1, -1
    out = torch.full_like(x, float("nan"))
    assert run(x, ids, weights, out=out) is out
    assert relative_error(out, reference(w, x, ids, weights)) < 1e-2
    assert not out[2].any()


@pytest.mark.parametrize("size", [(256, 128), (192, 96)])
@pytest.mark.parametrize("scheme", BLACKWELL)
def test_a_layer_on_blackwell(scheme, size):
    w = layer(scheme, *size, activation=Activation.parse("swigluoai") if scheme.startswith("mx") else None, seed=5)
    p = problem(w, SM100, BLACKWELL[scheme])
    run = backend.CutlassExperts(backend.pack(w, p), BlackwellEntryPoint(scheme), torch.device("cpu"))
    x, ids, weights = random_inputs(5, size[0], 3, 2)
    ids[2], ids[3, 0] = -1, -1
    out = torch.full_like(x, float("nan"))
    assert run(x, ids, weights, out=out) is out
    limit = 1e-2 if scheme == "nvfp4" else tolerance("bf16", BLACKWELL[scheme])  # nvfp4's rows the kernel rounds
    assert relative_error(out, reference(w, x, ids, weights)) < limit
    assert not out[2].any()


def test_padding_one_bias_and_the_router_weight_on_the_input():
    w = layer("bf16", 100, 60)
    w = replace(w, w13=replace(w.w13, bias=None))
    run = backend.CutlassExperts(backend.pack(w, problem(w)), EntryPoint(w), torch.device("cpu"))
    x, ids, weights = random_inputs(5, 100, 3, 1)
    weights = weights * 0.5
    want = reference(w, x, ids, weights, router_weight_on_input=True)
    assert relative_error(run(x, ids, weights, router_weight_on_input=True), want) < 1e-2
    assert run(x[:0], ids[:0], weights[:0]).shape == (0, 100)


def test_the_row_says_what_was_run_on_hardware():
    assert next(b for b in BACKENDS if b.name == NAME).hardware.startswith(
        "e2m1, e4m3, bf16 run on SM90 (not e2m1 on mxfp8, e4m3 on mxfp8, e2m1 on nvfp4). All else not run on hardware"
    )
