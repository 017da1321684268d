"""What lies in a region; csrc/layout.h says the same to C++, with what the entries mean.  A test holds both together.

Control page | Submission[entries] | Completion[entries] | arena
"""

from __future__ import annotations

import ctypes as C
from typing import Any

__all__ = [
    "CALLS_OFFSET",
    "CANCEL",
    "ECHO",
    "ENTRIES",
    "FORWARD",
    "GOOD",
    "LOST",
    "MOST_PREPARED",
    "ON_DEVICE",
    "PAGE",
    "PREPARE",
    "REFUSED",
    "ROUTER_WEIGHT_ON_INPUT",
    "Completion",
    "DeviceCalls",
    "ConnectionHandle",
    "Submission",
    "Tensors",
    "arena_offset",
    "region_bytes",
]

PAGE = 4096
ENTRIES = 256
"""Of each ring where nobody says otherwise: requests in flight of one session."""
FORWARD, CANCEL, ECHO, PREPARE = 1, 2, 3, 4
"""Submission.kind."""
ROUTER_WEIGHT_ON_INPUT, ON_DEVICE = 1, 2
"""Submission.flags."""
GOOD, REFUSED, LOST = 1, 2, 3
"""DeviceCalls.answered, once it is not 0."""
CALLS_OFFSET = 320
"""Of DeviceCalls in the control page."""
MOST_PREPARED = 1 << 16
"""Submission.number goes from 1 to this."""

_SAYS_VERSION = 0x017677FF


class Submission(C.Structure):
    """One request: offsets in the arena, multiples of 16; dtypes as in expertd.v1.DataType."""

    _fields_ = [
        *((name, C.c_uint64) for name in ("seq", "id", "deadline_ns", "hidden", "ids", "weights", "out", "scales")),
        *((name, C.c_uint32) for name in ("layer", "tokens", "top_k")),
        *((name, C.c_uint8) for name in ("kind", "hidden_dtype", "ids_dtype", "weights_dtype", "out_dtype", "spare")),
        ("flags", C.c_uint16),
        ("trace", C.c_uint8 * 24),
        ("number", C.c_uint32),
        ("hidden_size", C.c_uint32),
        ("reserved", C.c_uint8 * 4),
        ("weights_version", C.c_uint64),
    ]


class _Version(C.Structure):
    _fields_ = [
        (name, C.c_uint32) for name in ("says_version", "version_low", "version_high", "says_decode", "said_decode_ns")
    ]


class _Text(C.Union):
    """Of a refusal; else the version and decode_ns, where the server says them."""

    _anonymous_ = ("_version",)
    _fields_ = [("text", C.c_char * 404), ("_version", _Version)]


class Completion(C.Structure):
    """One answer.  name: of the row of the error table where it is refused, and text says why; else of the backend, and
    the output lies where the submission wanted it."""

    _anonymous_ = ("_text",)
    _fields_ = [
        ("seq", C.c_uint64),
        ("id", C.c_uint64),
        *(
            (name, C.c_uint32)
            for name in (
                "refused",
                "routes_computed",
                "queue_ns",
                "collect_ns",
                "kernel_ns",
                "deliver_ns",
                "batch_tokens",
                "batch_requests",
                "queued_tokens",
                "queued_requests",
            )
        ),
        ("token_ns", C.c_float),
        ("retry_after_us", C.c_uint32),
        ("arrival_ns", C.c_uint64),
        ("name", C.c_char * 36),
        ("_text", _Text),
    ]

    @property
    def weights_version(self) -> int:
        """Version of the weights that computed it; 0 = the server does not say.  It lies where the text of a refusal
        does."""
        if self.refused or self.says_version != _SAYS_VERSION:
            return 0
        version: int = self.version_low | self.version_high << 32
        return version

    @property
    def decode_ns(self) -> int:
        """Timing's, over TCP; 0 = it is not known.  It lies where the text of a refusal does."""
        known = not self.refused and self.says_decode == _SAYS_VERSION
        return int(self.said_decode_ns) if known else 0


class DeviceCalls(C.Structure):
    """Words of the control page through which a device starts requests that were prepared: one at a time.

    called     number of the one that starts; the server writes 0 when it has taken it
    answered   0 = not yet, else GOOD, REFUSED or LOST; the caller writes 0 before it calls again
    calls      answered so far; refusals: those that were refused, of which `failure` is the last
    last       of the last that was computed
    """

    _fields_ = [
        ("called", C.c_uint32),
        ("pad0", C.c_uint8 * 60),
        ("answered", C.c_uint32),
        ("pad1", C.c_uint8 * 60),
        ("calls", C.c_uint64),
        ("refusals", C.c_uint64),
        ("pad2", C.c_uint8 * 48),
        ("last", Completion),
        ("failure", Completion),
    ]


class Tensors(C.Structure):
    """Where a request's tensors lie in this process: addresses, or bytes, which it then keeps, and sizes in bytes.
    hidden 0: in the arena, where the submission says.  Of the client alone, not in a region."""

    _fields_ = [
        *((name, C.c_char_p) for name in ("hidden", "scales", "ids", "weights")),
        *((name + "_bytes", C.c_uint64) for name in ("hidden", "scales", "ids", "weights", "out")),
    ]


class ConnectionHandle(C.Structure):
    """A session by the functions of its library, for C++ that waits for several of them.  Of the client alone.

    arena    address of the arena; 0: messages carry the tensors
    output   0: it lies in the arena, where the submission says"""

    _fields_ = [
        (name, C.c_void_p)
        for name in (
            *("client", "arena", "take", "give", "submit", "send", "see"),
            *("wait", "answer", "output", "release", "leave"),
        )
    ]

    @classmethod
    def of(cls, client: int, arena: int, library: Any) -> ConnectionHandle:
        """library: expertd.shm.library.library(), or TCP's."""
        names = [str(name) for name, *_ in cls._fields_[2:]]
        calls = {name: C.cast(f, C.c_void_p).value for name in names if (f := getattr(library, name, None)) is not None}
        return cls(client=client, arena=arena, **calls)


def arena_offset(entries: int) -> int:
    """Where the arena begins."""
    end = PAGE + entries * (C.sizeof(Submission) + C.sizeof(Completion))
    return -(-end // PAGE) * PAGE


def region_bytes(entries: int, arena_bytes: int) -> int:
    """Of a region whose arena holds arena_bytes at least: whole pages."""
    return arena_offset(entries) + -(-arena_bytes // PAGE) * PAGE
