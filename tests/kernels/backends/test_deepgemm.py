"""The row `deepgemm`: its packing, and the parameters of the package's own source.  Whole layers: test_glue.py."""

import ast
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from vendor import bits, functions, package_folder

from expertd_kernels import NAMED_DEVICES, ActivationQuant, decide, problem_of
from expertd_kernels.backends import deepgemm as backend
from expertd_kernels.backends.rounding import round_groups
from expertd_kernels.backends.scales import as_f32, as_stored
from expertd_kernels.common.refused import Refused
from expertd_kernels.oracle.probe import assumed_packages
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.sources.synthetic import random_weights
from expertd_kernels.weights.numerics import relative_error
from expertd_kernels.weights.scheme import Element, ScaleType, Scheme

NAME = "deepgemm"
SCHEMES = ("bf16", "e4m3_block128")


def layer(scheme, H=256, I=128, E=5, **kw):
    return random_weights(scheme, E, H, I, **kw)


def problem(w, device="sm90", **kw):
    rounded = w.w13.scheme.element is Element.E4M3
    how = {"activation_quant": ActivationQuant.E4M3_GROUP128 if rounded else ActivationQuant.NONE, **kw}
    return problem_of(w, NAMED_DEVICES[device], top_k=2, packages=dict(assumed_packages(BACKENDS)), **how)


def refusals(w, device="sm90", **kw):
    return next(v for v in decide(problem(w, device, **kw)).verdicts if v.backend == NAME).refusals


@pytest.mark.parametrize("scheme", SCHEMES)
def test_unpacking_gives_back_every_bit_and_packing_shares_no_memory(scheme):
    w = layer(scheme, bias=True)
    before = bits(w)
    packed = backend.pack(w, problem(w))
    assert bits(backend.unpack(packed)) == before
    for t in packed.tensors.values():
        t.view(-1).view(torch.uint8).fill_(1)
    assert bits(w) == before


@pytest.mark.parametrize("kind", [ScaleType.BF16, ScaleType.F16, ScaleType.E8M0])
def test_scales_of_other_types_come_back_as_they_were(kind):
    w = layer(Scheme(Element.E4M3, 128, 128, kind))
    assert refusals(w) == ()
    assert bits(backend.unpack(backend.pack(w, problem(w)))) == bits(w)


def test_every_exponent_is_a_number_and_comes_back():
    stored = torch.arange(255, dtype=torch.int32).to(torch.uint8)
    numbers = as_f32(stored, ScaleType.E8M0)
    assert numbers.tolist() == [2.0 ** (b - 127) for b in range(255)]
    assert torch.equal(as_stored(numbers, ScaleType.E8M0), stored)


REFUSED = {
    "Blackwell's rounded scales": (
        lambda: refusals(layer("e4m3_block128"), "sm100"),
        "e4m3_block128: needs compute capability 9.0, this is cuda:sm100",
    ),
    "weight-only": (
        lambda: refusals(layer("e4m3_block128"), activation_quant=ActivationQuant.NONE),
        "rounds activations (e4m3_group128), and these are to stay in bf16",
    ),
    "cut blocks": (lambda: refusals(layer("e4m3_block128", I=192)), "I = 192 is no multiple of 128"),
    "odd bf16": (lambda: refusals(layer("bf16", H=96)), "H = 96 is no multiple of 64"),
    "Ada": (lambda: refusals(layer("bf16"), "sm89"), "needs compute capability 9.0"),
    "int4": (lambda: refusals(layer("int4_g128")), "does not compute on int4 weights"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_package_cannot_do_is_refused_before_packing(case):
    ask, sentence = REFUSED[case]
    assert any(sentence in r for r in ask()), ask()


def test_bf16_is_served_on_blackwell_too():
    assert refusals(layer("bf16"), "sm100") == ()


def test_another_layout_version_is_refused():
    w = layer("e4m3_block128")
    packed = backend.pack(w, problem(w))
    with pytest.raises(Refused, match="layout version 0, want 1"):
        backend.experts(replace(packed, meta={**packed.meta, "layout_version": 0}), problem(w))


@pytest.fixture(scope="module")
def sources():
    folder = package_folder("deep_gemm")
    return folder, ast.parse((folder / "__init__.py").read_text())


def test_the_entry_points_have_these_parameters(sources):
    _, tree = sources
    found = {n.name: [a.arg for a in n.args.args] for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    aliases = {
        n.targets[0].id: n.value.id
        for n in ast.walk(tree)
        if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name) and isinstance(n.value, ast.Name)
    }
    for name in ("m_grouped_bf16_gemm_nt_contiguous", "m_grouped_fp8_gemm_nt_contiguous"):
        assert found[aliases.get(name, name)][:4] == ["a", "b", "d", "grouped_layout"]
    assert "get_mk_alignment_for_contiguous_layout" in (sources[0] / "__init__.py").read_text()


def test_activations_are_rounded_as_the_package_rounds_them(sources):
    folder, _ = sources
    own = functions(
        folder / "utils" / "math.py",
        {"ceil_div", "align", "ceil_to_ue8m0", "per_token_cast_to_fp8"},
        ModuleType("math"),
    )
    x = torch.randn(6, 384, generator=torch.Generator().manual_seed(3)).bfloat16()
    codes, scale = round_groups(x)
    theirs, their_scale = own.per_token_cast_to_fp8(x, use_ue8m0=False)
    assert torch.equal(scale, their_scale)
    assert (codes.view(torch.uint8) != theirs.view(torch.uint8)).float().mean() < 1e-2  # theirs takes the reciprocal
    assert relative_error(codes.float(), theirs.float()) < 1e-2


def test_the_row_says_where_it_was_run():
    assert next(b for b in BACKENDS if b.name == NAME).hardware.startswith("run on SM90 only")
