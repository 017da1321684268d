"""What the C++ works on, for one call of a cluster after another: memory of a call and of its shares."""

from __future__ import annotations

import ctypes as C
from collections.abc import Sequence
from functools import lru_cache
from struct import Struct
from typing import TypeAlias

import numpy as np

from expertd.common.dtypes import DTYPE_BYTES
from expertd.common.trace_context import context_of
from expertd.shm.in_flight import SPIN_NS
from expertd.shm.layout import FORWARD, ROUTER_WEIGHT_ON_INPUT, Completion, Submission
from expertd_client.cluster import native
from expertd_client.cluster.split import Shares
from expertd_client.requests.request import Request

__all__ = ["CallMemory", "Told"]

_CALL_AT = native.BATCH.size + native.OWNERS.size
_FORM_AT = _CALL_AT + native.CALL.size

Told: TypeAlias = tuple[int, int, int, int, int, int, int, float, bytes]
"""Of a part that was sent: native's TOLD."""


class CallMemory:
    """call, batch, owners: addresses.  usual_ns: what calls that wait for themselves take, for all call_memories."""

    def __init__(self, usual_ns: C.c_uint64) -> None:
        self._usual_ns = usual_ns
        self._memory = C.create_string_buffer(_FORM_AT + native.FORM.size)
        self.call = self.batch = C.addressof(self._memory)
        self.owners = self.batch + native.BATCH.size
        self._servers = self._most = 0
        self._rows = np.empty(0, np.int64)
        self._rows_at = 0

    def put_batch(self, batch: tuple[int, ...]) -> None:
        """As native.batch_of() says it."""
        native.BATCH.pack_into(self._memory, 0, *batch)

    def put_owners(self, group_of: int, owner_of_group: int, experts: int, servers: int) -> None:
        """Addresses of both, and how many."""
        native.OWNERS.pack_into(self._memory, native.BATCH.size, group_of, owner_of_group, experts, servers)
        self._servers = servers
        if self._most < servers:
            self._most = servers
            self._shares = C.create_string_buffer(servers * native.SHARE_BYTES)
            self._found = (C.c_int64 * (3 * servers))()
            self._sessions = (C.c_int64 * servers)()
            self._fixed = C.addressof(self._shares), 0, C.addressof(self._sessions), C.addressof(self._found)

    def count(self, library: native.Library, tokens: int, top_k: int) -> Shares | None:
        """What each server gets, until the next call; None: an id is of no expert that somebody holds."""
        servers = self._servers
        if len(self._rows) < (most := tokens * min(top_k, servers)):
            self._rows = np.empty(most, np.int64)
            self._rows_at = native.at(self._rows)
        at, step = self._fixed[3], 8 * servers
        if library.count(self.batch, self.owners, at, at + step, at + 2 * step, self._rows_at) < 0:
            return None
        found = self._found[: 3 * servers]
        return Shares(found[:servers], found[servers : 2 * servers], found[2 * servers :], self._rows)

    def put_call(
        self,
        request: Request,
        end_s: float,
        sessions: Sequence[int],
        address: int,
        stride: int,
        in_bf16: bool,
        out_bf16: bool,
    ) -> None:
        """What all parts have in common.

        end_s      of the time for it; infinite = none
        sessions   addresses, one for each server; 0 = it gets nothing
        address    of where the sum comes, and bytes from row to row; 0: it is not added up
        """
        _places(len(sessions)).pack_into(self._sessions, 0, *sessions)
        out, hidden, ids, weights = request.dtypes
        hidden_size = request.hidden_states.shape[1]
        native.CALL.pack_into(
            self._memory, _CALL_AT, *self._fixed, self._rows_at, hidden_size * DTYPE_BYTES[out],
            C.addressof(self._usual_ns), SPIN_NS, address, stride, in_bf16, out_bf16,
        )  # fmt: skip
        end_ns = 0 if end_s == float("inf") else int(end_s * 1e9)
        flags = ROUTER_WEIGHT_ON_INPUT if request.router_weight_on_input else 0
        trace = context_of(request.traceparent) if request.traceparent else b""
        native.FORM.pack_into(
            self._memory, _FORM_AT,
            0, 0, end_ns, 0, 0, 0, 0, 0, request.layer, 0, request.topk_ids.shape[1], FORWARD, hidden, ids, weights,
            out, 0, flags, trace, 0, hidden_size, request.weights_version,
        )  # fmt: skip

    def told(self) -> list[Told]:
        """What became of each part; empty: none was made."""
        (count,) = _COUNT.unpack_from(self._memory, _CALL_AT + 8)
        return list(native.TOLD.iter_unpack(memoryview(self._shares)[: count * native.SHARE_BYTES]))

    def submission(self, number: int) -> Submission:
        """A copy."""
        return Submission.from_buffer_copy(self._shares, number * native.SHARE_BYTES + native.SUBMISSION_AT)

    def answer(self, number: int) -> Completion:
        """A copy."""
        return Completion.from_buffer_copy(self._shares, number * native.SHARE_BYTES + native.ANSWER_AT)


_COUNT = Struct("=q")


@lru_cache(maxsize=64)
def _places(count: int) -> Struct:
    """So many addresses."""
    return Struct(f"={count}Q")
