"""Capturing CUDA graphs, and small batches on a GPU that are replayed from them."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from expertd_server.engine import graphs as module
from expertd_server.engine.convert import bits_of
from expertd_server.engine.engine import Engine
from expertd_server.engine.graphs import GraphPool
from expertd_server.engine.policy import Policy
from expertd_server.engine.request import Answer, EngineRequest, Operand
from expertd_server.engine.served import ServedLayer
from expertd_server.engine.sizes import padded

H, K, E = 16, 2, 4


class FakeGraph:
    """What torch.cuda.CUDAGraph is asked.  fails: as torch does where a call cannot be captured."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.seen = fails, []

    def capture_begin(self, pool, capture_error_mode):
        assert capture_error_mode == "thread_local", "other threads go on with what they do"
        self.seen.append(pool)

    def capture_end(self):
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.seen.append("end")


@pytest.fixture
def handles(monkeypatch):
    """Those that torch was asked for."""
    given = []
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: given.append(f"pool {len(given)}") or given[-1])
    return given


def test_what_is_captured_is_run_between_begin_and_end(handles):
    graph = FakeGraph()
    GraphPool().record(graph, lambda: graph.seen.append("body"))
    assert graph.seen == ["pool 0", "body", "end"]


def test_graphs_share_a_pool_until_the_last_of_them_is_gone(handles):
    """torch refuses the handle of a pool whose graphs are all gone."""
    pool, a, b = GraphPool(), FakeGraph(), FakeGraph()
    for graph in (a, b):
        pool.record(graph, lambda: None)
    assert a.seen == b.seen == ["pool 0", "end"]
    del graph, a
    pool.record(c := FakeGraph(), lambda: None)
    assert c.seen == ["pool 0", "end"], "one of them is left"
    del b, c
    pool.record(d := FakeGraph(), lambda: None)
    assert d.seen == ["pool 1", "end"]


def test_a_capture_that_fails_leaves_the_generator_to_others(monkeypatch, handles):
    freed = []
    monkeypatch.setattr(module, "_free_generator", lambda: freed.append(1))
    pool = GraphPool()
    with pytest.raises(RuntimeError, match="not permitted"):
        pool.record(FakeGraph(fails=True), lambda: None)
    assert freed == [1]
    pool.record(graph := FakeGraph(), lambda: None)
    assert graph.seen == ["pool 1", "end"], "no graph is left of the one that failed"


class Experts:
    """out[t] = sum over the routes of weight * (slot + 1) * x[t]; waits for nothing, so it can be captured."""

    backend = "simple"

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, x, ids, weights, *, router_weight_on_input=False, out=None):
        self.sizes.append(len(x))
        factor = torch.where(ids >= 0, (ids + 1) * weights, 0.0).sum(dim=1, keepdim=True)
        return out.copy_(torch.where(factor == 0, 0.0, x * factor))


class Waits(Experts):
    """Looks at the device's numbers, which cannot be captured."""

    def __call__(self, x, ids, weights, **more):
        assert int(ids.max()) < E
        return super().__call__(x, ids, weights, **more)


def served(experts: Experts) -> ServedLayer:
    plan = ((22, "simple"), (None, "large"))
    return ServedLayer(0, E, range(E), K, H, 32, experts, "simple+large", capturable=True, plan=plan)


