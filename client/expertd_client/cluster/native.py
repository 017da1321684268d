"""The C++ of a cluster's client, through ctypes.  Its structures are packed and read whole, as csrc/split.h and ask.cpp
have them, which costs less than field by field; a test holds both together.

    BATCH     tensors of a request in host memory: hidden, scales, ids, weights; bytes of a row of hidden, scales and
              weights; tokens, top_k, whether ids are i64
    OWNERS    which server computes which expert: addresses of group_of and owner_of_group; experts, servers
    CALL      after both: shares, how many (0: none yet), Sessions of the servers that get something, what count()
              found, rows, bytes of a row of a partial sum, usual_ns, spin_ns; the array where sums are added up (0 =
              they are not), bytes from row to row, whether partial sums are bf16, and the array
    FORM      a submission with what all parts have in common
    TOLD      one server's part, once it was sent: ticket, STATE, whether the answer may have come before answered_ns,
              sent_ns, answered_ns, inside_ns, queued_tokens, token_ns, the backend's name

What takes microseconds keeps the interpreter's lock: given back, it might not come again for milliseconds.
"""

from __future__ import annotations

import ctypes as C
from functools import cache
from pathlib import Path
from struct import Struct
from typing import Any

from numpy.typing import NDArray

from expertd.common.dtypes import DTYPE_BYTES, scales_of_row
from expertd.cxx import stale
from expertd.shm.layout import Completion, Submission
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.requests.e4m3 import E4m3
from expertd_client.requests.request import Request
from expertd_client.requests.tensors import host_address

__all__ = [
    "ANSWERED",
    "ANSWER_AT",
    "BATCH",
    "CALL",
    "FORM",
    "IN_FLIGHT",
    "LIBRARY",
    "LOST",
    "OWNERS",
    "REFUSED",
    "SHARE_BYTES",
    "SUBMISSION_AT",
    "TOLD",
    "TOLD_AT",
    "Library",
    "Room",
    "at",
    "batch_of",
    "library",
]

LIBRARY = Path(__file__).parent / "csrc" / "libexpertd_cluster.so"
IN_FLIGHT, ANSWERED, REFUSED, LOST = 1, 2, 3, 4
"""STATE of a share; 0 = it was not sent."""
BATCH, OWNERS, CALL, FORM = Struct("=4Q6q"), Struct("=2Q2q"), Struct("=Qq3QqQqQq2i"), Struct("=8Q3I6BH24s2I4xQ")
_TOLD, TOLD_AT = "Q2I3QIf36s4x", 40
SUBMISSION_AT = TOLD_AT + Struct("=" + _TOLD).size + 8
ANSWER_AT = SUBMISSION_AT + C.sizeof(Submission)
SHARE_BYTES = ANSWER_AT + C.sizeof(Completion)
TOLD = Struct(f"={TOLD_AT}x{_TOLD}{SHARE_BYTES - SUBMISSION_AT + 8}x")
"""Of a whole share."""


class Room(C.Structure):
    """Where the rows of a part go."""

    _fields_ = [(name, C.c_void_p) for name in ("hidden", "scales", "ids", "weights")]


class Library:
    """expertd_cluster_<name> as an attribute."""

    def __init__(self, path: str) -> None:
        p, n = C.c_void_p, C.c_int64
        free, locked = C.CDLL(path), C.PyDLL(path)
        self.join = _typed(free.expertd_cluster_join, None, p, n, C.c_int, n, n, p, p, C.c_int, n)
        self.ask = _typed(free.expertd_cluster_ask, C.c_int, p, C.c_uint64)
        self.wait = _typed(free.expertd_cluster_wait, C.c_int, p, C.c_uint64)
        self.gather = _typed(free.expertd_cluster_gather, None, p, p, n, p, n, p)
        self.scan = _typed(locked.expertd_cluster_scan, n, p, p, n, n, p, p)
        self.count = _typed(locked.expertd_cluster_count, n, p, p, p, p, p, p)
        self.sizes = _typed(locked.expertd_cluster_sizes, None, p)


def _typed(function: Any, result: Any, *arguments: Any) -> Any:
    function.restype, function.argtypes = result, arguments
    return function


@cache
def library() -> Library | None:
    """None where it is not built (python -m expertd.cxx)."""
    if stale(LIBRARY.name):
        return None
    try:
        return Library(str(LIBRARY))
    except OSError:
        return None


def at(array: NDArray[Any]) -> int:
    """Address of an array."""
    address: int = array.__array_interface__["data"][0]
    return address


def batch_of(request: Request) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """BATCH of a request whose tensors are on the host, and what must live as long as they are read."""
    _, hidden_dtype, ids_dtype, weights_dtype = request.dtypes
    x, ids = request.hidden_states, request.topk_ids
    (tokens, hidden_size), top_k = x.shape, ids.shape[1]
    scales, scales_row, kept_scales = 0, 0, None
    if isinstance(x, E4m3):
        scales, kept_scales = host_address(x.scales, pb.DATA_TYPE_F32)
        scales_row = 4 * scales_of_row(hidden_size)
        x = x.codes
    hidden, kept = host_address(x, hidden_dtype)
    at_ids, kept_ids = host_address(ids, ids_dtype)
    weights, kept_weights = host_address(request.topk_weights, weights_dtype)
    rows = hidden_size * DTYPE_BYTES[hidden_dtype], scales_row, top_k * DTYPE_BYTES[weights_dtype]
    batch = hidden, scales, at_ids, weights, *rows, tokens, top_k, int(ids_dtype == pb.DATA_TYPE_I64)
    return batch, (kept, kept_scales, kept_ids, kept_weights)
