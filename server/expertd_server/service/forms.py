"""Requests like one that was taken before.

What the checks of intake.py go by is, for raw tensors, the same in every message of one form: layer, shapes and dtypes.
So the verdict on the first is remembered as long as the same layers are held, and the core reads the others by itself.
What is remembered keeps no layer: one that is removed is gone, whether another message comes or not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from expertd.codec import ForwardRequestView, decode_stream_request
from expertd.errors import ExpertdError
from expertd_server.engine.request import Operand, Reply, Request
from expertd_server.engine.served import Holding, ServedLayer

# Why it is so: decision 158 in DECISIONS.md.
__all__ = ["Form", "Forms"]

_MOST = 4096
"""Forms that are remembered: each takes about 1 KiB."""


@dataclass(frozen=True)
class Form:
    """What every request of a form becomes, but for its tensors: hidden, ids and weights are empty here.  layer: gives
    it, None where it is gone."""

    layer: Callable[[], ServedLayer | None]
    tokens: int
    top_k: int
    hidden: Operand
    ids: Operand
    weights: Operand
    router_weight_on_input: bool
    output_dtype: str
    answer_bytes: int

    def request(
        self,
        layer: ServedLayer,
        reply: Reply,
        ready: Callable[[Request, bytes], None],
        caller: str,
        request_id: int,
        arrival_ns: int,
        queued_ns: int,
        deadline_ns: int,
    ) -> Request:
        """One of this form: see Request."""
        return Request(
            layer,
            self.tokens,
            self.top_k,
            self.hidden,
            self.ids,
            self.weights,
            reply,
            caller,
            request_id,
            arrival_ns,
            queued_ns,
            deadline_ns,
            self.router_weight_on_input,
            self.output_dtype,
            ready=ready,
        )


class Forms:
    """For one thread.  holding: what is held now; check: the checks of a request, raising the row that refuses it."""

    def __init__(self, holding: Callable[[], Holding], check: Callable[[ForwardRequestView], Request]) -> None:
        self._holding, self._check = holding, check
        self._held = weakref.ref(holding())
        self._known: dict[bytes, Form | None] = {}

    def find(self, form: bytes, data: bytes) -> Form | None:
        """The form of the message `data`, which has the facts `form`; None: it would be refused."""
        held = self._holding()
        if held is not self._held():
            self._held = weakref.ref(held)
            self._known.clear()
        try:
            return self._known[form]
        except KeyError:
            if len(self._known) >= _MOST:
                self._known.clear()
            found = self._known[form] = self._learn(data)
            return found

    def _learn(self, data: bytes) -> Form | None:
        try:
            message = decode_stream_request(data)
            r = self._check(message) if isinstance(message, ForwardRequestView) else None
        except ExpertdError:
            return None
        if r is None or r.weights is None:
            return None
        hidden, ids, weights = (Operand(o.dtype, np.empty(0)) for o in (r.hidden, r.ids, r.weights))
        return Form(
            weakref.ref(r.layer),
            r.tokens,
            r.top_k,
            hidden,
            ids,
            weights,
            r.router_weight_on_input,
            r.output_dtype,
            r.answer_bytes,
        )
