"""The row `deepgemm`: rows grouped by expert, and whole layers through stand-ins for the package's grouped GEMMs that
keep to its contract, with the parameters of its own source."""

import ast
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from vendor import bits, functions, package_folder

from expertd_kernels import NAMED_DEVICES, Activation, ActivationKind, ActivationQuant, decide, problem_of
from expertd_kernels.backends import deepgemm as backend
from expertd_kernels.backends.rounding import round_groups
from expertd_kernels.backends.scales import as_f32, as_stored
from expertd_kernels.float32 import reference
from expertd_kernels.numerics import relative_error, tolerance
from expertd_kernels.oracle import Refused
from expertd_kernels.probe import assumed_packages
from expertd_kernels.scheme import Element, ScaleType, Scheme
from expertd_kernels.synthetic import random_inputs, random_weights
from expertd_kernels.table import BACKENDS

NAME = "deepgemm"
SCHEMES = ("bf16", "e4m3_block128")
KINDS = [Activation(), Activation(limit=0.5), Activation.parse("swigluoai"), Activation(ActivationKind.GELU_AND_MUL),
         Activation(ActivationKind.RELU2)]  # fmt: skip


def layer(scheme, H=256, I=128, E=5, **kw):
    return random_weights(scheme, E, H, I, **kw)


def problem(w, device="sm90", **kw):
    rounded = w.w13.scheme.element is Element.E4M3
    how = {"activation_quant": ActivationQuant.E4M3_GROUP128 if rounded else ActivationQuant.NONE, **kw}
    return problem_of(w, NAMED_DEVICES[device], top_k=2, packages=dict(assumed_packages(BACKENDS)), **how)


def refusals(w, device="sm90", **kw):
    return next(v for v in decide(problem(w, device, **kw)).verdicts if v.backend == NAME).refusals


