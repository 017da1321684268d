"""An engine that stops while a kernel does not end, and what sessions over TCP leave behind."""

import ctypes as C
import logging
import socket
import threading

import numpy as np
import pytest
import torch
from allocated import allocated, needs_mallinfo
from core_library import needs_core
from listener_kit import BOUNDS, E, H, K, M, batch, call
from tcp_kit import HEAD, MAGIC, Twin, request
from waiting import until

from expertd.codec import encode_stream_request
from expertd.common.dtypes import DTYPE_NUMBER
from expertd_kernels.common.protocol import Direct
from expertd_server.config.values import Address
from expertd_server.engine import engine as module
from expertd_server.engine.abi import LayerFacts
from expertd_server.engine.core import Config, Core
from expertd_server.engine.engine import Engine
from expertd_server.engine.policy import Policy
from expertd_server.engine.served import ServedLayer
from expertd_server.engine.tcp_connections import TcpBounds, TcpConnections
from expertd_server.transports.tcp import TcpListener

pytestmark = [needs_core, pytest.mark.timeout(60)]


class Called:
    """Experts that a thread of sessions calls by itself: y = 3 x, when the gate is open."""

    backend = "called"

    def __init__(self) -> None:
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()
        self.thread = 0
        self._function = C.CFUNCTYPE(C.c_int32, C.c_void_p, C.c_void_p, C.POINTER(C.c_void_p))(self._call)

    def direct(self) -> Direct:
        return Direct(C.cast(self._function, C.c_void_p).value, 0, 0)

    def _call(self, context, experts, call) -> int:
        self.thread = threading.get_ident()
        self.entered.set()
        self.gate.wait(40)
        x, out, rows = call[0], call[3], call[4]
        n = rows * H
        x = np.frombuffer((C.c_float * n).from_address(x), np.float32)
        np.frombuffer((C.c_float * n).from_address(out), np.float32)[:] = 3 * x
        return 0

    def __call__(self, *args, **more):
        raise AssertionError("the core calls it by itself")


@pytest.fixture
def called():
    experts = Called()
    yield experts
    experts.gate.set()


@pytest.fixture
def engine(called, monkeypatch):
    monkeypatch.setattr(module, "_BRIEF_NS", 10**12)  # whatever finds the core asleep is computed by who brings it
    e = Engine(torch.device("cpu"), compute_dtype="f32", policy=Policy(max_tokens=M))
    brief = tuple((rows, K, 1000) for rows in (1, 4, 16))
    e.hold([ServedLayer(0, E, tuple(range(E)), K, H, 8, called, called.backend, measured=brief)])
    e.start()
    e.open()
    yield e
    called.gate.set()
    e.stop(10)


def test_a_kernel_that_hangs_on_the_thread_of_sessions_does_not_hold_up_the_end(engine, called, caplog):
    listener = TcpListener(engine, Address("127.0.0.1", 0), BOUNDS)
    listener.start()
    with Twin(listener) as peer:
        for number in range(1, 100):
            called.gate.clear()
            called.entered.clear()
            peer.send(request(number, *batch(3, number)))
            assert called.entered.wait(20)
            if called.thread != engine._thread.ident:  # else the core was awake, and took it
                break
            called.gate.set()
            peer.receive()
        engine.stop(0.3)
        assert not called.gate.is_set(), "it did not wait for the kernel"
    (said,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("stop: ")]
    assert "the thread of sessions over TCP" in said  # on a busy machine others, too
    assert "did not end in 0.3 s" in said
    assert "a batch of 3 tokens for layer 0 on backend called" in said
    called.gate.set()
    engine.stop(20)
    listener.close()


def test_an_engine_that_ends_in_time_says_nothing(engine, caplog):
    listener = TcpListener(engine, Address("127.0.0.1", 0), BOUNDS)
    listener.start()
    with Twin(listener) as peer:
        call(peer, 1)
    engine.stop(20)
    listener.close()
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def leave_one_in_the_core(rows: int) -> None:
    """A request of a session that the core has, and has not answered when both end."""
    bounds = {f"max_queue_{what}": 1 << 30 for what in ("requests", "tokens", "routes", "bytes")}
    core = Core(Config(lanes=1, max_tokens=rows, compute_dtype=DTYPE_NUMBER["f32"], **bounds))
    slots = np.arange(9, dtype=np.int32)
    facts = LayerFacts(generation=1, hidden_size=H, num_experts=8, held=8, top_k=K, slots=slots.ctypes.data)
    core.add_layer(facts, [(0, 0, "none")])
    peers = TcpConnections(core, TcpBounds(1 << 24, 1 << 30, 8), lambda name: 1)
    ours, theirs = socket.socketpair()
    peers.add(theirs.detach(), "caller")
    x, ids, w = np.ones((rows, H), np.float32), np.zeros((rows, K), np.int32), np.ones((rows, K), np.float32)
    data = encode_stream_request(request(1, x, ids, w))
    ours.sendall(HEAD.pack(MAGIC, len(data), 1, 0) + data)
    until(lambda: core.load().queued_requests == 1)
    assert peers.stop(20)
    ours.close()


@needs_mallinfo
def test_what_is_in_flight_when_sessions_end_is_given_back():
    rows = 32768  # 4 MiB in and 4 MiB out
    leave_one_in_the_core(rows)
    before = allocated()
    for _ in range(3):
        leave_one_in_the_core(rows)
    assert allocated() - before < rows * H * 4
