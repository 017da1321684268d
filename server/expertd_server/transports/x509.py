"""When a certificate ends.  The standard library reads that of its own connections only, and gRPC has others."""

from __future__ import annotations

import ssl
from datetime import datetime, timezone

__all__ = ["certificate_until_s"]

_VERSION, _UTC_TIME = 0xA0, 0x17


def certificate_until_s(pem: bytes) -> float:
    """`notAfter` of an X.509 certificate in PEM (RFC 5280, section 4.1), as time.time() counts.  Raises ValueError."""
    try:
        der = ssl.PEM_cert_to_DER_cert(pem.decode("ascii"))
        _, at, _ = _element(der, 0)  # Certificate
        _, at, _ = _element(der, at)  # TBSCertificate
        tag, _, after = _element(der, at)
        if tag == _VERSION:
            at = after
        for _ in range(3):  # serialNumber, signature, issuer
            _, _, at = _element(der, at)
        _, at, _ = _element(der, at)  # validity
        _, _, at = _element(der, at)  # notBefore
        tag, begin, end = _element(der, at)
        text = der[begin:end].decode("ascii")
        if tag == _UTC_TIME:  # two digits of the year, 1950 to 2049
            text = ("19" if text >= "50" else "20") + text
        return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=timezone.utc).timestamp()
    except IndexError:
        raise ValueError("certificate: it is cut short") from None


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """(tag, begin, end) of the contents of the element at `at`."""
    length, begin = der[at + 1], at + 2
    if length & 0x80:
        size = length & 0x7F
        length, begin = int.from_bytes(der[begin : begin + size], "big"), begin + size
    if begin + length > len(der):
        raise IndexError
    return der[at], begin, begin + length
