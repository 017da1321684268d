"""What the engine tells of itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from expertd_server.engine.request import Array, Stages
from expertd_server.engine.served import ServedLayer

__all__ = ["BatchReport", "LoadNow"]


class LoadNow(NamedTuple):
    """What a caller needs to choose between replicas.  token_ns: recent service time a token."""

    queued_tokens: int
    queued_requests: int
    token_ns: float
    draining: bool


class BatchReport(NamedTuple):
    """One computed batch, for metrics.  backend: the one that computed it; expert_tokens: [experts held] int64, routes
    that each slot served."""

    layer: ServedLayer
    backend: str
    tokens: int
    requests: int
    queue_ns: Sequence[int]
    stages: Stages
    expert_tokens: Array
