"""Reading single fields of protobuf's wire format: varints, tags, sizes, and skipping what is unknown.

For messages of others that hold many bytes which no generated class should read (KServe's).  What serializers write is
read; broken bytes, and what is legal and nobody sends, raise OddError.

Limits are those of the C implementation behind the generated classes: a varint has at most 10 bytes and is taken
modulo 2^64; a tag is a varint of at most 5 bytes below 2^32 with a field number above 0; a size has at most 5 bytes.

Every function takes the whole buffer and a position.  It may run past the end of its message by less than one field,
never past the buffer (indexing raises IndexError there); whoever reads a message checks that it ended where it should.
"""

from __future__ import annotations

from expertd.codec.decode import Bytes

__all__ = ["OddError", "size", "skip", "tag", "varint"]


class OddError(Exception):
    """Not to be read here; the text says why."""


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
