"""HTTP/2 by hand, as far as a caller needs it who does not do what gRPC's clients do: half a message, and silence."""

from __future__ import annotations

import contextlib
import socket
import struct

__all__ = ["HalfSent"]

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _PING, _WINDOW_UPDATE = 0, 1, 4, 6, 8


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def _header(name: bytes, value: bytes) -> bytes:
    """A literal without indexing, not compressed."""
    assert len(name) < 127
    assert len(value) < 127
    return b"\x00" + bytes((len(name),)) + name + bytes((len(value),)) + value


class HalfSent:
    """A connection with `streams` calls, each with the beginning of a message of `size` bytes."""

    def __init__(self, address: str, path: str, size: int, streams: int = 1) -> None:
        host, port = address.rsplit(":", 1)
        self._sock = socket.create_connection((host.strip("[]"), int(port)), timeout=5)
        self._size, self._buf = size, b""
        self._connection_window, self._initial = 65535, 65535
        self._windows = {2 * i + 1: 0 for i in range(streams)}
        self.sent = dict.fromkeys(self._windows, 0)
        self.closed = False
        head = b"".join(
            _header(*h)
            for h in (
                (b":method", b"POST"),
                (b":scheme", b"http"),
                (b":path", path.encode()),
                (b":authority", b"x"),
                (b"te", b"trailers"),
                (b"content-type", b"application/grpc"),
            )
        )
        out = _PREFACE + _frame(_SETTINGS, 0, 0, b"")
        out += b"".join(_frame(_HEADERS, 4, stream, head) for stream in self._windows)
        self._sock.sendall(out)

    def push(self, most: int) -> int:
        """Send on, up to `most` bytes of each message, as far as the windows allow.  Bytes sent in all."""
        try:
            self._read()
            for stream, sent in self.sent.items():
                self._push(stream, min(most, self._size) - sent)
        except OSError:
            self.closed = True
        return sum(self.sent.values())

    def _push(self, stream: int, left: int) -> None:
        while not self.closed:
            room = min(left, self._initial + self._windows[stream] - self.sent[stream], self._connection_window, 16384)
            if room <= 0:
                before = (self._connection_window, self._windows[stream], self._initial)
                self._read()
                if before == (self._connection_window, self._windows[stream], self._initial):
                    return
                continue
            payload = bytes(room)
            if self.sent[stream] == 0:
                payload = (b"\x00" + struct.pack(">I", self._size) + payload)[:room]
            self._send(_frame(_DATA, 0, stream, payload))
            self.sent[stream] += room
            self._connection_window -= room
            left -= room

    def _read(self) -> None:
        with contextlib.suppress(TimeoutError, BlockingIOError):
            while True:
                self._sock.settimeout(0.005)
                data = self._sock.recv(1 << 16)
                if not data:
                    self.closed = True
                    return
                self._buf += data
        while len(self._buf) >= 9:
            length = int.from_bytes(self._buf[:3], "big")
            if len(self._buf) < 9 + length:
                return
            kind, flags = self._buf[3], self._buf[4]
            stream = int.from_bytes(self._buf[5:9], "big")
            self._take(kind, flags, stream, self._buf[9 : 9 + length])
            self._buf = self._buf[9 + length :]

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _WINDOW_UPDATE:
            more = int.from_bytes(payload, "big")
            if stream:
                self._windows[stream] = self._windows.get(stream, 0) + more
            else:
                self._connection_window += more
        elif kind == _SETTINGS and not flags & 1:
            for i in range(0, len(payload), 6):
                number, value = struct.unpack(">HI", payload[i : i + 6])
                if number == 4:
                    self._initial = value
            self._send(_frame(_SETTINGS, 1, 0, b""))
        elif kind == _PING and not flags & 1:
            self._send(_frame(_PING, 1, 0, payload))

    def _send(self, frame: bytes) -> None:
        self._sock.settimeout(5)
        self._sock.sendall(frame)

    def close(self) -> None:
        self._sock.close()
