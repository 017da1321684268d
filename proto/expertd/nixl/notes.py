"""What a notification says, in the order of bytes of x86 and ARM.  Nothing of the other side is trusted.

    client -> server    head, Submission; deadline_ns is what is left of its time
    server -> client    head, Completion; without its text where it is not refused

The head is a magic and a number that goes up from 0 by 1: notifications may overtake each other, and none comes twice.
"""

from __future__ import annotations

import ctypes as C
import struct
import time
from collections.abc import Sequence

from expertd.dtypes import DTYPE_BYTES, scales_of_row, tensor_bytes
from expertd.shm.layout import CANCEL, ECHO, FORWARD, Completion, Submission
from expertd.v1 import expert_service_pb2 as pb

__all__ = ["ForgedError", "Numbers", "answer_note", "inputs", "output", "parse_answer", "parse_request", "request_note"]

_REQUEST, _ANSWER = b"expnxr01", b"expnxa01"
_HEAD = struct.Struct("<8sQ")
_TEXT = Completion.text.offset
_PADDING = 256
"""Of tensors in a block.  Ranges with less between them are one: no other block has room there."""
_MOST_NS = 1 << 60
Range = tuple[int, int]
"""Offset in the arena, bytes."""


class ForgedError(Exception):
    """What the other side of a session never says: the session ends."""


class Numbers:
    """Of the notifications that came: each once, and none far ahead."""

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._next, self._came = 0, set[int]()

    def take(self, number: int) -> None:
        """Raises ForgedError."""
        if not self._next <= number < self._next + self._ahead or number in self._came:
            raise ForgedError(f"number of a notification: got {number}, want a new one from {self._next} on")
        self._came.add(number)
        while self._next in self._came:
            self._came.remove(self._next)
            self._next += 1


def request_note(number: int, request: Submission) -> bytes:
    copy = Submission.from_buffer_copy(request)
    if copy.deadline_ns:
        copy.deadline_ns = max(1, copy.deadline_ns - time.monotonic_ns())
    return _HEAD.pack(_REQUEST, number) + bytes(copy)


def parse_request(note: bytes) -> tuple[int, Submission]:
    """Raises ForgedError."""
    number, rest = _parted(note, _REQUEST)
    if len(rest) != C.sizeof(Submission):
        raise ForgedError(f"notification: got {len(note)} bytes, want a request's")
    s = Submission.from_buffer_copy(rest)
    if s.kind not in (FORWARD, CANCEL, ECHO):
        raise ForgedError(f"notification: got a request of kind {s.kind}, want a forward, a cancel or an echo")
    if s.kind != CANCEL and not s.hidden_size:
        raise ForgedError("notification: got a request without its hidden size")
    if s.deadline_ns:
        s.deadline_ns = time.monotonic_ns() + min(s.deadline_ns, _MOST_NS)
    return number, s


def answer_note(number: int, answer: Completion) -> bytes:
    said = bytes(answer)
    return _HEAD.pack(_ANSWER, number) + (said if answer.refused else said[:_TEXT])


def parse_answer(note: bytes) -> tuple[int, Completion]:
    """Raises ForgedError."""
    number, rest = _parted(note, _ANSWER)
    if len(rest) not in (_TEXT, C.sizeof(Completion)):
        raise ForgedError(f"notification: got {len(note)} bytes, want an answer's")
    return number, Completion.from_buffer_copy(rest.ljust(C.sizeof(Completion), b"\0"))


def _parted(note: bytes, magic: bytes) -> tuple[int, bytes]:
    if not note.startswith(magic) or len(note) < _HEAD.size:
        raise ForgedError("notification: got one of another protocol, or another version of this one")
    return _HEAD.unpack_from(note)[1], note[_HEAD.size :]


def inputs(s: Submission) -> Sequence[Range]:
    """Where the tensors lie that a request reads.  Raises ForgedError for dtypes that there are not."""
    rows = s.tokens * s.top_k
    found = [
        (s.hidden, s.tokens * s.hidden_size * _bytes(s.hidden_dtype)),
        (s.ids, rows * _bytes(s.ids_dtype)),
        (s.weights, rows * _bytes(s.weights_dtype)),
    ]
    if s.hidden_dtype == pb.DATA_TYPE_E4M3:
        found.append((s.scales, s.tokens * scales_of_row(s.hidden_size) * DTYPE_BYTES[pb.DATA_TYPE_F32]))
    return _joined(found)


def output(s: Submission) -> Range:
    """Where its output lies.  Raises ForgedError."""
    _bytes(s.out_dtype)
    return s.out, tensor_bytes(s.out_dtype, s.tokens, s.hidden_size)


def _bytes(dtype: int) -> int:
    if dtype not in DTYPE_BYTES:
        raise ForgedError(f"dtype: got {dtype}, want one of expertd.v1.DataType")
    return DTYPE_BYTES[dtype]


def _joined(ranges: Sequence[Range]) -> Sequence[Range]:
    out: list[Range] = []
    for at, nbytes in sorted(r for r in ranges if r[1]):
        if out and at - sum(out[-1]) < _PADDING:
            begin, most = out[-1]
            out[-1] = begin, max(most, at + nbytes - begin)
        else:
            out.append((at, nbytes))
    return out
