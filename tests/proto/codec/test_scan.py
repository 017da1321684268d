"""Single fields at their bounds, against numbers that are written here byte by byte."""

from __future__ import annotations

import pytest

from expertd.codec.scan import OddError, size, skip, tag, varint

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
