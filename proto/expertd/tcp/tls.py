"""Frames through TLS: a thread that carries bytes between a TLS socket and a plain one of this process.

The C++ of either side reads and writes sockets and knows no TLS, so it gets one end of a pair of Unix sockets; the
thread has the other end and the TLS socket.  It costs two copies and a thread's wake-up each way, and keeps OpenSSL
where the interpreter already has it.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time

__all__ = ["carried"]

_PIECE = 1 << 18
_ROOM = 1 << 20
"""Of the pair of sockets."""
_LAST_S = 10.0
"""For what was written to the plain socket before it was closed: the other host may not read."""


def carried(secure: ssl.SSLSocket, name: str) -> socket.socket:
    """A plain socket with what `secure` receives and sends, until either end is closed.  secure: after its handshake;
    closed by the thread."""
    plain, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for s in (plain, far):
        s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM)
        s.setblocking(False)
    secure.setblocking(False)
    threading.Thread(target=_carry, args=(secure, far), name=name, daemon=True).start()
    return plain


def _carry(secure: ssl.SSLSocket, plain: socket.socket) -> None:
    with contextlib.suppress(OSError, ValueError):
        _Carrier(secure, plain).run()
    for s in (plain, secure):
        with contextlib.suppress(OSError):
            s.shutdown(socket.SHUT_RDWR)
        s.close()


class _Carrier:
    """Both ways, in one thread: a TLS connection is not for two."""

    def __init__(self, secure: ssl.SSLSocket, plain: socket.socket) -> None:
        self._secure, self._plain = secure, plain
        self._out, self._in = memoryview(b""), memoryview(b"")  # to the secure side, to the plain one
        self._out_room, self._in_room = bytearray(_PIECE), bytearray(_PIECE)
        self._wants = 0  # of the TLS socket, beside what there is to carry
        self._poll = select.poll()
        self._closed: set[int] = set()  # sides whose other end is closed: poll() would return at once for ever
        self._until_s: float | None = None  # when _LAST_S are over

    def run(self) -> None:
        """Raises OSError when either end is closed, or nobody reads what was left."""
        while True:
            self._wants = 0
            if not self._outward() | self._inward():
                self._wait()

    def _wait(self) -> None:
        """Until one of the sockets can go on.  What a closed one has left needs no waiting."""
        secure_events = self._wants | (0 if self._in else select.POLLIN) | (select.POLLOUT if self._out else 0)
        plain_events = (0 if self._out else select.POLLIN) | (select.POLLOUT if self._in else 0)
        for side, events in ((self._secure, secure_events), (self._plain, plain_events)):
            if side.fileno() not in self._closed:
                self._poll.register(side, events)
        left_s = None if self._until_s is None else self._until_s - time.monotonic()
        found = self._poll.poll(None if left_s is None else max(0.0, 1000 * left_s))
        if not found or (left_s is not None and left_s < 0):
            raise OSError("the other host did not read what was left")
        for fd, events in found:
            if events & (select.POLLHUP | select.POLLERR):
                self._closed.add(fd)
                self._poll.unregister(fd)
        if self._until_s is None and self._plain.fileno() in self._closed:
            self._until_s = time.monotonic() + _LAST_S

    def _outward(self) -> bool:
        if not self._out:
            try:
                n = self._plain.recv_into(self._out_room)
            except BlockingIOError:
                return False
            if not n:
                raise OSError("the plain side ended")
            self._out = memoryview(self._out_room)[:n]
        try:
            self._out = self._out[self._secure.send(self._out) :]
        except ssl.SSLWantReadError:
            self._wants |= select.POLLIN
            return False
        except ssl.SSLWantWriteError:
            self._wants |= select.POLLOUT
            return False
        return True

    def _inward(self) -> bool:
        if not self._in:
            try:
                n = self._secure.recv_into(self._in_room)
            except ssl.SSLWantReadError:
                return False
            except ssl.SSLWantWriteError:
                self._wants |= select.POLLOUT
                return False
            if not n:
                raise OSError("the secure side ended")
            self._in = memoryview(self._in_room)[:n]
        try:
            self._in = self._in[self._plain.send(self._in) :]
        except BlockingIOError:
            return False
        return True
