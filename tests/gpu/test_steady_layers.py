"""What a layer promises to an engine built on it, through the public API, on a GPU, for each row of our own: graphs, no
allocation and no waiting once it is warm, the same bits again, any number of tokens and experts, grouped rows."""

import gc
import warnings
from contextlib import contextmanager

import pytest
import torch

from expertd_kernels import (
    NoBackendError,
    batched_routes,
    build,
    decide,
    detect_device,
    grouped_routes,
    problem_of,
    reference,
    relative_error,
    tolerance,
)
from expertd_kernels.measure.timing import captured, time_calls
from expertd_kernels.packed.integrity import reference_rows
from expertd_kernels.sources.synthetic import random_inputs, random_weights

pytestmark = pytest.mark.gpu
E, K, H, I = 32, 4, 1024, 512
LIMIT = tolerance("bf16")


def make(row, scheme, experts, hidden, inner, **more):
    """(weights, layer); skipped with the oracle's sentence where the row does not apply."""
    device = detect_device("auto")
    where = "cuda" if device.kind in ("cuda", "rocm") else device.kind
    weights = random_weights(scheme, experts, hidden, inner, signed_scales=True, device=where)
    try:
        decision = decide(problem_of(weights, device, **more), pin=row)
        decision.require()
    except NoBackendError as e:
        pytest.skip("; ".join(next(v for v in e.decision.verdicts if v.backend == row).refusals))
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU here")
    return weights, build(decision, weights)


@pytest.fixture(scope="module", params=["gluon_sm90", "triton"])
def layer(request):
    """(weights, experts): int4, 32 experts, top-4, 1024 x 512; packed and compiled once for all tests of a row."""
    return make(request.param, "int4_g128", E, H, I, top_k=K, deterministic=True)


def inputs(tokens, seed=0):
    return random_inputs(tokens, H, E, K, seed=seed, device="cuda")


def rows_right(weights, out, x, ids, w, rows):
    """Relative error of some rows, against the float32 reference of those rows alone."""
    return relative_error(out[rows], reference_rows(weights, x[rows], ids[rows], w[rows], False))


