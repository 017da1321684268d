"""A listener for sessions over TCP, in front of an engine with a backend that one can compute by hand."""

import threading

import numpy as np
from tcp_kit import request
from waiting import until

from expertd.codec import ForwardResponseView
from expertd_server.engine.tcp_connections import TcpBounds

H, E, K, M = 32, 4, 2, 16
BOUNDS = TcpBounds(64 << 10, 1 << 20, 8, half_s=0.4, unread_s=0.5)


class Doubles:
    """out = x * the weights' sum"""

    backend = "doubles"

    def __init__(self):
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def hold(self):
        """From now on a batch waits for the gate."""
        self.gate.clear()
        self.entered.clear()

    def until_held(self):
        assert self.entered.wait(20)

    def __call__(self, hidden_states, topk_ids, topk_weights, *, router_weight_on_input=False, out=None):
        self.entered.set()
        assert self.gate.wait(20)
        return out.copy_(hidden_states * topk_weights.sum(1, keepdim=True))


def batch(tokens=3, seed=0):
    g = np.random.default_rng(seed)
    x = g.integers(1, 9, (tokens, H)).astype(np.float32)
    return x, np.zeros((tokens, K), np.int32), np.full((tokens, K), 1.5, np.float32)


def call(peer, number=1, tokens=3, **more):
    """One request; its answer is checked."""
    x, ids, w = batch(tokens, number)
    peer.send(request(number, x, ids, w, **more))
    answer = peer.receive()
    assert isinstance(answer, ForwardResponseView), answer
    assert answer.request_id == number
    assert np.array_equal(np.frombuffer(answer.output.raw, np.float32).reshape(tokens, H), 3 * x)
    return answer


def gone(listener, sessions=0):
    until(lambda: listener.sessions == sessions)
