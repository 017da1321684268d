"""Experts in this process for one rank of an engine."""

from __future__ import annotations

from concurrent.futures import Future

import torch

from expertd.v1 import expert_service_pb2 as pb
from expertd_client.clients.forwarder import Forwarder
from expertd_client.requests.result import ForwardResult

H, E, TOP_K = 16, 8, 2
SCALES = torch.linspace(0.5, 2.0, E, dtype=torch.float64)


def expert_sum(x, ids, weights):
    """What Scaling answers, in float64: expert e multiplies with SCALES[e]."""
    factors = torch.where(ids >= 0, SCALES[ids.long().clamp(min=0)] * weights.double(), 0.0).sum(-1, keepdim=True)
    return x.double() * factors


class Scaling(Forwarder):
    """Experts that scale.  seen: requests; timeouts: theirs; log: what happened, in order."""

    def __init__(self):
        self.seen, self.timeouts, self.log = [], [], []

    def forward_request(self, request, *, timeout_s=None):
        self.log.append("sent")
        self.seen.append(request)
        self.timeouts.append(timeout_s)
        output = expert_sum(request.hidden_states, request.topk_ids, request.topk_weights)
        routes = int((request.topk_ids >= 0).sum())
        return ForwardResult(output.to(request.hidden_states.dtype), None, routes, pb.Timing(), pb.Load(), 0)

    def submit_request(self, request, *, timeout_s=None):
        future = Future()
        future.set_result(self.forward_request(request, timeout_s=timeout_s))
        return future

    def close(self):
        pass


class Connected:
    """What a Connection is to a layer.  found: the layers that asked."""

    def __init__(self, max_tokens=4096):
        self.forwarder, self.found, self._max_tokens = Scaling(), [], max_tokens

    def max_tokens(self, found):
        self.found.append(found)
        return self._max_tokens


def batch(tokens, seed=0):
    """x [M, H] f32, ids [M, TOP_K] i32, weights f32: nothing is zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(tokens, H, generator=generator) + 0.5
    ids = torch.rand(tokens, E, generator=generator).topk(TOP_K).indices.int()
    return x, ids, torch.rand(tokens, TOP_K, generator=generator) + 0.1
