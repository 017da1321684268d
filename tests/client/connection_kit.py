"""What tests of ways beside the stream share: a layer whose answers are known, a real engine, and a transport whose
gRPC is a function."""

import threading

import numpy as np
import torch

from expertd.errors import UnavailableError
from expertd.shm.library import LibraryMissingError
from expertd.shm.library import library as shm_library
from expertd.shm.region import host_id, supported
from expertd.tcp.library import library as tcp_library
from expertd.v1 import expert_service_pb2 as pb
from expertd_server.engine.core import CoreMissingError, library
from expertd_server.engine.engine import Engine
from expertd_server.engine.policy import Policy
from expertd_server.engine.served import ServedLayer

H, E = 32, 4


def missing():
    """Why no way beside the stream can be tried here; "" = they can."""
    try:
        library(), shm_library(), tcp_library()
    except (CoreMissingError, LibraryMissingError) as e:
        return str(e)
    return supported()


class Sums:
    """out = x * the sum of weights * (slot + 1)"""

    backend = "sums"

    def __init__(self):
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, hidden_states, topk_ids, topk_weights, *, router_weight_on_input=False, out=None):
        assert self.gate.wait(20)
        factor = torch.where(topk_ids >= 0, (topk_ids + 1) * topk_weights, 0.0).sum(1, keepdim=True)
        return out.copy_(hidden_states.float() * factor)


def summing_engine(sums, max_tokens=64, layers=1):
    """Before its start()."""
    engine = Engine(torch.device("cpu"), compute_dtype="bf16", policy=Policy(max_tokens=max_tokens))
    engine.hold([ServedLayer(n, E, tuple(range(E)), 2, H, 8, sums, "sums") for n in range(layers)])
    return engine


def inputs(M, kind="numpy", dtype=np.float32, seed=0):
    """Arguments of forward() after the layer, and what is to come."""
    g = np.random.default_rng(seed)
    x = g.integers(-8, 8, (M, H)).astype(dtype)
    ids, w = g.integers(-1, E, (M, 2)).astype(np.int32), (g.integers(0, 8, (M, 2)) / 8).astype(np.float32)
    factor = np.where(ids >= 0, (ids + 1) * w, 0).sum(1, keepdims=True)
    want = x.astype(np.float32) * factor
    return (x, ids, w) if kind == "numpy" else tuple(map(torch.from_numpy, (x, ids, w))), want


class Inline:
    """Only answers the offer, with what `offered` says; what travels inline fails."""

    def __init__(self, name, offered, deliver, closed):
        self.name, self.offered, self.deliver, self.closed, self.asked = name, offered, deliver, closed, 0

    def offer(self, offer):
        token, endpoint, why = self.offered("me", host_id())
        verdicts = [pb.TransportVerdict(transport=self.name, accepted=not why, reason=why)]
        self.deliver(pb.SessionAnswer(verdicts=verdicts, token=token, endpoint=endpoint))

    def takes(self, request):
        return True

    def forward(self, request_id, timeout_us, request):
        self.asked += 1
        raise UnavailableError("inline")

    def cancel(self, request_id):
        pass

    def close(self):
        self.closed(UnavailableError("closed"))


class Transport:
    """offered: a door's offer()."""

    target = "127.0.0.1:1"

    def __init__(self, offered, channel):
        self.offered, self.offers = offered, [channel]

    def connect(self, deliver, closed):
        self.inline = Inline(self.offers[0].name, self.offered, deliver, closed)
        return self.inline

    def unary(self, method, request, answer, timeout_s, wait_for_ready, waiter):
        layer = pb.Layer(
            layer=0, num_experts=E, held=[pb.ExpertRange(count=E)], top_k=2, intermediate_size=8, backend="sums"
        )
        model = pb.Model(family="sums", hidden_size=H)
        waiter.answer(pb.DescribeResponse(model=model, layers=[layer], limits=pb.Limits(max_tokens=64)))

    def close(self):
        pass

    async def wait_closed(self):
        pass


def way(client):
    return client._exchange._link.session_connection