class Setup:
    """An engine with one capturable layer; ask(tokens, seed) answers and checks one request."""

    def __init__(self, device: str, experts: Experts) -> None:
        self.experts = experts
        self.layer = layer = served(experts)
        self.engine = Engine(torch.device(device), compute_dtype="f32", policy=Policy(1024))
        self.engine.hold([layer])
        self.engine.start()
        self.engine.open()

    def ask(self, tokens: int, seed: int, absent: bool = False) -> None:
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(tokens, H)).astype(np.float32)
        ids = rng.integers(0, E, (tokens, K)).astype(np.int32)
        ids[0, 0] = -1 if absent else ids[0, 0]
        w = rng.uniform(0.5, 1.5, (tokens, K)).astype(np.float32)
        done, got = threading.Event(), []

        def reply(r, outcome):
            assert isinstance(outcome, Answer), outcome
            got.append((outcome.output.copy(), outcome.routes_computed, outcome.batch_tokens, outcome.backend))
            done.set()

        operands = (Operand("f32", bits_of(torch.from_numpy(a).reshape(-1))) for a in (x,))
        self.engine.submit(
            EngineRequest(
                self.layer, tokens, K, *operands, Operand("i32", ids.reshape(-1)), Operand("f32", w.reshape(-1)), reply,
                arrival_ns=time.monotonic_ns(), output_dtype="f32",
            )
        )  # fmt: skip
        assert done.wait(20)
        (output, routes, batch, backend), right = got[0], x * np.where(ids >= 0, (ids + 1) * w, 0).sum(1, keepdims=True)
        np.testing.assert_allclose(output.reshape(tokens, H), right, rtol=1e-5)
        assert (routes, batch) == (tokens * K - absent, tokens)
        assert backend == ("simple" if padded(tokens) <= 22 else "large"), "the one that computed the padded batch"

    def end(self) -> None:
        self.engine.stop(10)


GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")]


@pytest.fixture(params=[pytest.param("cuda", marks=GPU)])
def on_gpu(request):
    made: list[Setup] = []
    yield lambda experts: made.append(Setup(request.param, experts)) or made[-1]
    for s in made:
        s.end()


def test_small_batches_are_replayed_and_follow_their_inputs(on_gpu):
    s = on_gpu(Experts())
    for n in range(60):
        s.ask((1, 3, 8, 40)[n % 4], seed=n, absent=n % 3 == 0)
    calls = len(s.experts.sizes)
    assert calls < 60, "replayed"
    for n in range(40):
        s.ask((1, 4, 7, 64)[n % 4], seed=100 + n)
    assert len(s.experts.sizes) == calls, "nothing is called any more"
    for n in range(4):
        s.ask(600, seed=n)
    large = s.experts.sizes[calls:]
    assert set(large) == {padded(600)}, "a large batch has the next size of the list"
    for n in range(4):
        s.ask(590, seed=10 + n)
    assert len(s.experts.sizes) == calls + len(large), "and is replayed, too"
    for n in range(8):
        s.ask(3, seed=200 + n)
    s.ask(5, seed=1)


def test_graphs_are_captured_again_after_all_were_dropped(on_gpu, caplog):
    s = on_gpu(Experts())
    for _ in range(3):
        for n in range(20):
            s.ask((1, 3)[n % 2], seed=n)
        calls = len(s.experts.sizes)
        for n in range(10):
            s.ask((1, 3)[n % 2], seed=50 + n)
        assert len(s.experts.sizes) == calls, "replayed"
        s.engine.without_graphs(torch.cuda.empty_cache)
    assert "could not be captured" not in caplog.text


def test_a_layer_that_replaces_another_is_replayed_from_its_first_batch_on(on_gpu, caplog):
    s = on_gpu(Experts())
    for n in range(60):
        s.ask((1, 3, 8, 40)[n % 4], seed=n)
    for version in (2, 3):
        s.experts = Experts()
        s.layer = served(s.experts)
        s.engine.hold([s.layer], version, keep=True)
        called = len(s.experts.sizes)
        assert called > 0, "its graphs were captured"
        for n in range(20):
            s.ask((1, 3, 8, 40)[n % 4], seed=100 + n)
        assert len(s.experts.sizes) == called, "replayed"
    assert "graph" not in caplog.text


def test_experts_that_wait_are_called_as_before(on_gpu, caplog):
    s = on_gpu(Waits())
    for n in range(20):
        s.ask((1, 3)[n % 2], seed=n)
    assert "could not be captured" in caplog.text
    assert len(s.experts.sizes) >= 20
    assert torch.isfinite(torch.randn(2, device="cuda")).all(), "who draws numbers in this process still can"
