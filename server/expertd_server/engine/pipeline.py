"""Batches on their way through the device: filled, launched, collected, in order.  For the engine's thread.

begin(batch)   fill a free lane and launch
finish()       wait for the oldest batch under way; its output stands until its lane is given back
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from expertd.errors import BackendFailedError, DrainingError, ExpertdError
from expertd_kernels.protocol import ExpertsLostError
from expertd_server.engine.batch import Batch, fill
from expertd_server.engine.halves import unheard
from expertd_server.engine.lane import Inputs, Lane, Trouble, compute_stream, lanes
from expertd_server.engine.request import Array, Stages
from expertd_server.engine.served import ServedLayer

__all__ = ["BatchFailedError", "Computed", "Pipeline"]


class BatchFailedError(Exception):
    """A batch could not be computed.  error: what its requests are answered with; fault: why nothing can be computed in
    this process any more, "" where it can."""

    def __init__(self, batch: Batch, error: ExpertdError, fault: str) -> None:
        super().__init__(error.message)
        self.batch, self.error, self.fault = batch, error, fault


class Computed(NamedTuple):
    """out: [rows, H] on the host, at least the batch's tokens; it stands until give_back()."""

    batch: Batch
    out: Tensor
    stages: Stages
    lane: Lane


class Pipeline:
    """The lanes of one device and what is in them.  stream: what their batches are computed on, None on a CPU.
    nonfinite: of batch.NONFINITE."""

    def __init__(
        self, device: torch.device, compute_dtype: str, nonfinite: str = "pass", trouble: Trouble = unheard
    ) -> None:
        self._dtype, self._nonfinite = compute_dtype, nonfinite
        self.stream = compute_stream(device)
        self._lanes = lanes(device, compute_dtype, self.stream, trouble)
        self._free = deque(self._lanes)
        self._under_way: deque[tuple[Lane, Batch]] = deque()
        self._ids = _Ids()

    @property
    def busy(self) -> bool:
        """Whether a batch is under way."""
        return bool(self._under_way)

    @property
    def full(self) -> bool:
        """Whether no lane is free."""
        return not self._free

    @property
    def graph_bytes(self) -> int:
        """Of the device, that captured graphs took."""
        return sum(lane.graph_bytes for lane in self._lanes)

    def reserve(self, tokens: int, layers: Iterable[ServedLayer]) -> None:
        """Room for the largest batch of any of `layers`: pinned memory that grows under load stops the device."""
        sizes = [(s.top_k, s.hidden_size, s.in_place) for s in layers]
        if sizes:
            routes, hidden_sizes, in_place = zip(*sizes, strict=True)
            for lane in self._lanes:
                lane.reserve(tokens, max(routes), max(hidden_sizes), all(in_place))

    def forget(self, generations: Collection[int]) -> None:
        """Drop what is kept for layers that are not held any more."""
        for lane in self._lanes:
            lane.forget(generations)

    def begin(self, b: Batch) -> None:
        """Fill a free lane and launch.  Raises BatchFailedError."""
        lane = self._free.popleft()
        start = time.perf_counter_ns()
        try:
            top_k = b.top_k
            b.padded, routes = lane.size(b.tokens, b.layer.capturable), b.tokens * top_k
            inputs = all_rows = lane.open(b.padded, top_k, b.layer.hidden_size)
            if b.padded > b.tokens:  # the rest of the rows has no routes
                all_rows.slots[routes:] = -1
                inputs = Inputs(
                    all_rows.hidden[: b.tokens * b.layer.hidden_size],
                    all_rows.slots[:routes],
                    all_rows.weights[:routes],
                )
            fill(b, inputs, top_k, self._dtype, self._ids.get(routes), self._nonfinite)
            b.fill_ns = time.perf_counter_ns() - start
            lane.launch(b.layer, b.requests[0].router_weight_on_input)
        except Exception as e:
            raise self._failure(lane, b, e) from e
        self._under_way.append((lane, b))

    def finish(self) -> Computed:
        """Wait for the oldest batch under way.  Raises BatchFailedError."""
        lane, b = self._under_way.popleft()
        try:
            out, stages = lane.collect()
        except Exception as e:
            raise self._failure(lane, b, e) from e
        return Computed(b, out, stages._replace(copy_in_ns=stages.copy_in_ns + b.fill_ns), lane)

    def give_back(self, c: Computed) -> None:
        """The output was read."""
        self._free.append(c.lane)

    def _failure(self, lane: Lane, b: Batch, e: Exception) -> BatchFailedError:
        fault = lane.fault()
        self._free.append(lane)
        where = f"backend {b.backend}, layer {b.layer.layer}, {b.tokens} tokens"
        if isinstance(e, ExpertsLostError):  # no fault of the requests: another replica has other weights
            return BatchFailedError(b, DrainingError(f"{where}: {e}; ask another replica"), f"cache: {e}")
        error = BackendFailedError(f"{where}: {type(e).__name__}: {e}")
        return BatchFailedError(b, error, fault and f"the device is lost to this process: {fault}")


class _Ids:
    """Reused room for a batch's global ids."""

    def __init__(self) -> None:
        self._room = np.empty(0, np.int64)

    def get(self, count: int) -> Array:
        if count > len(self._room):
            self._room = np.empty(1 << (count - 1).bit_length(), np.int64)
        return self._room[:count]