@pytest.mark.parametrize("tokens", [1, 8, 40])
def test_a_graph_through_the_public_api_follows_its_inputs(layer, tokens):
    weights, experts = layer
    x, ids, w = inputs(tokens)
    out = torch.empty_like(x)
    replay = captured(lambda i: experts(x, ids, w, out=out), 1, x.device)
    for seed in (1, 2):
        for held, new in zip((x, ids, w), inputs(tokens, seed), strict=True):
            held.copy_(new)
        if seed == 2:
            ids[0, 1:] = -1
            ids[tokens // 2 :] = E - 1
        out.fill_(float("nan"))
        replay(0)
        torch.cuda.synchronize()
        assert relative_error(out, reference(weights, x, ids, w)) <= LIMIT


@contextmanager
def no_synchronizing_calls():
    """torch raises where the host would wait for the device.  It also warns that the mode is a prototype, after it has
    set it: as an error, that warning left the mode on, and every later test of the process failed."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_warm_layer_neither_allocates_nor_waits(layer):
    weights, experts = layer
    sizes = (40, 1, 8, 300, 33)
    batches = [inputs(m, seed=m) for m in sizes]
    outs = [torch.empty_like(x) for x, _, _ in batches]
    for _ in range(2):
        for batch, out in zip(batches, outs, strict=True):
            experts(*batch, out=out)
    torch.cuda.synchronize()
    gc.collect()
    before, held = torch.cuda.memory_stats()["allocation.all.allocated"], torch.cuda.memory_allocated()
    with no_synchronizing_calls():
        for _ in range(20):
            for batch, out in zip(batches, outs, strict=True):
                experts(*batch, out=out)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert torch.cuda.memory_allocated() == held
    for batch, out in zip(batches, outs, strict=True):
        assert relative_error(out, reference(weights, *batch)) <= LIMIT


@pytest.mark.parametrize("tokens", [1, 8, 40, 300])
def test_the_same_bits_from_run_to_run(layer, tokens):
    _, experts = layer
    x, ids, w = inputs(tokens, seed=5)
    first = experts(x, ids, w).clone()
    for run in range(4):
        experts(*inputs(17 + 40 * run, seed=run))  # others in between: nothing of theirs may stay in a buffer
        out = torch.full_like(x, float("nan"))
        experts(x, ids, w, out=out)
        assert torch.equal(out, first)


def test_65536_tokens_go_in_pieces(layer):
    weights, experts = layer
    x, ids, w = inputs(65536, seed=9)
    ids[-3:, 1] = -1
    out = torch.full_like(x, float("nan"))
    experts(x, ids, w, out=out)
    assert torch.isfinite(out).all()
    ends = [m for at in range(8192, 65536, 8192) for m in (at - 1, at)]
    rows = torch.tensor([0, *ends, 65533, 65535, *range(100, 65536, 4099)], device="cuda")
    assert rows_right(weights, out, x, ids, w, rows) <= LIMIT


@pytest.mark.parametrize("form", ["contiguous", "batched"])
def test_rows_grouped_by_expert(layer, form):
    """Counts from none to all; rows behind the counts are zero."""
    weights, experts = layer
    T = 12
    counts = torch.zeros(E, dtype=torch.int32, device="cuda")
    counts[[1, 5, 31]] = torch.tensor([T, 1, 7], dtype=torch.int32, device="cuda")
    rows = torch.randn(E * T, H, device="cuda").bfloat16()
    routes = grouped_routes(counts, E * T) if form == "contiguous" else batched_routes(counts, T)
    out = torch.full_like(rows, float("nan"))
    experts(rows, *routes, out=out)
    assert relative_error(out, reference(weights, rows, *routes)) <= LIMIT
    assert (out[routes[0][:, 0] < 0] == 0).all()


@pytest.mark.parametrize("row", ["gluon_sm90", "triton"])
def test_one_expert_a_token_with_the_weight_on_its_input(row):
    weights, experts = make(row, "int4_g128", 16, 512, 256, top_k=1, router_weight_on_input=True)
    for tokens in (1, 40):
        x, ids, w = random_inputs(tokens, 512, 16, 1, seed=tokens, device="cuda")
        w = w * 0.3 + 0.1 * torch.rand_like(w)
        out = torch.full_like(x, float("nan"))
        experts(x, ids, w, router_weight_on_input=True, out=out)
        right = reference(weights, x, ids, w, router_weight_on_input=True)
        assert relative_error(out, right) <= LIMIT
        assert relative_error(right, reference(weights, x, ids, w)) > 10 * LIMIT, "the two ways differ"


@pytest.mark.parametrize("row", ["gluon_sm90", "triton"])
@pytest.mark.parametrize(("experts_held", "top_k"), [(1, 1), (512, 8)])
def test_one_expert_and_512(row, experts_held, top_k):
    weights, experts = make(row, "int4_g128", experts_held, 512, 256, top_k=top_k)
    for tokens in (1, 40):
        x, ids, w = random_inputs(tokens, 512, experts_held, top_k, seed=tokens, device="cuda")
        out = torch.full_like(x, float("nan"))
        experts(x, ids, w, out=out)
        assert relative_error(out, reference(weights, x, ids, w)) <= LIMIT


@pytest.mark.parametrize("row", ["gluon_sm90", "triton"])
@pytest.mark.parametrize("scheme", ["int4_g128", "e4m3_block128"])
def test_a_token_has_the_same_bits_in_any_batch_where_that_is_promised(row, scheme):
    weights, experts = make(row, scheme, E, H, I, top_k=K, batch_invariant=True)
    for tokens in (2, 9, 130, 1000):
        x, ids, w = inputs(tokens, seed=tokens)
        whole = experts(x, ids, w).clone()
        assert relative_error(whole, reference(weights, x, ids, w)) <= LIMIT
        for i in {0, 1, tokens // 2, tokens - 1}:
            assert torch.equal(experts(x[i : i + 1], ids[i : i + 1], w[i : i + 1])[0], whole[i]), (tokens, i)
        turned = torch.arange(tokens - 1, -1, -1, device="cuda")
        assert torch.equal(experts(x[turned], ids[turned], w[turned])[turned], whole)


def test_large_numbers_of_tokens_between_powers_of_two_compile_nothing(layer, monkeypatch):
    """A server pads small batches to sizes that it has warmed up, and warms up the powers of two above them: a size met
    first under load must not wait for a compiler."""
    from triton import knobs

    _, experts = layer
    for tokens in (512, 1024, 2048):
        experts(*inputs(tokens))
    compiled: list[str] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **facts: compiled.append(str(facts.get("src"))))
    for tokens in (513, 600, 777, 1000, 1023, 1025, 1500, 1999, 2047):
        experts(*inputs(tokens))
    assert compiled == []


def test_captured_calls_are_the_calls(layer):
    """As an autotuning run times them and a server makes them."""
    weights, experts = layer
    sets = [inputs(8, seed=i) for i in range(3)]
    outs = [torch.empty_like(x) for x, _, _ in sets]
    replay = captured(lambda i: experts(*sets[i], out=outs[i]), 3, torch.device("cuda"))
    for out in outs:
        out.fill_(float("nan"))
    for i in (2, 0, 1):
        replay(i)
    torch.cuda.synchronize()
    for batch, out in zip(sets, outs, strict=True):
        assert relative_error(out, reference(weights, *batch)) <= LIMIT
    assert 0 < time_calls(replay, 3, torch.device("cuda")) < 1e6
