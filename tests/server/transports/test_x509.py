"""When a certificate ends, from its bytes; tests/rpc/test_security.py compares with OpenSSL."""

from __future__ import annotations

import ssl
from datetime import datetime, timezone

import pytest

from expertd_server.transports.x509 import certificate_until_s

SEQUENCE, INTEGER, VERSION, UTC, GENERALIZED = 0x30, 0x02, 0xA0, 0x17, 0x18


def element(tag: int, *parts: bytes) -> bytes:
    contents = b"".join(parts)
    assert len(contents) < 128, "lengths of one byte"
    return bytes([tag, len(contents)]) + contents


def certificate(tag: int, not_after: str, *before: bytes) -> bytes:
    """As much of one as its end needs, in PEM.  before: what stands before the serial number."""
    validity = element(SEQUENCE, element(UTC, b"490101000000Z"), element(tag, not_after.encode()))
    number, empty = element(INTEGER, b"\x07"), element(SEQUENCE)
    der = element(SEQUENCE, element(SEQUENCE, *before, number, empty, empty, validity))
    return ssl.DER_cert_to_PEM_cert(der).encode()


@pytest.mark.parametrize(
    ("tag", "text", "year"),
    [
        (UTC, "000102030405Z", 2000),
        (UTC, "490102030405Z", 2049),
        (UTC, "500102030405Z", 1950),
        (UTC, "990102030405Z", 1999),
        (GENERALIZED, "20500102030405Z", 2050),
        (GENERALIZED, "99990102030405Z", 9999),
    ],
)
@pytest.mark.parametrize("before", [(), (element(VERSION, element(INTEGER, b"\x02")),)], ids=["v1", "v3"])
def test_two_digits_of_a_year_are_1950_to_2049(tag, text, year, before):
    want = datetime(year, 1, 2, 3, 4, 5, tzinfo=timezone.utc).timestamp()
    assert certificate_until_s(certificate(tag, text, *before)) == want
