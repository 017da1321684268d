"""Real engines behind listeners for shared memory and TCP, and the transport of a cluster's calls to them."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from cluster_kit import nothing_under_way
from connection_kit import Inline, missing
from waiting import until

from expertd.v1 import expert_service_pb2 as pb
from expertd_client.cluster import native
from expertd_client.transports.shm.connection import ShmTransport
from expertd_client.transports.tcp.connection import TcpTransport
from expertd_server.config.values import Address
from expertd_server.engine.engine import Engine
from expertd_server.engine.policy import Policy as Batching
from expertd_server.engine.served import ServedLayer
from expertd_server.engine.tcp_connections import TcpBounds
from expertd_server.transports.shm import ShmListener
from expertd_server.transports.tcp import TcpListener

MISSING = missing() or ("" if native.library() else "python -m expertd.cxx")
needs_libraries = pytest.mark.skipif(bool(MISSING), reason=MISSING or "there")

H, E, K = 48, 8, 3
LOW, HIGH, ALL = range(4), range(4, 8), range(8)
SPLIT_OR_WHOLE = pytest.mark.parametrize("holdings", [(LOW, HIGH), (ALL,)])


class Server:
    """out = x * the sum of weights * (expert + 1), over the experts held.  gate: shut = it waits; entered: a batch
    has come."""

    backend = "sums"

    def __init__(self, name, held, kind):
        self.name, self.held, self.kind = name, tuple(held), kind
        self.gate = threading.Event()
        self.gate.set()
        self.calls, self.entered = 0, threading.Event()
        self.engine = Engine(torch.device("cpu"), compute_dtype="bf16", policy=Batching(max_tokens=64))
        self.engine.hold([ServedLayer(0, E, self.held, K, H, 8, self, "sums")])
        self.engine.start()
        self.engine.open()
        if kind == "shm":
            self.listener = ShmListener(self.engine, arena_bytes=1 << 18)
        else:
            self.listener = TcpListener(self.engine, Address("127.0.0.1", 0), TcpBounds(8 << 20))
        self.listener.start()

    def __call__(self, hidden_states, topk_ids, topk_weights, *, router_weight_on_input=False, out=None):
        self.entered.set()
        assert self.gate.wait(20)
        self.calls += 1
        experts = torch.tensor([*self.held, -1])[topk_ids.long()]
        factor = torch.where(topk_ids >= 0, (experts + 1) * topk_weights, 0.0).sum(1, keepdim=True)
        return out.copy_(hidden_states.float() * factor)

    def close(self):
        self.gate.set()
        self.listener.close()
        self.engine.stop(10)


class Transport:
    """Whose inline way answers nothing."""

    def __init__(self, server):
        self.server, self.target = server, server.name
        self.offers = [ShmTransport() if server.kind == "shm" else TcpTransport("127.0.0.1:1")]

    def connect(self, deliver, closed):
        return Inline(self.server.kind, self.server.listener.offer, deliver, closed)

    def unary(self, method, request, answer, timeout_s, wait_for_ready, waiter):
        s = self.server
        held = [pb.ExpertRange(first=e, count=1) for e in s.held]
        layer = pb.Layer(layer=0, num_experts=E, held=held, top_k=K, intermediate_size=8, backend="sums")
        model = pb.Model(family="sums", hidden_size=H)
        waiter.answer(pb.DescribeResponse(model=model, layers=[layer], limits=pb.Limits(max_tokens=64)))

    def close(self):
        pass


def inputs(M, seed=0, dtype=np.float32, absent=0.2):
    g = np.random.default_rng(seed)
    x = g.integers(-8, 8, (M, H)).astype(dtype)
    ids = np.argsort(g.random((M, E)), axis=1)[:, :K].astype(np.int32)
    ids[g.random(ids.shape) < absent] = -1
    w = (g.integers(0, 8, (M, K)) / 8).astype(np.float32)
    factor = np.where(ids >= 0, (ids + 1) * w, 0).sum(1, keepdims=True)
    return (x, ids, w), x.astype(np.float32) * factor


def near(output, want):
    """As bf16 has it, in which the servers compute."""
    return np.allclose(np.asarray(output, np.float32), want, rtol=2e-2)


def nothing_left(cluster):
    """No work under way, no memory lent, no session used."""
    nothing_under_way(cluster)
    for m in cluster._members.by_address.values():
        way = m.exchange._link.session_connection
        if way is not None:
            until(lambda way=way: way._client.taken == 0)
            assert way._users == 1
            assert (way._tickets, way._waiting) == ({}, {})
