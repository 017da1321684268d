"""Reading single fields of protobuf's wire format: varints, tags, sizes, and skipping what is unknown.

The scanner reads what serializers write and raises OddError for everything else: broken bytes, but also things that are
legal and that nobody sends (groups, a tensor given twice, hundreds of fields).  The caller then asks the generated
classes, whose verdict counts.  So a refusal here is never final, and only what is accepted here must be right.

Limits are those of the C implementation behind the generated classes: a varint has at most 10 bytes and is taken
modulo 2^64; a tag is a varint of at most 5 bytes below 2^32 with a field number above 0; a size has at most 5 bytes.

Every function takes the whole buffer and a position.  It may run past the end of its message by less than one field,
never past the buffer (indexing raises IndexError there); whoever reads a message checks that it ended where it should.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeAlias

from expertd.bounds import MAX_RANK, shape_too_long

__all__ = [
    "MAX_FIELDS",
    "Bytes",
    "OddError",
    "dtype_and_shape",
    "int32",
    "packed_shape",
    "size",
    "skip",
    "tag",
    "varint",
]

Bytes: TypeAlias = "bytes | memoryview"
"""What is scanned: bytes, or a memoryview of format "B"."""

MAX_FIELDS = 64
"""Fields of one message that the scanner reads.  The contract's messages have at most 11; more are read by the
generated classes in C, so that a message of a million empty fields does not hold the interpreter for a second."""

_MAX_SHAPE = 10 * MAX_RANK
"""Bytes of a packed shape: a varint has at most 10."""


class OddError(Exception):
    """Not for the scanner; the text says why."""


def varint(buf: Bytes, pos: int) -> tuple[int, int]:
    """(value modulo 2^64, position after it).

    Each byte but the last has its top bit set, which the next byte takes back: b0 + (b1 - 1 << 7) + (b2 - 1 << 14) ...
    """
    value = buf[pos]
    if value < 0x80:
        return value, pos + 1
    for i in range(1, 10):
        byte = buf[pos + i]
        value += byte - 1 << 7 * i
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, pos + i + 1
    raise OddError(f"a varint of more than 10 bytes at byte {pos}")


def tag(buf: Bytes, pos: int) -> tuple[int, int]:
    """(field number << 3 | wire type, position after it)."""
    value, stop = varint(buf, pos)
    if stop - pos > 5 or value > 0xFFFFFFFF:
        raise OddError(f"a tag of more than 32 bits at byte {pos}")
    return value, stop


def size(buf: Bytes, pos: int, end: int) -> tuple[int, int]:
    """(first byte, byte after the last) of the length-delimited field whose size stands at pos."""
    value = buf[pos]
    start = pos + 1
    if value >= 0x80:  # varint(), spelled out: three calls a tensor are a third of its cost
        byte = buf[start]
        value += byte - 1 << 7
        start += 1
        shift = 14
        while byte >= 0x80:
            byte = buf[start]
            value += byte - 1 << shift
            start += 1
            shift += 7
            if shift > 35:
                break
    if start - pos > 5 or start + value > end:
        raise OddError(f"a field of {value} bytes at byte {pos}, where {max(0, end - start)} bytes are left")
    return start, start + value


def int32(value: int) -> int:
    """The low 32 bits as a signed number: how an enum field reads a varint."""
    value &= 0xFFFFFFFF
    return value - 0x100000000 if value >= 0x80000000 else value


@lru_cache(maxsize=1024)
def dtype_and_shape(data: bytes) -> tuple[int, tuple[int, ...]]:
    """The two values behind b"\x08" dtype b"\x12" size extents, which is how every serializer begins a Tensor.
    Cached: what one caller sends hardly differs."""
    if data[1] >= 0x80:  # then the byte after it is no tag; a size >= 0x80 is one that packed_shape does not take
        raise OddError("an unusual dtype")
    return data[1], packed_shape(data, 4, len(data))


def packed_shape(buf: Bytes, pos: int, end: int) -> tuple[int, ...]:
    """The extents behind a packed repeated uint32 from pos to end.  Raises BadShapeError where they are too many."""
    if end - pos > _MAX_SHAPE:
        raise shape_too_long(f"{end - pos} bytes of extents")
    out = []
    while pos < end:
        value, pos = varint(buf, pos)
        out.append(value & 0xFFFFFFFF)
    if pos != end:
        raise OddError(f"an extent that reaches beyond its shape, at byte {end}")
    if len(out) > MAX_RANK:
        raise shape_too_long(f"{len(out)} extents")
    return tuple(out)


def skip(buf: Bytes, pos: int, end: int, field: int) -> int:
    """The position after an unknown field whose tag is `field` and ends at pos."""
    wire = field & 7
    if field < 8:
        raise OddError(f"field number 0 before byte {pos}")
    if wire == 0:
        return varint(buf, pos)[1]
    if wire == 2:
        return size(buf, pos, end)[1]
    if wire == 1:
        return pos + 8
    if wire == 5:
        return pos + 4
    raise OddError(f"wire type {wire} before byte {pos}")
