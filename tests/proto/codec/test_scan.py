"""Single fields at their bounds, against numbers that are written here byte by byte."""

from __future__ import annotations

import pytest

from expertd.bounds import MAX_RANK
from expertd.codec.scan import OddError, dtype_and_shape, int32, packed_shape, size, skip, tag, varint
from expertd.errors import BadShapeError

VALUES = [0, 1, 127, 128, 300, 1 << 14, (1 << 21) - 1, 1 << 21, 1 << 28, (1 << 32) - 1, 1 << 32, 1 << 63, (1 << 64) - 1]
FAR = 1 << 62
"""An end that no size reaches."""


def encoded(value: int, length: int) -> bytes:
    """value in `length` bytes, the rest of which are there for nothing: legal, and nobody sends it."""
    groups = [value >> 7 * i & 0x7F for i in range(length)]
    return bytes([*(g | 0x80 for g in groups[:-1]), groups[-1]])


def lengths(value: int, most: int) -> range:
    return range(max(1, -(-value.bit_length() // 7)), most + 1)


@pytest.mark.parametrize("value", VALUES)
def test_a_varint_of_any_length_is_its_value(value: int) -> None:
    for length in lengths(value, 10):
        assert varint(b"?" + encoded(value, length) + b"\x85?", 1) == (value, 1 + length)
    with pytest.raises(OddError, match="more than 10 bytes at byte 1"):
        varint(b"?" + encoded(value, 11), 1)


def test_a_varint_counts_modulo_two_to_the_64() -> None:
    assert varint(encoded((1 << 64) + 5, 10), 0) == (5, 10)


def test_a_tag_has_five_bytes_and_32_bits() -> None:
    for value in (8, 127, 128, (1 << 32) - 1):
        for length in lengths(value, 5):
            assert tag(b"?" + encoded(value, length) + b"?", 1) == (value, 1 + length)
    for data in (encoded(8, 6), encoded(1 << 32, 5)):
        with pytest.raises(OddError, match="more than 32 bits at byte 1"):
            tag(b"?" + data, 1)


@pytest.mark.parametrize("value", [v for v in VALUES if v < 1 << 35])
def test_a_size_ends_where_it_says(value: int) -> None:
    for length in lengths(value, 5):
        data, start = b"?" + encoded(value, length) + b"?", 1 + length
        assert size(data, 1, FAR) == (start, start + value)
        assert size(data, 1, start + value) == (start, start + value), "exactly what is left"
        with pytest.raises(OddError, match=f"a field of {value} bytes at byte 1"):
            size(data, 1, start + value - 1)


@pytest.mark.parametrize("value", [0, 3, 300])
def test_a_size_has_five_bytes(value: int) -> None:
    with pytest.raises(OddError, match="at byte 0"):
        size(encoded(value, 6), 0, FAR)
    with pytest.raises(OddError, match="at byte 0"):
        size(b"\xff" * 1000, 0, FAR)  # and no more than a few bytes of it are looked at


def test_an_enum_has_the_low_32_bits() -> None:
    cases = {0: 0, 5: 5, 0x7FFFFFFF: 0x7FFFFFFF, 0x80000000: -(1 << 31), 0xFFFFFFFF: -1, (1 << 32) + 5: 5}
    assert {value: int32(value) for value in cases} == cases
    assert int32((1 << 64) - 1) == -1


def test_a_tensors_beginning_has_a_dtype_of_one_byte() -> None:
    assert dtype_and_shape(b"\x08\x7f\x12\x02\x03\x05") == (0x7F, (3, 5))
    for dtype in (b"\x80", b"\x81", b"\xff"):
        with pytest.raises(OddError, match="an unusual dtype"):
            dtype_and_shape(b"\x08" + dtype + b"\x12\x02\x03\x05")


def test_a_shape_has_so_many_extents_and_bytes() -> None:
    most = b"".join(encoded(n, 10) for n in range(MAX_RANK))
    assert packed_shape(b"?" + most + b"\x01", 1, 1 + len(most)) == tuple(range(MAX_RANK))
    for data, text in (
        (b"\x01" * (MAX_RANK + 1), f"{MAX_RANK + 1} extents"),
        (most + b"\x01", f"{len(most) + 1} bytes"),
    ):
        with pytest.raises(BadShapeError, match=text):
            packed_shape(data, 0, len(data))
    assert packed_shape(encoded((1 << 32) + 7, 5) + b"\x02", 0, 6) == (7, 2), "uint32: the low 32 bits"
    with pytest.raises(OddError, match="beyond its shape"):
        packed_shape(b"\x01\x80\x01", 0, 2)


@pytest.mark.parametrize(
    ("wire", "data", "stop"),
    [(0, b"\x80\x01", 3), (0, b"\x05", 2), (1, b"", 9), (2, b"\x02", 4), (2, b"\x00", 2), (5, b"", 5)],
)
def test_an_unknown_field_is_skipped_to_its_end(wire: int, data: bytes, stop: int) -> None:
    for number in (1, 15, 1000):
        assert skip(b"?" + data + b"\x00" * 8, 1, 10, number << 3 | wire) == stop
    with pytest.raises(OddError, match="field number 0 before byte 1"):
        skip(b"?" + data + b"\x00" * 8, 1, 10, wire)


@pytest.mark.parametrize("wire", [3, 4, 6, 7])
def test_groups_and_unknown_wire_types_are_not_for_the_scanner(wire: int) -> None:
    with pytest.raises(OddError, match=f"wire type {wire} before byte 1"):
        skip(b"?" + b"\x00" * 16, 1, 17, 8 | wire)
