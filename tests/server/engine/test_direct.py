"""Experts that the core calls without Python: the same answers, and Python where they refuse."""

from __future__ import annotations

import ctypes as C
import threading
import time

import numpy as np
import pytest
import torch
from core_library import needs_core
from waiting import until_asleep

from expertd_kernels import build, decide, detect_device, problem_of
from expertd_kernels.common.protocol import Direct, DirectExperts
from expertd_kernels.native.library import kernel_error
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.sources.synthetic import random_weights
from expertd_kernels.weights.numerics import COMPUTE_DTYPE
from expertd_server.engine import engine as module
from expertd_server.engine.convert import bits_of
from expertd_server.engine.engine import Engine
from expertd_server.engine.policy import Policy
from expertd_server.engine.request import Answer, EngineRequest, Operand
from expertd_server.engine.served import ServedLayer

pytestmark = needs_core

H, NUM_EXPERTS, TOP_K = 64, 4, 2


class Call(C.Structure):
    """expertd_call of abi.h."""

    _fields_ = [
        *((name, C.c_void_p) for name in ("x", "ids", "weights", "out")),
        *((name, C.c_int64) for name in ("m", "x_stride")),
        *((name, C.c_int32) for name in ("top_k", "x_f32", "out_f32", "weight_on_input")),
    ]


FUNCTION = C.CFUNCTYPE(C.c_int32, C.c_void_p, C.c_void_p, C.POINTER(Call))


class Counting:
    """Experts that double what they get; in Python they count their calls.  code: what the direct call answers."""

    backend = "counting"

    def __init__(self, code: int = 0, pause_s: float = 0.0) -> None:
        self.in_python = 0
        self.threads: list[int] = []
        self._pause_s = pause_s
        self.calls: list[tuple[int, ...]] = []
        self._function = FUNCTION(self._call)
        self._code = code

    def direct(self) -> Direct:
        address = C.cast(self._function, C.c_void_p).value
        assert address is not None
        return Direct(address, 11, 22)

    def _call(self, context: int, experts: int, call: C._Pointer[Call]) -> int:
        c = call.contents
        self.threads.append(threading.get_ident())
        if self._pause_s:
            time.sleep(self._pause_s)
        self.calls.append((context, experts, c.m, c.x_stride, c.top_k, c.x_f32, c.out_f32, c.weight_on_input))
        if not self._code:
            x = np.frombuffer((C.c_float * (c.m * c.x_stride)).from_address(c.x), np.float32)
            np.frombuffer((C.c_float * x.size).from_address(c.out), np.float32)[:] = 2 * x
        return self._code

    def __call__(self, hidden_states, topk_ids, topk_weights, *, router_weight_on_input=False, out=None):
        self.in_python += 1
        return torch.mul(hidden_states, 2, out=out)


class Server:
    """An engine with one layer."""

    def __init__(self, experts, dtype: str) -> None:
        self.engine = Engine(torch.device("cpu"), compute_dtype=dtype, policy=Policy(64))
        self.engine.hold([ServedLayer(0, NUM_EXPERTS, range(NUM_EXPERTS), TOP_K, H, H, experts, experts.backend)])
        self.engine.start()
        self.engine.open()
        self.dtype = dtype

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        done, got = threading.Event(), []

        def reply(r: EngineRequest, outcome) -> None:
            assert isinstance(outcome, Answer), outcome
            got.append(torch.from_numpy(outcome.output.copy()))
            done.set()

        operands = (
            Operand(self.dtype, bits_of(x.reshape(-1))),
            Operand("i32", ids.numpy().reshape(-1)),
            Operand("f32", weights.numpy().reshape(-1)),
        )
        layer = self.engine.holding[0]
        more = {"arrival_ns": time.monotonic_ns(), "output_dtype": self.dtype}
        self.engine.submit(EngineRequest(layer, len(x), ids.shape[1], *operands, reply, **more))
        assert done.wait(20)
        return got[0].view(x.dtype).view(x.shape)


@pytest.fixture
def serve():
    made: list[Server] = []

    def serve(experts, dtype: str) -> Server:
        made.append(Server(experts, dtype))
        return made[-1]

    yield serve
    for s in made:
        s.engine.stop(10)


def batch(tokens: int, dtype: torch.dtype = torch.float32, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(NUM_EXPERTS, generator=g)[:TOP_K] for _ in range(tokens)]).to(torch.int32)
    weights = torch.rand(tokens, TOP_K, generator=g) + 0.1
    return torch.randn(tokens, H, generator=g).to(dtype), ids, weights


