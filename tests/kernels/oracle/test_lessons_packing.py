"""Lessons about packing, over every line of the oracle's table: weights are given back, biases stay with their matrix,
and what the rules refuse no packer takes; and that each lesson sees the mistake that it is about."""

from dataclasses import replace

import pytest
import torch
from backend_lines import LINES
from lesson_cases import biases_of_both, obeys_the_routes, own, zero_points_of_both
from vendor import check_packing

from expertd_kernels import ActivationQuant
from expertd_kernels.common.refused import Refused
from expertd_kernels.oracle.decision import backend_module
from expertd_kernels.oracle.rules import judge
from expertd_kernels.weights.scheme import Element, Scheme

EVERY = pytest.mark.parametrize("line", LINES, ids=lambda line: line.name)


@EVERY
def test_weights_are_not_converted_twice_on_reload(line):
    """Packing changes nothing that it was given, and packing what was unpacked gives the same bytes."""
    w = line.weights(2)
    check_packing(backend_module(line.backend), w, line.problem(w))


@EVERY
def test_each_matrix_keeps_its_own_bias_and_zero_points(line):
    w = line.weights(2)
    module = backend_module(line.backend)
    back = module.unpack(module.pack(w, line.problem(w)))
    for name in ("w13", "w2"):
        given, got = getattr(w, name), getattr(back, name)
        for field in ("bias", "zeros"):
            left, right = getattr(given, field), getattr(got, field)
            assert (left is None) == (right is None), (name, field)
            assert left is None or torch.equal(left, right), (name, field)
    assert (w.w13.bias is not None) == line.biased


def asked(line):
    """(what is added, weights, rounding) that the line may not serve."""
    w = line.weights(2)
    other = ActivationQuant.INT8_TOKEN if line.rounding is not ActivationQuant.INT8_TOKEN else ActivationQuant.NONE
    yield "bias", line.weights(2, bias=True), line.rounding
    yield "activation order", line.weights(2, act_order=True), line.rounding
    yield "rounding", w, other
    yield "two schemes", line.weights(2, w2_scheme="bf16" if line.scheme.element is not Element.BF16 else "f16"), None
    if line.scheme.element in (Element.INT4, Element.INT8) and not line.scheme.zeros:
        yield "zero points", line.weights(2, scheme=replace(line.scheme, zeros=True)), line.rounding
    yield "another element", line.weights(2, scheme=Scheme(Element.F16)), line.rounding


@EVERY
def test_packers_assert_what_the_rules_refuse(line):
    """A caller that goes past the oracle meets a wall: nothing is dropped on the way into a layout."""
    module, met = backend_module(line.backend), []
    for what, w, rounding in asked(line):
        p = replace(line.problem(w), activation_quant=line.rounding if rounding is None else rounding)
        if judge(line.backend, p):
            met.append(what)
            try:
                packed = module.pack(w, p)
            except (AssertionError, Refused, ValueError):
                continue
            other = packed.backend != line.backend.name  # triton's module serves three backends
            assert other, f"{line.name}: the rules refuse {what} ({judge(line.backend, p)}), and it was packed"
    assert met or line.backend.name in ("cpu", "cpu_torch", "reference", "triton")


CPU_TORCH = next(x for x in LINES if x.name == "cpu_torch int4_g32_zp")


def forgets(name, field):
    """Builds experts of weights whose matrix `name` has lost `field` on the way."""

    def build(line, w, p):
        q = getattr(w, name)
        lost = torch.full_like(q.zeros, 8) if field == "zeros" else None
        return own(line, replace(w, **{name: replace(q, **{field: lost})}), p)

    return build


def swaps_biases(line, w, p):
    wrong = None if w.w2.bias is None or w.w13.bias is None else w.w13.bias[:, : w.hidden_size]
    return own(line, replace(w, w2=replace(w.w2, bias=wrong)), p)


def routes_by_itself(change):
    """Experts that compute other ids and weights than they were given."""

    def build(line, w, p):
        right = own(line, w, p)
        return lambda x, ids, weights, **kw: right(x, *change(x, ids, weights), **kw)

    return build


def chosen_anew(x, ids, weights):
    order = torch.arange(ids.numel(), dtype=torch.int32).view_as(ids) % 3
    return torch.where(ids < 0, ids, order), weights


BROKEN = {
    "w2's bias is dropped": (biases_of_both, forgets("w2", "bias")),
    "w13's bias is dropped": (biases_of_both, forgets("w13", "bias")),
    "w13's bias is added for w2's": (biases_of_both, swaps_biases),
    "w13's zero points are dropped": (zero_points_of_both, forgets("w13", "zeros")),
    "w2's zero points are dropped": (zero_points_of_both, forgets("w2", "zeros")),
    "experts are chosen anew": (obeys_the_routes, routes_by_itself(chosen_anew)),
    "weights are normalized": (
        obeys_the_routes,
        routes_by_itself(lambda x, ids, w: (ids, w / w.sum(1, keepdim=True).clamp_min(0.1))),
    ),
    "absent routes go to expert 0": (
        obeys_the_routes,
        routes_by_itself(lambda x, ids, w: (ids.clamp_min(0), w)),
    ),
    "weights are taken as absolute": (obeys_the_routes, routes_by_itself(lambda x, ids, w: (ids, w.abs()))),
}


@pytest.mark.parametrize("mistake", BROKEN)
def test_a_lesson_sees_its_mistake(mistake):
    lesson, build = BROKEN[mistake]
    lesson(CPU_TORCH, own)
    with pytest.raises(AssertionError, match=r"error|\d"):
        lesson(CPU_TORCH, build)
