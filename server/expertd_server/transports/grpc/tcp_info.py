"""The connections of this process as the kernel sees them: gRPC opens them, and shows none of them."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import stat
import struct
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Connected", "Peer", "Sockets", "peer_of"]

Peer = tuple[str, int]
"""Address and port of the other side of a connection."""

_RECEIVED_AT, _TCP_INFO_BYTES = 128, 136
"""Where struct tcp_info has tcpi_bytes_received, since Linux 4.1."""


class Connected(NamedTuple):
    """received: bytes, ever.  inode: the socket's, because its descriptor may be another's by the time it is used."""

    fd: int
    inode: int
    received: int


class Sockets:
    """Of this process.  Where there is no TCP_INFO (not Linux) it has none."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[int, Peer] | None] = {}
        self._libc = ctypes.CDLL(None)
        self._info, self._length = ctypes.create_string_buffer(_TCP_INFO_BYTES), ctypes.c_uint32()

    def connected(self, port: int) -> dict[Peer, Connected]:
        """The connections that came to `port`."""
        out: dict[Peer, Connected] = {}
        known, self._known = self._known, {}
        for fd, inode in _socket_fds():
            key = (fd, inode)
            ends = self._known[key] = known[key] if key in known else _ends(fd, inode)
            if ends is not None and ends[0] == port:
                received = self._received(fd)
                if received is not None:
                    out[ends[1]] = Connected(fd, inode, received)
        return out

    def _received(self, fd: int) -> int | None:
        self._length.value = _TCP_INFO_BYTES
        what = getattr(socket, "TCP_INFO", -1)
        if self._libc.getsockopt(fd, socket.IPPROTO_TCP, what, self._info, ctypes.byref(self._length)) != 0:
            return None
        if self._length.value < _TCP_INFO_BYTES:
            return None
        return int(struct.unpack_from("=Q", self._info.raw, _RECEIVED_AT)[0])

    @staticmethod
    def shut(c: Connected) -> None:
        """End the connection; who reads from it sees its end."""
        with contextlib.suppress(OSError), _borrowed(c.fd, c.inode) as its:
            its.shutdown(socket.SHUT_RDWR)


def peer_of(host: str, port: int) -> Peer:
    """One spelling of an address: without a zone, and IPv4 where it is that."""
    a = ipaddress.ip_address(host.partition("%")[0])
    mapped = a.ipv4_mapped if isinstance(a, ipaddress.IPv6Address) else None
    return str(mapped or a), port


@contextlib.contextmanager
def _borrowed(fd: int, inode: int) -> Iterator[socket.socket]:
    """Somebody else's socket, without a second descriptor: while that is open, epoll speaks of a connection that its
    owner has closed and forgotten.  Raises OSError where it is that no more."""
    its = socket.socket(fileno=fd)
    try:
        if os.fstat(fd).st_ino != inode:
            raise OSError("another one by now")
        yield its
    finally:
        its.detach()


def _socket_fds() -> list[tuple[int, int]]:
    """Descriptors and inodes of the sockets of this process."""
    out = []
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                s = os.fstat(int(name))
                if stat.S_ISSOCK(s.st_mode):
                    out.append((int(name), s.st_ino))
    return out


def _ends(fd: int, inode: int) -> tuple[int, Peer] | None:
    """Own port and peer.  None = no connection of TCP."""
    with contextlib.suppress(OSError), _borrowed(fd, inode) as its:
        if its.family in (socket.AF_INET, socket.AF_INET6) and its.type == socket.SOCK_STREAM:
            there = its.getpeername()
            return its.getsockname()[1], peer_of(there[0], there[1])
    return None