def test_what_the_call_is_told(serve):
    experts = Counting()
    s = serve(experts, "f32")
    x, ids, weights = batch(3)
    torch.testing.assert_close(s.forward(x, ids, weights), 2 * x, rtol=0, atol=0)
    assert experts.calls == [(11, 22, 3, H, TOP_K, 1, 1, 0)]
    assert experts.in_python == 0


def test_what_it_refuses_is_computed_in_python(serve):
    experts = Counting(code=1)
    s = serve(experts, "f32")
    for tokens in (1, 5):
        x, ids, weights = batch(tokens)
        torch.testing.assert_close(s.forward(x, ids, weights), 2 * x, rtol=0, atol=0)
    assert (len(experts.calls), experts.in_python) == (2, 2)


def test_a_brief_batch_is_computed_by_who_brought_it_while_the_core_sleeps(serve, monkeypatch):
    monkeypatch.setattr(module, "_BRIEF_NS", 10**9)  # a call through Python takes longer than what it stands for
    experts = Counting()
    s = serve(experts, "f32")
    end_s = time.monotonic() + 30
    while experts.threads.count(threading.get_ident()) < 20:  # the core's thread may wake by itself, too
        assert time.monotonic() < end_s, experts.threads
        n = len(experts.calls)
        x, ids, weights = batch(1 + n % 3, seed=n)
        torch.testing.assert_close(s.forward(x, ids, weights), 2 * x, rtol=0, atol=0)
        until_asleep(s.engine._thread)
    assert experts.threads[0] == s.engine._thread.ident
    assert set(experts.threads) == {s.engine._thread.ident, threading.get_ident()}
    assert experts.in_python == 0


def test_a_longer_one_is_not(serve):
    experts = Counting(pause_s=0.001)
    s = serve(experts, "f32")
    for _ in range(4):
        s.forward(*batch(1))
        until_asleep(s.engine._thread)
    assert experts.threads == [s.engine._thread.ident] * 4


def test_a_brief_one_that_is_refused_there_is_computed_in_python(serve, monkeypatch):
    monkeypatch.setattr(module, "_BRIEF_NS", 10**9)
    experts = Counting(code=0)
    s = serve(experts, "f32")
    for n in range(10):
        until_asleep(s.engine._thread)
        experts._code = int(n > 4)
        x, ids, weights = batch(1, seed=n)
        torch.testing.assert_close(s.forward(x, ids, weights), 2 * x, rtol=0, atol=0)
    assert experts.in_python == 5


def test_many_threads_bring_requests_while_layers_change(serve, monkeypatch):
    monkeypatch.setattr(module, "_BRIEF_NS", 10**9)
    experts = Counting()
    s = serve(experts, "f32")
    faults: list[BaseException] = []

    def caller(seed: int) -> None:
        try:
            for n in range(100):
                x, ids, weights = batch(1 + n % 4, seed=seed * 1000 + n)
                torch.testing.assert_close(s.forward(x, ids, weights), 2 * x, rtol=0, atol=0)
        except BaseException as e:
            faults.append(e)

    threads = [threading.Thread(target=caller, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    held = s.engine.holding[0]
    while any(t.is_alive() for t in threads):
        more = ServedLayer(1, NUM_EXPERTS, range(NUM_EXPERTS), TOP_K, H, H, experts, experts.backend)
        s.engine.hold([held, more])
        s.engine.hold([held])
        assert s.engine.forget([more], 10)
    for t in threads:
        t.join()
    assert not faults, faults[0]
    assert s.engine.idle()


@pytest.mark.skipif(bool(kernel_error()), reason=kernel_error() or "built")
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_the_cpu_kernel_gives_the_same_bits(serve, dtype):
    problem = problem_of(random_weights("int4_g32", NUM_EXPERTS, H, 32), detect_device("cpu"), compute_dtype=dtype)
    experts = build(decide(problem, BACKENDS, "cpu"), random_weights("int4_g32", NUM_EXPERTS, H, 32))
    assert isinstance(experts, DirectExperts)
    s = serve(experts, dtype)
    for tokens in (1, 2, 33):
        x, ids, weights = batch(tokens, COMPUTE_DTYPE[dtype], seed=tokens)
        want = experts(x, ids, weights)
        torch.testing.assert_close(s.forward(x, ids, weights), want, rtol=0, atol=0)
        assert want.abs().max() > 0
