"""A batch's tensors in the memory that a session shares with the server: whoever makes them there and reads the output
there has nothing copied, and a call is one kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["ALIGN", "DeviceSlot", "Ground", "Place"]

ALIGN = 256
"""Bytes: where tensors in a session's memory begin."""


class Place(NamedTuple):
    """Where a request's tensors lie in a session's memory, in bytes from its begin, and where they end."""

    hidden: int
    ids: int
    weights: int
    out: int
    end: int

    @classmethod
    def of(cls, sizes: list[int], begin: int = 0) -> Place:
        """sizes: bytes of hidden states, ids, weights and output."""
        at = [begin]
        for size in sizes:
            at.append(at[-1] + -(-size // ALIGN) * ALIGN)
        return cls(*at)


class Ground:
    """Who has which part of a session's memory: calls of their own tensors share its begin, slots its end."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = nbytes // ALIGN * ALIGN
        self._called = 0
        self._slots: list[Place] = []

    @property
    def left(self) -> int:
        """Bytes before the first slot."""
        return min((p.hidden for p in self._slots), default=self._bytes)

    def call(self, sizes: list[int]) -> Place | None:
        """For calls of a kind; None: there is not so much."""
        place = Place.of(sizes)
        if place.end > self.left:
            return None
        self._called = max(self._called, place.end)
        return place

    def slot(self, sizes: list[int]) -> Place | None:
        """For a slot, until it is freed: the highest that is free.  Where calls were once is never a slot's: somebody
        may replay them."""
        need, top = Place.of(sizes).end, self._bytes
        for taken in sorted(self._slots, reverse=True):
            if top - taken.end >= need:
                break
            top = taken.hidden
        if top - need < self._called:
            return None
        self._slots.append(Place.of(sizes, top - need))
        return self._slots[-1]

    def free(self, place: Place) -> None:
        self._slots.remove(place)


class DeviceSlot:
    """One batch at a time, in the order of the stream; DeviceSession.slot() makes it.  Not thread-safe.

    hidden_states     [M, H] of the type asked for, on the session's GPU
    topk_ids          [M, top_k] int32, global ids, -1 = nobody's; -1 at first
    topk_weights      [M, top_k] float32
    output            [M, H]: what the last forward gives, until the next one; NaN where that was refused
    """

    def __init__(self, tensors: list[Tensor], call: Callable[..., Any], free: Callable[[], None]) -> None:
        """call(slot, layer, stream, router_weight_on_input, timeout_s) gives a call to the stream; free() ends what the
        tensors lie in."""
        self.hidden_states, self.topk_ids, self.topk_weights, self.output = tensors
        self._call = call
        self._free: Callable[[], None] | None = free

    def forward(
        self,
        layer: int,
        *,
        stream: torch.cuda.Stream | None = None,
        router_weight_on_input: bool = False,
        timeout_s: float | None = None,
    ) -> Tensor:
        """`output`: the experts of `layer` for what the tensors hold when the stream comes to it.  As
        DeviceSession.forward otherwise; it can be captured in a CUDA graph."""
        if self._free is None:
            raise ValueError("device slot: closed")
        self._call(self, layer, stream, router_weight_on_input, timeout_s)
        return self.output

    def close(self) -> None:
        """Gives its memory to other slots; when nothing that reads or writes it is under way.  Its tensors must not be
        used afterwards."""
        free, self._free = self._free, None
        if free is not None:
            free()
