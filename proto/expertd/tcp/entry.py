"""How a client enters a session over TCP: before the first frame, in both directions, through TLS where there is some.

    client -> server    MAGIC, then the token of the SessionAnswer (64 hexadecimal digits)
    server -> client    MAGIC, then the most bytes of a message that it takes (u64, little-endian); or the end

An endpoint is "tcp://HOST:PORT" or "tls://HOST:PORT"; without a HOST it is where the client found the server.  No text
of an error holds a token.
"""

from __future__ import annotations

import re
import socket
import struct
import time
from typing import NamedTuple

__all__ = [
    "ENTRY_BYTES",
    "Endpoint",
    "EntryError",
    "connect",
    "enter",
    "host_of",
    "parse_endpoint",
    "read_exactly",
    "settle",
    "token_of",
    "welcome",
]

_MAGIC = b"expdtcp1"
_TOKEN_DIGITS = 64
ENTRY_BYTES = len(_MAGIC) + _TOKEN_DIGITS
_WELCOME = struct.Struct("<8sQ")
_KEEPALIVE_S, _GONE_MS = 30, 60_000


class EntryError(Exception):
    """A session cannot be entered."""


class Endpoint(NamedTuple):
    """host: "" = where the client found the server."""

    secure: bool
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls' if self.secure else 'tcp'}://{host}:{self.port}"


def parse_endpoint(text: str) -> Endpoint:
    """Raises EntryError."""
    found = re.fullmatch(r"(tcp|tls)://(?:\[([0-9A-Fa-f:.%\w]+)\]|([A-Za-z0-9._-]*)):([0-9]{1,5})", text)
    if found is None or not 0 < int(found[4]) < 1 << 16:
        raise EntryError("the server names an endpoint of another kind")
    return Endpoint(found[1] == "tls", found[2] or found[3], int(found[4]))


def host_of(target: str) -> str:
    """The host of a gRPC target ("host:port", "dns:///host:port", "ipv6:[::1]:50051"); "" where it has none."""
    scheme, colon, rest = target.partition(":")
    if colon and scheme in ("dns", "ipv4", "ipv6"):
        target = rest.rpartition("/")[2]
    elif colon and (scheme in ("unix", "unix-abstract", "vsock", "xds", "passthrough") or rest.startswith("//")):
        return ""
    if target.startswith("["):
        return target[1:].partition("]")[0]
    return target.partition(":")[0] if target.count(":") <= 1 else target


def connect(host: str, port: int, timeout_s: float) -> socket.socket:
    """Raises OSError."""
    sock = socket.create_connection((host, port), timeout_s)
    settle(sock)
    return sock


def settle(sock: socket.socket) -> None:
    """What both sides want of the socket: no waiting for more bytes, and to be told when the other host is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", _KEEPALIVE_S), ("TCP_KEEPINTVL", 10), ("TCP_USER_TIMEOUT", _GONE_MS)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def enter(sock: socket.socket, token: str, timeout_s: float) -> int:
    """The client's side: the most bytes of a message.  Raises EntryError, OSError."""
    if not re.fullmatch(r"[0-9a-f]{64}", token):
        raise EntryError("the server gives a token of another form")
    sock.settimeout(timeout_s)
    sock.sendall(_MAGIC + token.encode("ascii"))
    said = read_exactly(sock, _WELCOME.size, time.monotonic() + timeout_s)
    if len(said) < _WELCOME.size:
        raise EntryError("the server refused the session")
    magic, most_bytes = _WELCOME.unpack(said)
    if magic != _MAGIC:
        raise EntryError("what answers there speaks another protocol, or another version of this one")
    return int(most_bytes)


def welcome(sock: socket.socket, most_bytes: int) -> None:
    """The server's word after read_exactly(sock, ENTRY_BYTES, ...) and token_of().  Raises OSError."""
    sock.sendall(_WELCOME.pack(_MAGIC, most_bytes))


def token_of(said: bytes) -> bytes | None:
    """The token of a client's first ENTRY_BYTES; None: these are none."""
    try:
        digits = said.removeprefix(_MAGIC).decode("ascii")
    except ValueError:
        return None
    good = said.startswith(_MAGIC) and re.fullmatch(r"[0-9a-f]{64}", digits)  # fromhex() takes spaces, too
    return bytes.fromhex(digits) if good else None


def read_exactly(sock: socket.socket, nbytes: int, until_s: float) -> bytes:
    """nbytes, or fewer where the other side ends or time.monotonic() is until_s before.  Raises OSError."""
    said = b""
    while len(said) < nbytes and (left_s := until_s - time.monotonic()) > 0:
        sock.settimeout(left_s)
        try:
            more = sock.recv(nbytes - len(said))
        except TimeoutError:
            break
        if not more:
            break
        said += more
    return said
