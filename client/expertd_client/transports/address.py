"""Addresses of servers as people write them, and what gRPC wants to hear.

experts.example             port 50051
experts.example:50051        or 10.0.0.7:50051
[::1], [::1]:50051           IPv6 in brackets
https://experts.example     TLS; http://: plain text.  The port is 50051 there, too
unix:/run/expertd.sock      a socket in the file system
dns:///name:50051            other targets of gRPC, as they are: dns, ipv4, ipv6, xds, vsock, unix-abstract
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from dataclasses import dataclass

from expertd.tcp.entry import host_of
from expertd_client.transports.credentials import Credentials

__all__ = ["PORT", "Address", "parse_address", "reach"]

PORT = 50051
"""Where an address names none: that of `expertd serve`."""

_OF_GRPC = ("dns:", "ipv4:", "ipv6:", "xds:", "vsock:", "unix-abstract:")
_WANT = "HOST, HOST:PORT, [::1]:PORT, http://HOST:PORT, https://HOST:PORT (TLS) or unix:/path"
_MOST_OF_A_SOCKET = 107
"""Bytes of a path that the kernel takes."""


@dataclass(frozen=True, slots=True)
class Address:
    """target: for gRPC; host: "" where a target names none; secure: whether it says https or http, None = neither."""

    target: str
    host: str
    secure: bool | None = None

    def with_port(self, port: int | str) -> str:
        """Another port of its host; of this host where it names none."""
        return f"{_bracketed(self.host or '127.0.0.1')}:{port}"


def parse_address(text: str) -> Address:
    """Raises ValueError, whose text says what is right."""
    if not text.isprintable():
        raise _wrong(text, "a control character")
    if text.startswith("unix:"):
        return Address(_socket(text), "")
    if text.startswith(_OF_GRPC) and not re.fullmatch(r"\w+:\d+", text):  # a host may be called "dns"
        return Address(text, host_of(text))
    scheme, slashes, rest = text.rpartition("://")
    if scheme not in ("http", "https", ""):
        raise _wrong(text, f"the scheme {scheme!r}")
    if slashes:
        rest = rest.removesuffix("/")
        for mark, name in (("/", "a path"), ("?", "a query"), ("@", "a user")):
            if mark in rest:
                raise _wrong(text, f"{name} in it")
    host, port = _host_and_port(text, rest)
    secure = scheme == "https" if slashes else None
    return Address(f"{_bracketed(host)}:{port}", host, secure)


def reach(address: str, credentials: Credentials | None = None) -> tuple[str, Credentials]:
    """The gRPC target, and the credentials as the address wants them.  Raises ValueError."""
    found, shown = parse_address(address), credentials or Credentials()
    if found.secure is False and shown.secure:
        got = "http:// and certificates or TLS beside it"
        raise ValueError(f"address {address}: got {got}, want https:// or no scheme: http:// is plain text")
    if found.secure and not shown.secure:
        shown = dataclasses.replace(shown, tls=True)
    return found.target, shown


def _host_and_port(text: str, rest: str) -> tuple[str, int]:
    m = re.fullmatch(r"(?:\[([^\]]*)\]|([^:\[\]]*))(?::([^:]*))?", rest)
    if m is None:
        if _is_v6(rest):
            raise ValueError(
                f"address {text!r}: got an IPv6 address without brackets, want [{rest}] or [{rest}]:{PORT}"
            )
        raise _wrong(text, "neither a host nor a host and a port")
    host, port = m[1] if m[1] is not None else m[2], m[3]
    if m[1] is not None and not _is_v6(host):
        raise _wrong(text, f"{host!r} in brackets, which is no IPv6 address,")
    if m[1] is None and not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9_.])?", host):
        raise _wrong(text, f"the host {host!r}" if host else "no host")
    if port is not None and not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise _wrong(text, f"the port {port!r}", "; ports go from 1 to 65535")
    return host, PORT if port is None else int(port)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _socket(text: str) -> str:
    path = text.removeprefix("unix:")
    path = path.removeprefix("//") if path.startswith("///") else path
    if not path or path.startswith("//") or "\0" in path or len(path.encode()) > _MOST_OF_A_SOCKET:
        raise ValueError(f"address {text!r}: want unix:/path, of 1 to {_MOST_OF_A_SOCKET} bytes")
    return f"unix:{path}"


def _is_v6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text.partition("%")[0]).version == 6
    except ValueError:
        return False


def _wrong(text: str, got: str, more: str = "") -> ValueError:
    return ValueError(f"address {text!r}: got {got}, want {_WANT}{more}")
