"""What the engine tells of itself."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from expertd_server.engine.request import Array, Stages
from expertd_server.engine.served import ServedLayer

__all__ = ["WAIT_BOUNDS_NS", "BatchReport", "CallReport", "LoadNow", "Moves", "RequestReport", "Waits", "stages_of"]

WAIT_BOUNDS_NS = tuple(m * 10**e for e in range(4, 10) for m in (1, 2, 5))
"""Bounds of the histogram of waits: 10 us to 5 s, three a decade; csrc/core.h has the same."""


class LoadNow(NamedTuple):
    """What a caller needs to choose between replicas.  token_ns: recent service time a token; wait_ns: until what waits
    and runs now is computed, as far as is known."""

    queued_tokens: int
    queued_requests: int
    token_ns: float
    draining: bool
    wait_ns: int = 0


class Waits(NamedTuple):
    """How long the requests of a batch waited.  counts: by WAIT_BOUNDS_NS, the last one longer."""

    counts: Sequence[int]
    sum_ns: int

    @classmethod
    def of(cls, waits_ns: Sequence[int]) -> Waits:
        counts = [0] * (len(WAIT_BOUNDS_NS) + 1)
        for ns in waits_ns:
            counts[bisect_left(WAIT_BOUNDS_NS, ns)] += 1
        return cls(counts, sum(waits_ns))


class BatchReport(NamedTuple):
    """Computed batches of one layer that are alike, for metrics; mostly one.

    backend         the one that computed them
    tokens, requests, stages   of each, on average
    waits           of all their requests
    expert_tokens   [experts held] int64, routes that each slot served, in all of them
    """

    layer: ServedLayer
    backend: str
    tokens: int
    requests: int
    waits: Waits
    stages: Stages
    expert_tokens: Array
    batches: int = 1


class Moves(NamedTuple):
    """Of experts among devices that share layers, so far.  experts: that changed their device; nbytes: of weights that
    were packed for that; failed: times."""

    experts: int = 0
    layers: int = 0
    nbytes: int = 0
    failed: int = 0


class CallReport(NamedTuple):
    """An RPC that has ended, as its metrics have it.  kind, service, method: grpc_type, ...; code: gRPC's name; bytes:
    of all its messages."""

    kind: str
    service: str
    method: str
    code: str
    seconds: float
    bytes_in: int
    bytes_out: int


class RequestReport(NamedTuple):
    """The way of one request that its caller traces.

    context      of the caller, as expertd.common.trace_context has it
    transport    "unary", "inline" (messages of a stream), "shm" or "tcp"
    reason       of the error that answered it, "" = it was computed
    arrival_ns, answered_ns   on time.monotonic_ns()'s clock
    stages       ((name, begin, end), ...) on it, in order: queue, collect, kernel, deliver; none of a refused one
    batch        what its batch was counted with; None where it was in none
    call         the RPC that was for it alone; None of one in a session
    """

    context: bytes
    transport: str
    layer: int
    tokens: int
    top_k: int
    reason: str
    backend: str
    batch_tokens: int
    batch_requests: int
    arrival_ns: int
    answered_ns: int
    stages: tuple[tuple[str, int, int], ...]
    batch: Stages | None = None
    call: CallReport | None = None


def stages_of(
    arrival_ns: int, queue_ns: int, collect_ns: int, kernel_ns: int, answered_ns: int, computed_ns: int = 0
) -> tuple[tuple[str, int, int], ...]:
    """Where the stages lie.  computed_ns: end of the kernel; 0 = the kernel followed the collecting at once.  What a
    device computes beside another batch waits between both."""
    cut = arrival_ns + queue_ns
    collected = cut + collect_ns
    end = computed_ns or collected + kernel_ns
    return (
        ("queue", arrival_ns, cut),
        ("collect", cut, collected),
        ("kernel", max(collected, end - kernel_ns), end),
        ("deliver", end, max(end, answered_ns)),
    )