class Package:
    """Stands in for deep_gemm: its contract, checked, and a product in f32.  Blocks without an expert are NaN."""

    def __init__(self, alignment=128):
        self.alignment = alignment

    def get_mk_alignment_for_contiguous_layout(self):
        return self.alignment

    def _product(self, x, weights, d, grouped_layout):
        (M, K), (E, N, k) = x.shape, weights.shape
        assert k == K
        assert tuple(d.shape) == (M, N)
        assert (d.dtype, grouped_layout.dtype) == (torch.bfloat16, torch.int32)
        assert tuple(grouped_layout.shape) == (M,)
        assert grouped_layout.is_contiguous()
        d.fill_(float("nan"))
        assert M % self.alignment == 0
        for at in range(0, M, self.alignment):
            block = slice(at, at + self.alignment)
            experts = grouped_layout[block]
            e = int(experts[0])
            assert set(experts.tolist()) <= {e, -1}, "a block holds rows of one expert"
            assert -1 <= e < E
            valid = experts >= 0
            assert bool((valid[:-1] | ~valid[1:]).all()), "and those stand first"
            if e >= 0:
                d[block] = (x[block].float() @ weights[e].float().t()).bfloat16()

    def m_grouped_bf16_gemm_nt_contiguous(self, a, b, d, grouped_layout):
        assert a.dtype == b.dtype == torch.bfloat16
        assert a.is_contiguous()
        assert a.shape[1] % 64 == 0
        self._product(a, b, d, grouped_layout)

    def m_grouped_fp8_gemm_nt_contiguous(self, a, b, d, grouped_layout):
        (x, sx), (w, sw) = a, b
        assert x.dtype == w.dtype == torch.float8_e4m3fn
        assert sx.dtype == sw.dtype == torch.float32
        assert sx.is_contiguous()
        assert tuple(sx.shape) == (x.shape[0], x.shape[1] // 128)
        assert tuple(sw.shape) == (w.shape[0], w.shape[1] // 128, w.shape[2] // 128)
        big = sw.repeat_interleave(128, 1).repeat_interleave(128, 2)
        self._product(x.float() * sx.repeat_interleave(128, 1), w.float() * big, d, grouped_layout)


@pytest.mark.parametrize("alignment", [8, 128])
@pytest.mark.parametrize(("M", "k", "E"), [(1, 1, 1), (1, 4, 8), (7, 2, 3), (40, 3, 16), (33, 2, 512)])
def test_rows_are_grouped_by_expert_from_aligned_places(M, k, E, alignment):
    _, ids, _ = random_inputs(M, 8, max(E, k), k, seed=M)
    ids = (ids % E).contiguous()
    ids[M // 2, 0] = -1
    g = backend.group_rows(ids, E, alignment)
    R = len(g.expert)
    assert R % alignment == 0
    assert R - ids.numel() <= min(ids.numel(), E) * (alignment - 1) + alignment
    used = {}
    for t in range(M):
        for j in range(k):
            e, row = int(ids[t, j]), int(g.row[t, j])
            if e < 0:
                continue
            assert int(g.expert[row]) == e
            assert int(g.token[row]) == t
            used.setdefault(e, []).append(row)
    rows = sorted(r for each in used.values() for r in each)
    assert len(set(rows)) == len(rows), "no two routes share a row"
    assert set(rows) == set((g.expert >= 0).nonzero().flatten().tolist()), "the others are nobody's"
    for each in used.values():
        assert min(each) % alignment == 0
        assert max(each) - min(each) == len(each) - 1
        assert sorted(each) == each, "in the order of the tokens, run after run"


def test_no_route_at_all_gives_no_rows_of_any_expert():
    g = backend.group_rows(torch.full((3, 2), -1, dtype=torch.int32), 4, 128)
    assert not (g.expert >= 0).any()
    assert not g.row.any()


@pytest.mark.parametrize("activation", KINDS, ids=lambda a: a.name)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_layer_through_the_entry_points(scheme, activation):
    w = layer(scheme, activation=activation, bias=True, seed=5)
    assert refusals(w) == ()
    p = problem(w)
    run = backend.DeepGemmExperts(backend.pack(w, p), Package(), torch.device("cpu"))
    x, ids, weights = random_inputs(9, 256, 5, 2)
    ids[2], ids[3, 0] = -1, -1
    out = torch.full_like(x, float("nan"))
    assert run(x, ids, weights, out=out) is out
    assert not out[2].any()
    limit = tolerance("bf16", p.activation_quant)
    assert relative_error(out, reference(w, x, ids, weights)) < limit
    if p.activation_quant is not ActivationQuant.NONE:
        codes, scale = round_groups(x)
        exact = codes.float() * scale.repeat_interleave(128, 1)
        assert relative_error(out, reference(w, exact, ids, weights)) < limit


@pytest.mark.parametrize("scheme", SCHEMES)
def test_pieces_the_router_weight_on_the_input_and_no_tokens(scheme, monkeypatch):
    w = layer(scheme)
    p = problem(w)
    run = backend.DeepGemmExperts(backend.pack(w, p), Package(), torch.device("cpu"))
    x, ids, weights = random_inputs(11, 256, 5, 1)
    whole = run(x, ids, weights * 0.5, router_weight_on_input=True)
    want = reference(w, x, ids, weights * 0.5, router_weight_on_input=True)
    assert relative_error(whole, want) < tolerance("bf16", p.activation_quant)
    monkeypatch.setattr(backend, "MAX_ROUTES", 4)
    assert torch.equal(run(x, ids, weights * 0.5, router_weight_on_input=True), whole)
    assert run(x[:0], ids[:0], weights[:0]).shape == (0, 256)


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
def test_scales_of_other_types_come_back_as_they_were_and_are_read_as_numbers(kind):
    w = layer(Scheme(Element.E4M3, 128, 128, kind))
    assert refusals(w) == ()
    packed = backend.pack(w, problem(w))
    assert bits(backend.unpack(packed)) == bits(w)
    run = backend.DeepGemmExperts(packed, Package(), torch.device("cpu"))
    x, ids, weights = random_inputs(9, 256, 5, 2)
    limit = tolerance("bf16", ActivationQuant.E4M3_GROUP128)
    assert relative_error(run(x, ids, weights), reference(w, x, ids, weights)) < limit


def test_every_exponent_is_a_number_and_comes_back():
    stored = torch.arange(255, dtype=torch.int32).to(torch.uint8)
    numbers = as_f32(stored, ScaleType.E8M0)
    assert numbers.tolist() == [2.0 ** (b - 127) for b in range(255)]
    assert torch.equal(as_stored(numbers, ScaleType.E8M0), stored)


REFUSED = {
    "Blackwell's rounded scales": (
        lambda: refusals(layer("e4m3_block128"), "sm100"),
        "e4m3_block128: needs compute capability 9.0 to 9.0, this is cuda:sm100",
    ),
    "weight-only": (
        lambda: refusals(layer("e4m3_block128"), activation_quant=ActivationQuant.NONE),
        "rounds activations (e4m3_group128); weight-only is asked",
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


def test_packing_refuses_by_itself_too():
    w = layer("e4m3_block128", I=192)
    with pytest.raises(Refused, match="must divide each"):
        backend.pack(w, problem(w))
    w = layer("e4m3_block128")
    with pytest.raises(Refused, match="not computed with activations none"):
        backend.pack(w, problem(w, activation_quant=ActivationQuant.NONE))
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


def test_the_row_says_that_it_was_not_run_on_hardware():
    assert next(b for b in BACKENDS if b.name == NAME).hardware == "not run on hardware"
