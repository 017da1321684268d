"""The row `triton` on a GPU: the cases of tests/kernels/triton_cases.py and larger ones, graphs, steady state."""

import pytest
import torch
from triton_cases import LARGE, SMALL, run

from expertd_kernels import decide, detect_device
from expertd_kernels.backends import triton as backend
from expertd_kernels.measure.timing import captured
from expertd_kernels.oracle.probe import installed_packages
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.packed.builder import problem_of
from expertd_kernels.sources.synthetic import random_inputs, random_weights
from expertd_kernels.weights.float32 import reference
from expertd_kernels.weights.numerics import relative_error

pytestmark = pytest.mark.gpu
ALL = {**SMALL, **LARGE}
DEVICE = detect_device()


def row_of(case):
    if case.quant.value == "none":
        return "triton"
    return "triton_w4a8" if case.scheme_value().element.packed else "triton_w8a8"


def skip_if_refused(case):
    """With the oracle's own sentence."""
    small = random_weights(case.scheme_value(), 1, 64, 64, activation=case.activation, act_order=case.act_order)
    problem = problem_of(small, DEVICE, activation_quant=case.quant, packages=installed_packages(BACKENDS))
    verdict = next(v for v in decide(problem).verdicts if v.backend == row_of(case))
    if verdict.refusals:
        pytest.skip("; ".join(verdict.refusals))


@pytest.mark.parametrize("name", ALL)
def test_a_layer_agrees_with_the_reference(name, record_property):
    skip_if_refused(ALL[name])
    answer = run(ALL[name], DEVICE.kind, DEVICE)
    record_property("relative_error", answer["relative_error"])
    assert answer["unpacked"] == "", f"unpack(pack(w)) differs in {answer['unpacked']}"
    assert answer["relative_error"] <= answer["tolerance"]
    assert answer["own_error"] <= 2e-2  # up to 8.6e-3 seen: other sums turn some of h's roundings
    assert answer["repeated"], "a second call gave other bits"


@pytest.fixture
def layer():
    """(weights, experts) of a small int4 layer on the GPU."""
    skip_if_refused(SMALL["int4_g128"])
    weights = random_weights("int4_g128", 16, 512, 256, device="cuda", signed_scales=True)
    problem = problem_of(weights, DEVICE, top_k=4)
    return weights, backend.experts(backend.pack(weights, problem), problem)


@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_a_captured_graph_follows_new_inputs_and_routes(layer, tokens):
    weights, experts = layer
    x, ids, w = random_inputs(tokens, 512, 16, 4, seed=1, device="cuda")
    out = torch.full_like(x, float("nan"))
    replay = captured(lambda i: experts(x, ids, w, out=out), 1, x.device)
    for seed in (2, 3):
        others = random_inputs(tokens, 512, 16, 4, seed=seed, device="cuda")
        for held, new in zip((x, ids, w), others, strict=True):
            held.copy_(new)
        ids[0, 0] = -1
        out.fill_(float("nan"))
        replay(0)
        torch.cuda.synchronize()
        assert relative_error(out, reference(weights, x, ids, w)) <= 1e-2


def test_a_second_call_allocates_nothing(layer):
    _, experts = layer
    x, ids, w = random_inputs(300, 512, 16, 4, seed=1, device="cuda")
    out = torch.empty_like(x)
    experts(x, ids, w, out=out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    experts(x, ids, w, out=out)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_calls_of_one_kind_follow_their_own_tensors(layer, tokens):
    weights, experts = layer
    for seed in range(3):
        x, ids, w = random_inputs(tokens, 512, 16, 4, seed=seed, device="cuda")
        out = torch.full_like(x, float("nan"))
        experts(x, ids, w, out=out)
        assert relative_error(out, reference(weights, x, ids, w)) <= 1e-2


def test_rows_that_start_anywhere(layer):
    """After an aligned call of the same sizes: kernels compiled for aligned rows must not be taken."""
    weights, experts = layer
    x, ids, w = random_inputs(7, 512, 16, 4, seed=1, device="cuda")
    experts(x, ids, w)
    wide = torch.zeros(7, 520, dtype=torch.bfloat16, device="cuda")
    wide[:, 1:513] = x
    out = torch.full((7, 520), float("nan"), dtype=torch.bfloat16, device="cuda")
    experts(wide[:, 1:513], ids, w, out=out[:, 3:515])
    assert relative_error(out[:, 3:515], reference(weights, x, ids, w)) <= 1e-2
    assert bool(torch.isnan(out[:, :3]).all() & torch.isnan(out[:, 515:]).all())
