"""A batch: requests of one layer side by side in the buffers of a lane."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from expertd.errors import (
    ExpertdError,
    ExpertIdOutOfRangeError,
    NonFiniteHiddenStatesError,
    NonFiniteWeightsError,
)
from expertd_server.engine.convert import put_floats
from expertd_server.engine.lane import Inputs
from expertd_server.engine.request import Array, Request
from expertd_server.engine.served import ServedLayer

__all__ = ["NONFINITE", "Batch", "fill"]

NONFINITE = ("pass", "refuse", "zero")
"""What becomes of NaN and infinity: hidden states pass and weights refuse their request, both do, both count as 0.  In
the order of csrc/core.h."""
_EXPONENT = {"bf16": 0x7F80, "f32": 0x7F800000}


@dataclass(slots=True)
class Batch:
    """A batch under way.  rows[i]: first row of request i; errors: of requests that failed alone; padded: rows that are
    computed, where there are more than tokens."""

    layer: ServedLayer
    requests: tuple[Request, ...]
    rows: list[int]
    tokens: int
    cut_ns: int
    padded: int = 0
    fill_ns: int = 0
    errors: dict[int, ExpertdError] = field(default_factory=dict)
    routes: list[int] = field(default_factory=list)
    expert_tokens: Array = field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def top_k(self) -> int:
        """Of its widest request."""
        return max(r.top_k for r in self.requests)

    @property
    def backend(self) -> str:
        """The one that computes it."""
        return self.layer.backend_at(max(self.tokens, self.padded))


def fill(b: Batch, into: Inputs, k: int, dtype: str, ids: Array, nonfinite: str = "pass") -> None:
    """Copy the requests of `b` side by side, global ids turned into slots.  One with bad ids or weights gets its
    error and routes of -1; the others do not notice.

    k: routes of a row, the largest top_k of the batch.  dtype: "bf16" or "f32", of into.hidden.  ids: room for
    [M * k] int64, wide enough that no id wraps round.  nonfinite: of NONFINITE.
    """
    H = b.layer.hidden_size
    for i, r in enumerate(b.requests):
        a, z = b.rows[i], b.rows[i + 1]
        put_floats(into.hidden[a * H : z * H], dtype, r.hidden, H)
        if nonfinite != "pass":
            _settle(b, i, into.hidden[a * H : z * H], dtype, nonfinite)
        mine, weights = ids[a * k : z * k], into.weights[a * k : z * k]
        if r.top_k == k:
            mine[:] = r.ids.values
            _put_weights(weights, r)
        else:
            _put_narrow(mine, weights, r, k)
    # As unsigned numbers ids below -1 are large: one comparison finds those out of range on either side.
    if np.maximum.reduce((ids + 1).view(np.uint64)) > b.layer.num_experts:
        _find_bad_ids(b, ids, k)
    np.take(b.layer.slot_of, ids, out=into.slots, mode="wrap")  # -1 wraps round to the last entry, which is -1
    if nonfinite == "zero":
        into.weights[~np.isfinite(into.weights)] = 0.0
    elif not np.logical_and.reduce(np.isfinite(into.weights)):
        _find_bad_weights(b, into, k)
    for i in b.errors:
        into.slots[b.rows[i] * k : b.rows[i + 1] * k] = -1
    here = into.slots >= 0
    if len(b.requests) == 1:
        b.routes = [int(np.count_nonzero(here))]
    else:
        b.routes = np.add.reduceat(here, [a * k for a in b.rows[:-1]], dtype=np.int64).tolist()
    b.expert_tokens = np.bincount(into.slots[here], minlength=len(b.layer.held))


def _settle(b: Batch, i: int, x: Array, dtype: str, nonfinite: str) -> None:
    """Hidden states of request i as they are computed: its error where they are refused, and zeros."""
    bits = x.view(np.uint32) if dtype == "f32" else x
    odd = np.flatnonzero((bits & _EXPONENT[dtype]) == _EXPONENT[dtype])
    if not len(odd):
        return
    if nonfinite == "zero":
        x[odd] = 0
        return
    t, column = divmod(int(odd[0]), b.layer.hidden_size)
    got = np.left_shift(x[odd[:1]], 16, dtype=np.uint32).view(np.float32) if dtype == "bf16" else x[odd[:1]]
    b.errors[i] = NonFiniteHiddenStatesError.about(
        f"hidden_states[{t}, {column}]",
        got=float(got[0]),
        want="finite numbers: the server refuses others",
        remedy=f"{len(odd)} of {len(x)} are not finite",
    )
    x[:] = 0


def _find_bad_ids(b: Batch, ids: Array, k: int) -> None:
    """Give every request with an id out of range its error, and make its ids -1."""
    for i in range(len(b.requests)):
        mine = ids[b.rows[i] * k : b.rows[i + 1] * k]
        bad = np.flatnonzero((mine < -1) | (mine >= b.layer.num_experts))
        if len(bad):
            t, j = divmod(int(bad[0]), k)
            b.errors[i] = ExpertIdOutOfRangeError.about(
                f"topk_ids[{t}, {j}] of layer {b.layer.layer}",
                got=int(mine[bad[0]]),
                want=f"0 to {b.layer.num_experts - 1}, or -1 for a route that nobody computes here",
            )
            mine[:] = -1


def _find_bad_weights(b: Batch, into: Inputs, k: int) -> None:
    """Give every request with a weight that is not finite its error, and make its slots -1."""
    for i, r in enumerate(b.requests):
        mine = slice(b.rows[i] * k, b.rows[i + 1] * k)
        weights = into.weights[mine]
        bad = np.flatnonzero(~np.isfinite(weights))
        if len(bad):
            t, j = divmod(int(bad[0]), k)
            error = NonFiniteWeightsError.about(
                f"topk_weights[{t}, {j}]",
                got=float(weights[bad[0]]),
                want="a finite number",
                remedy=f"{len(bad)} of {r.tokens * r.top_k} weights are not finite",
            )
            b.errors.setdefault(i, error)
            into.slots[mine] = -1
            weights[:] = 0.0


def _put_weights(into: Array, r: Request) -> None:
    """Write the router weights of `r`, f32, flat."""
    if r.weights is None:
        into[:] = 1.0
    else:
        put_floats(into, "f32", r.weights, r.top_k)


def _put_narrow(ids: Array, weights: Array, r: Request, k: int) -> None:
    """Write ids and weights of `r`, whose rows have fewer routes than the batch's k: -1 and 0 stand in the rest."""
    narrow = np.empty(r.tokens * r.top_k, np.float32)
    _put_weights(narrow, r)
    rows, rest = ids.reshape(-1, k), weights.reshape(-1, k)
    rows[:, : r.top_k] = r.ids.values.reshape(-1, r.top_k)
    rest[:, : r.top_k] = narrow.reshape(-1, r.top_k)
    rows[:, r.top_k :] = -1
    rest[:, r.top_k :] = 0.0
