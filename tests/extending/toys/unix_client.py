"""The client's side of a toy transport: messages of the stream, each behind its length, on a Unix socket.

See expertd_client/transports/protocol.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading

from expertd.codec import decode_stream_response, encode_stream_request
from expertd.errors import RequestCancelledError, UnavailableError
from expertd.v1 import expert_service_pb2 as pb

__all__ = ["AsyncUnixTransport", "UnixTransport"]

NAME = "unix"
LENGTH = struct.Struct("<I")


class UnixTransport:
    """For ExpertClient.  carried: requests that travelled here, ever, of all connections of this process."""

    name = NAME
    carried = 0

    def __init__(self, target, credentials):
        del target, credentials

    def open(self, answer, deliver, closed, ready):
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(f"\0{answer.endpoint}")
            sock.sendall(answer.token.encode())
        except OSError as e:
            ready(UnavailableError(f"unix: {e}"))
        else:
            ready(Connection(sock, deliver, closed))

    def close(self):
        pass


class AsyncUnixTransport(UnixTransport):
    """For AsyncExpertClient: what comes is handed to the loop."""

    def open(self, answer, deliver, closed, ready):
        loop = asyncio.get_running_loop()

        def later(call):
            def hand_over(value):
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(call, value)

            return hand_over

        super().open(answer, later(deliver), later(closed), ready)


class Connection:
    """A SessionConnection; a thread reads."""

    blocking = None

    def __init__(self, sock, deliver, closed):
        self._sock, self._deliver, self._closed = sock, deliver, closed
        self._lock = threading.Lock()
        self._error = UnavailableError("unix: the server ended the connection")
        threading.Thread(target=self._read, daemon=True).start()

    def takes(self, request):
        return True

    def forward(self, request_id, timeout_us, request):
        UnixTransport.carried += 1
        self._send(request.view(request_id, timeout_us))

    def cancel(self, request_id):
        self._send(pb.CancelRequest(request_id=request_id))

    def close(self):
        self.broke(RequestCancelledError("unix: closed by this client"))

    def broke(self, error):
        self._error = error
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _send(self, message):
        data = encode_stream_request(message)
        with self._lock, contextlib.suppress(OSError):  # the thread that reads says that it is over
            self._sock.sendall(LENGTH.pack(len(data)) + data)

    def _read(self):
        with contextlib.suppress(OSError):
            while len(head := self._sock.recv(LENGTH.size, socket.MSG_WAITALL)) == LENGTH.size:
                data = self._sock.recv(LENGTH.unpack(head)[0], socket.MSG_WAITALL)
                self._deliver(decode_stream_response(data))
        self._sock.close()
        self._closed(self._error)
