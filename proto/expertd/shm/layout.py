"""What lies in a region; csrc/layout.h says the same to C++, with what the entries mean.  A test holds both together.

Control page | Submission[entries] | Completion[entries] | arena
"""

from __future__ import annotations

import ctypes as C

__all__ = [
    "CANCEL",
    "ECHO",
    "ENTRIES",
    "FORWARD",
    "PAGE",
    "ROUTER_WEIGHT_ON_INPUT",
    "Completion",
    "Submission",
    "arena_offset",
    "region_bytes",
]

PAGE = 4096
ENTRIES = 256
"""Of each ring where nobody says otherwise: requests in flight of one session."""
FORWARD, CANCEL, ECHO = 1, 2, 3
"""Submission.kind."""
ROUTER_WEIGHT_ON_INPUT = 1
"""Submission.flags."""


class Submission(C.Structure):
    """One request: offsets in the arena, multiples of 16; dtypes as in expertd.v1.DataType."""

    _fields_ = [
        *((name, C.c_uint64) for name in ("seq", "id", "deadline_ns", "hidden", "ids", "weights", "out", "scales")),
        *((name, C.c_uint32) for name in ("layer", "tokens", "top_k")),
        *((name, C.c_uint8) for name in ("kind", "hidden_dtype", "ids_dtype", "weights_dtype", "out_dtype", "spare")),
        ("flags", C.c_uint16),
        ("trace", C.c_uint8 * 24),
        ("reserved", C.c_uint8 * 20),
    ]


class Completion(C.Structure):
    """One answer.  refused: reason and text say why; else the output lies where the submission wanted it."""

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
        ("backend", C.c_uint32),
        ("reason", C.c_char * 36),
        ("text", C.c_char * 404),
    ]


def arena_offset(entries: int) -> int:
    """Where the arena begins."""
    end = PAGE + entries * (C.sizeof(Submission) + C.sizeof(Completion))
    return -(-end // PAGE) * PAGE


def region_bytes(entries: int, arena_bytes: int) -> int:
    """Of a region whose arena holds arena_bytes at least: whole pages."""
    return arena_offset(entries) + -(-arena_bytes // PAGE) * PAGE
