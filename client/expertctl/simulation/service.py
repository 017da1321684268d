"""How long a server computes, by the tokens of a batch."""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from expertctl.common.workload import LayerShape, layer_shapes, routes, with_routes
from expertd_client.clients.client import ExpertClient
from expertd_client.cluster.identity import held_by
from expertd_client.requests.request import Request

__all__ = ["H200_INT4", "Service", "measured"]


@dataclass(frozen=True, slots=True)
class Service:
    """batches: (tokens, seconds), ascending: between them in proportion, beyond the last one with its slope.

    late_s       by how much a batch takes longer: as likely each
    ways_s       there and back, without what the server computes: as likely each
    max_tokens   that a server computes at once
    """

    batches: Sequence[tuple[int, float]]
    ways_s: Sequence[float]
    max_tokens: int = 4096
    late_s: Sequence[float] = (0.0,)

    def batch_s(self, tokens: int) -> float:
        """Of a batch."""
        at = bisect_left(self.batches, (tokens, 0.0))
        if at == 0 or len(self.batches) == 1:
            return self.batches[0][1] if tokens <= self.batches[0][0] else self.batches[0][1] * tokens
        (m0, s0), (m1, s1) = self.batches[min(at, len(self.batches) - 1) - 1 : min(at, len(self.batches) - 1) + 1]
        return s0 + (s1 - s0) * (tokens - m0) / (m1 - m0)


H200_INT4 = Service(
    ((1, 11.1e-6), (8, 37.8e-6), (32, 72.5e-6), (128, 87.6e-6), (512, 127e-6), (2048, 305e-6), (8192, 1000e-6)),
    tuple((140 + n) * 1e-6 for n in range(51)),
)
"""The layer of Qwen3-30B-A3B in int4 on an H200, as kernels/bench measured it, behind streams whose round trips take
140 to 190 us."""


def measured(address: str, rounds: int = 20) -> Service:
    """Of the first layer that a server holds: medians of what it says of batches of 1, 2, 4 ... tokens as a cluster
    would send them there, none of them joined with others."""
    with ExpertClient(address, timeout_s=30.0) as client:
        described = client.describe()
        (shape, *_), most = layer_shapes(described, None, None), described.limits.max_tokens or 4096
        batches, ways, late = [], [], []
        held = held_by(described)[shape.layer]
        for tokens in (1 << n for n in range(most.bit_length())):
            request, inside = _part(np.random.default_rng(tokens), tokens, shape, held), []
            for _ in range(rounds):
                begin_s = time.perf_counter()
                timing = client.forward_request(request).timing
                took_s = time.perf_counter() - begin_s
                inside.append(1e-9 * (timing.copy_in_ns + timing.kernel_ns + timing.copy_out_ns))
                ways.append(took_s - inside[-1])
            batches.append((tokens, statistics.median(inside)))
            late += [max(0.0, seconds - batches[-1][1]) for seconds in inside]
        return Service(batches, ways, most, late)


def _part(rng: np.random.Generator, tokens: int, shape: LayerShape, held: Sequence[int]) -> Request:
    """So many tokens, each with a route to one of those experts at least; the routes to others are left out."""
    found = np.empty((0, shape.top_k), np.int32)
    while len(found) < tokens:
        ids = routes(rng, tokens, shape, 0.0)
        ids[~np.isin(ids, held)] = -1
        found = np.concatenate([found, ids[(ids >= 0).any(axis=1)]])
    return with_routes(rng, shape, found[:tokens])
