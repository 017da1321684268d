"""The server's side of a toy transport: messages of the stream, each behind its length, on a Unix socket.

One thread accepts; each connection has one that reads and one that writes.  See transports/protocol.py.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import socket
import struct
import threading
import time

from expertd.codec import decode_stream_request, encode_stream_response
from expertd.errors import ExpertdError
from expertd_server.service.connection import ClientConnection
from expertd_server.service.response import response_view

__all__ = ["NAME", "unix_listener"]

NAME = "unix"
LENGTH = struct.Struct("<I")
TOKEN_BYTES = 64


def unix_listener(config, service, infos):
    """See transports/table.py."""
    del config, infos
    listener = UnixListener(service)
    listener.start()
    return listener


class UnixListener:
    notice = "unix: listening"

    def __init__(self, service):
        self._service, self._tokens, self._connections = service, {}, []

    def start(self):
        self._endpoint = f"expertd-toy-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"\0{self._endpoint}")
        self._listener.listen()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()
        return self._endpoint

    def open(self):
        pass

    def drain(self, until_s):
        while (busy := any(c.session.busy for c in self._connections)) and time.monotonic() < until_s:
            time.sleep(0.01)
        self.close()
        return not busy

    def close(self):
        for sock in (self._listener, *(c.sock for c in self._connections)):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in (self._thread, *(t for c in self._connections for t in c.threads)):
            thread.join(20)

    def offer(self, caller, host):
        token = secrets.token_hex(TOKEN_BYTES // 2)
        self._tokens[token] = caller
        return token, self._endpoint, ""

    def dismiss(self, unwelcome):
        for connection in self._connections:
            if unwelcome(connection.caller):
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def _accept(self):
        with self._listener:
            while True:
                try:
                    sock, _ = self._listener.accept()
                except OSError:
                    return
                caller = self._tokens.pop(sock.recv(TOKEN_BYTES, socket.MSG_WAITALL).decode(), None)
                if caller is None:
                    sock.close()
                else:
                    self._connections.append(Connection(self._service, sock, caller))


class Connection:
    """An Outlet."""

    def __init__(self, service, sock, caller):
        self.sock, self.caller, self._service = sock, caller, service
        self._outbox = queue.SimpleQueue()
        self.session = ClientConnection(service, self, caller, transport=NAME)
        self.threads = [threading.Thread(target=work, daemon=True) for work in (self._read, self._write)]
        for thread in self.threads:
            thread.start()

    def answer(self, request, answer):
        view = response_view(request, answer, self._service.load_message())
        self._outbox.put((encode_stream_response(view), request.answer_bytes))

    def ready(self, message, answer_bytes):
        self._outbox.put((message, answer_bytes))

    def send(self, message):
        self._outbox.put((encode_stream_response(message), 0))

    def _read(self):
        for data in messages(self.sock):
            try:
                self._service.check_size(len(data))
                message = decode_stream_request(data)
            except ExpertdError as e:
                self.session.refuse(e, 0)
                continue
            wait = self.session.take(message, time.monotonic_ns())
            if wait is not None:
                wait.result()
        self.session.end()
        self.session.close()
        self._outbox.put(None)

    def _write(self):
        while (item := self._outbox.get()) is not None:
            data, answer_bytes = item
            with contextlib.suppress(OSError):
                self.sock.sendall(LENGTH.pack(len(data)) + data)
            self.session.written(answer_bytes)
        self.sock.close()


def messages(sock):
    """Until either side ends the connection."""
    with contextlib.suppress(OSError):
        while len(head := sock.recv(LENGTH.size, socket.MSG_WAITALL)) == LENGTH.size:
            (size,) = LENGTH.unpack(head)
            data = sock.recv(size, socket.MSG_WAITALL)
            if len(data) < size:
                return
            yield data
