"""Tensors of one batch that are sent again and again: a decoding loop, a benchmark, a captured step.

    with ExpertClient("127.0.0.1:50051") as experts:
        slot = experts.slot(tokens, hidden_size, top_k)
        for layer in layers:
            slot.hidden_states[:], slot.topk_ids[:], slot.topk_weights[:] = ...
            x += slot.forward(layer)

Over shared memory (exchange/session.py) the arrays lie where the server reads and writes: a forward copies nothing
and checks nothing but the answer.  Without it, and after such a session broke, the same calls travel as others do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from expertd.v1 import expert_service_pb2 as pb
from expertd_client.requests.deadline import Deadline, deadline_in
from expertd_client.requests.request import Request
from expertd_client.requests.tensors import empty
from expertd_client.tracing import recorder
from expertd_client.transports.protocol import ConnectionFullError

if TYPE_CHECKING:
    from expertd_client.clients.forwarder import Forwarder

__all__ = ["ConnectionSlot", "Slot"]


class ConnectionSlot(Protocol):
    """What a channel lends: the arrays of Slot, in memory that it shares with the server."""

    hidden_states: Any
    topk_ids: Any
    topk_weights: Any
    output: Any

    def forward(self, layer: int, deadline: Deadline | None) -> tuple[int, Callable[[], pb.Timing]]:
        """Sends what lies there and waits; the output is filled.  Returns (routes computed, what makes the timing).
        Raises ConnectionFullError, and then nothing was sent; else rows of expertd.errors."""
        ...


class Slot:
    """One batch at a time; not thread-safe.

    hidden_states     [M, H] of the dtype asked for, numpy; ml_dtypes.bfloat16 for bf16
    topk_ids          [M, top_k] int32, global ids, -1 = nobody's
    topk_weights      [M, top_k] float32
    output            [M, H]: what the last forward gave
    routes_computed   by the last forward
    """

    def __init__(
        self, client: Forwarder, made: ConnectionSlot | None, tokens: int, hidden_size: int, top_k: int, dtype: int
    ) -> None:
        """made: a channel's, or None."""
        self._client, self._made, self._dtype = client, made, dtype
        self._timing: Any = pb.Timing()
        self.routes_computed = 0
        if made is not None:
            self.hidden_states, self.output = made.hidden_states, made.output
            self.topk_ids, self.topk_weights = made.topk_ids, made.topk_weights
        else:
            self.hidden_states, self.output = (empty(tokens, hidden_size, dtype) for _ in range(2))
            self.topk_ids = np.full((tokens, top_k), -1, np.int32)
            self.topk_weights = np.zeros((tokens, top_k), np.float32)

    @property
    def timing(self) -> pb.Timing:
        """Of the last forward."""
        if callable(self._timing):
            self._timing = self._timing()
        timing: pb.Timing = self._timing
        return timing

    def forward(self, layer: int, *, timeout_s: float | None = None) -> Any:
        """The routed experts of `layer` for what the arrays hold now: `output`, the same array each time.  Raises the
        rows of expertd.errors."""
        if self._made is not None:
            try:
                traced = (now := recorder.active) and now.single(self._request(layer), self._target())
                self.routes_computed, self._timing = self._made.forward(layer, deadline_in(timeout_s))
            except ConnectionFullError:
                pass
            else:
                if traced is not None:
                    traced.over("shm", self.timing)
                return self.output
        request = self._request(layer)
        with self._client.forward_request(request, timeout_s=timeout_s) as answer:
            self.output[:] = answer.output
            self.routes_computed, self._timing = answer.routes_computed, answer.timing
        return self.output

    def _target(self) -> str:
        return str(getattr(self._client, "target", ""))

    def _request(self, layer: int) -> Request:
        dtype = self.output.dtype
        return Request(layer, self.hidden_states, self.topk_ids, self.topk_weights, output_dtype=dtype)
