"""CUDA graphs of small batches: what is captured and when, and batches that are padded to a captured size.  What needs
a GPU is at the end."""

from __future__ import annotations

import logging
import threading
import time

import numpy as np
import pytest
import torch

from expertd_server.engine import graphs as module
from expertd_server.engine.convert import bits_of
from expertd_server.engine.engine import Engine
from expertd_server.engine.graphs import Graphs, graph_key
from expertd_server.engine.lane import CpuLane, _Host, _Store
from expertd_server.engine.request import Answer, Operand, Request
from expertd_server.engine.scheduler import Policy
from expertd_server.engine.served import ServedLayer
from expertd_server.engine.sizes import padded

H, K, E = 16, 2, 4


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


class FakeGraph:
    """What torch.cuda.CUDAGraph is asked."""

    def __init__(self) -> None:
        self.replays = 0

    def capture_begin(self, pool, capture_error_mode):
        assert pool == "one for all"
        assert capture_error_mode == "thread_local", "other threads go on with what they do"

    def capture_end(self):
        pass

    def replay(self):
        self.replays += 1


@pytest.fixture
def graphs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(module, "_event", object)
    free = iter(range(10_000, 0, -10))
    monkeypatch.setattr(module, "free_now", lambda: next(free))
    return Graphs("one for all")


def test_what_comes_again_is_captured_once(graphs):
    bodies = []
    for captured in (0, 1, 1):
        graphs.capture((1,), lambda *events: bodies.append(events))
        assert len(bodies) == captured, "once is no reason to capture, and a graph is made once"
    found = graphs.get((1,))
    assert (found.copied, found.computed) == bodies[0]
    assert found.copied is not found.computed
    found.replay()
    assert graphs.get((2,)) is None
    assert (len(graphs), graphs.nbytes) == (1, 10), "what the driver had before and after"


def test_a_lane_holds_what_was_reserved_and_no_more():
    """Rows that a batch is padded to count: were they more than there is, the buffers would move under the graphs."""
    store = _Store(torch.float32, torch.device("cpu"))
    store.reserve(1000)
    assert store.nbytes == 4000
    before = store.get(10, 100).data_ptr()
    assert store.get(100, 10).data_ptr() == before
    assert store.get(1001, 1).data_ptr() != before
    assert store.nbytes == 4 * 1024
    host = _Host(torch.bfloat16, pinned=False)
    host.reserve(100, 8, 64)
    assert host.nbytes == 100 * (2 * 64 * 2 + 8 * 8)
    host.open(50, 8, 64)
    assert host.nbytes == 100 * (2 * 64 * 2 + 8 * 8)


def test_graphs_of_a_layer_that_is_held_no_more_are_dropped(graphs):
    for key in ((1, 8), (1, 16), (2, 8), (3, 8)):
        for _ in range(2):
            graphs.capture(key, lambda *events: None)
    graphs.forget({1, 3})
    assert [graphs.get(key) is not None for key in ((1, 8), (1, 16), (2, 8), (3, 8))] == [False, False, True, False]
    graphs.capture((1, 8), lambda *events: None)
    assert graphs.get((1, 8)) is None, "it begins to count again"


def test_whatever_changes_a_call_is_in_the_key_of_its_graph():
    def layer():
        return ServedLayer(0, E, range(E), K, H, 32, Experts(), "simple", capturable=True)

    one, again = layer(), layer()
    keys = [
        graph_key(one, False, 8, 2, 100, 200), graph_key(again, False, 8, 2, 100, 200),
        graph_key(one, True, 8, 2, 100, 200), graph_key(one, False, 16, 2, 100, 200),
        graph_key(one, False, 8, 4, 100, 200), graph_key(one, False, 8, 2, 101, 200),
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)
    assert {key[0] for key in keys} == {one.generation, again.generation}


def test_the_graphs_not_used_for_longest_go_first(graphs):
    graphs.most = 2

    def capture(key):
        for _ in range(2):
            graphs.capture(key, lambda *events: None)

    capture((1,))
    capture((2,))
    assert graphs.get((1,))
    capture((3,))
    assert [graphs.get(key) is not None for key in ((1,), (2,), (3,))] == [True, False, True]


def test_a_call_that_cannot_be_captured_is_made_as_before(graphs, monkeypatch, caplog):
    def refuse(graph):
        raise RuntimeError("operation not permitted when stream is capturing")

    freed = []
    monkeypatch.setattr(module, "_free_generator", lambda: freed.append(1))
    monkeypatch.setattr(FakeGraph, "capture_end", refuse)
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            graphs.capture((1,), lambda *events: None)
            assert graphs.get((1,)) is None
    assert len(caplog.records) == 1
    assert "not permitted" in caplog.text
    assert freed == [1]


class Setup:
    """An engine with one capturable layer; ask(tokens, seed) answers and checks one request."""

    def __init__(self, device: str, experts: Experts) -> None:
        self.experts = experts
        plan = ((22, "simple"), (None, "large"))
        layer = ServedLayer(0, E, range(E), K, H, 32, experts, "simple+large", capturable=True, plan=plan)
        self.layer = layer
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
            Request(
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


def test_a_padded_batch_answers_its_own_tokens(monkeypatch):
    monkeypatch.setattr(CpuLane, "size", lambda lane, tokens, capturable: padded(tokens) if capturable else tokens)
    s = Setup("cpu", Experts())
    try:
        for n, tokens in enumerate((5, 64, 3, 7, 1, 65, 18)):  # after a full batch its rows stand behind smaller ones
            s.ask(tokens, seed=n, absent=n % 2 == 1)
        assert s.experts.sizes == [8, 64, 4, 8, 1, 96, 32]
    finally:
        s.end()


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
    s.ask(600, seed=1)
    s.ask(600, seed=2)
    assert s.experts.sizes[calls:] == [600, 600], "large batches are called"
    for n in range(8):
        s.ask(3, seed=200 + n)
    s.ask(5, seed=1)


def test_experts_that_wait_are_called_as_before(on_gpu, caplog):
    s = on_gpu(Waits())
    for n in range(20):
        s.ask((1, 3)[n % 2], seed=n)
    assert "could not be captured" in caplog.text
    assert len(s.experts.sizes) >= 20
    assert torch.isfinite(torch.randn(2, device="cuda")).all(), "who draws numbers in this process still can"
