"""What the C++ works on, for one call of a cluster after another: memory of a call and of its shares."""

from __future__ import annotations

import ctypes as C
from typing import NamedTuple

import numpy as np

from expertd.dtypes import DTYPE_BYTES
from expertd.shm.layout import FORWARD, ROUTER_WEIGHT_ON_INPUT, Completion, Submission
from expertd.shm.tickets import SPIN_NS
from expertd.trace_context import context_of
from expertd_client.cluster import native
from expertd_client.cluster.split import Shares
from expertd_client.request import Request

__all__ = ["Desk", "Told"]

_FORM_AT = native.BATCH.size + native.OWNERS.size + native.CALL.size


class Told(NamedTuple):
    """Of a part that was sent.

    late       whether its answer may have come before answered_ns
    sent_ns    on the monotonic clock, as answered_ns
    inside_ns, queued_tokens, token_ns, name    what the answer says; name: of the backend, filled up with zeros
    """

    ticket: int
    state: int
    late: int
    sent_ns: int
    answered_ns: int
    inside_ns: int
    queued_tokens: int
    token_ns: float
    name: bytes


class Desk:
    """call, batch, owners: addresses.  usual_ns: what calls that wait for themselves take, for all desks."""

    def __init__(self, usual_ns: C.c_uint64) -> None:
        self._usual_ns = usual_ns
        self._memory = C.create_string_buffer(_FORM_AT + native.FORM.size)
        self.call = self.batch = C.addressof(self._memory)
        self.owners = self.batch + native.BATCH.size
        self._shares = C.create_string_buffer(0)
        self._counts = (C.c_int64 * 0)()
        self._rows = np.empty(0, np.int64)
        self._rows_at = 0

    def put_batch(self, batch: tuple[int, ...]) -> None:
        """As native.batch_of() says it."""
        native.BATCH.pack_into(self._memory, 0, *batch)

    def put_owners(self, group_of: int, owner_of_group: int, experts: int, servers: int) -> None:
        """Addresses of both, and how many."""
        native.OWNERS.pack_into(self._memory, native.BATCH.size, group_of, owner_of_group, experts, servers)
        if len(self._shares) < servers * native.SHARE_BYTES:
            self._shares = C.create_string_buffer(servers * native.SHARE_BYTES)

    def count(self, library: native.Library, tokens: int, top_k: int, servers: int) -> Shares | None:
        """What each server gets, until the next call; None: an id is of no expert that somebody holds."""
        if len(self._counts) < 3 * servers:
            self._counts = (C.c_int64 * (3 * servers))()
        if len(self._rows) < (most := tokens * min(top_k, servers)):
            self._rows = np.empty(most, np.int64)
            self._rows_at = native.at(self._rows)
        at, step = C.addressof(self._counts), 8 * servers
        if library.count(self.batch, self.owners, at, at + step, at + 2 * step, self._rows_at) < 0:
            return None
        counts = self._counts[: 3 * servers]
        return Shares(counts[:servers], counts[servers : 2 * servers], counts[2 * servers :], self._rows)

    def put_share(self, number: int, owner: int, session: int, begin: int, tokens: int, routes: int) -> None:
        """owner: number of the server; session: its address; begin: of its tokens among all that were counted."""
        rows, at = self._rows_at + 8 * begin, number * native.SHARE_BYTES
        native.SHARE.pack_into(self._shares, at, session, owner, rows, tokens, routes, 0, 0, 0)

    def put_call(self, request: Request, top_k: int, end_s: float, servers: int) -> None:
        """What all parts have in common.  end_s: of the time for it; infinite = none."""
        out, hidden, ids, weights = request.dtypes
        hidden_size = request.hidden_states.shape[1]
        end_ns = 0 if end_s == float("inf") else int(end_s * 1e9)
        flags = ROUTER_WEIGHT_ON_INPUT if request.router_weight_on_input else 0
        trace = context_of(request.traceparent) if request.traceparent else b""
        native.FORM.pack_into(
            self._memory, _FORM_AT,
            0, 0, end_ns, 0, 0, 0, 0, 0, request.layer, 0, top_k, FORWARD, hidden, ids, weights, out, 0, flags,
            trace, 0, hidden_size,
        )  # fmt: skip
        self._common = (
            C.addressof(self._shares), servers, hidden_size * DTYPE_BYTES[out],
            C.addressof(self._usual_ns), SPIN_NS,
        )  # fmt: skip

    def put_sum(self, address: int, stride: int, in_bf16: bool, out_bf16: bool) -> None:
        """Where it is added up; address 0: it is not."""
        at = native.BATCH.size + native.OWNERS.size
        native.CALL.pack_into(self._memory, at, *self._common, address, stride, in_bf16, out_bf16)

    def told(self, number: int) -> Told:
        """What became of a part."""
        return Told(*native.SENT.unpack_from(self._shares, number * native.SHARE_BYTES + native.SENT_AT))

    def submission(self, number: int) -> Submission:
        """A copy."""
        return Submission.from_buffer_copy(self._shares, number * native.SHARE_BYTES + native.SUBMISSION_AT)

    def answer(self, number: int) -> Completion:
        """A copy."""
        return Completion.from_buffer_copy(self._shares, number * native.SHARE_BYTES + native.ANSWER_AT)
