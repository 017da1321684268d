"""A Unix socket of a server of this host, entered with a token: for shared memory, and for what else such a server is
shown over one (expertd_client.weights.memory)."""

from __future__ import annotations

import os
import re
import socket
import time

from expertd.shm.region import peer_uid

__all__ = ["entered"]

_CONNECT_S = 2.0
_AGAIN_S = 0.005


def entered(endpoint: str, token: str) -> socket.socket:
    """The socket, once the token is sent; calls on it time out after _CONNECT_S.  Nothing is sent where the endpoint or
    the token has another form, or where a process of another user listens.  Raises OSError with the reason."""
    if not re.fullmatch(r"unix-abstract:expertd-[0-9a-f]{32}", endpoint):
        raise OSError("the server names an endpoint of another kind")
    if not re.fullmatch(r"[0-9a-f]{64}", token):
        raise OSError("the server gives a token of another form")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        _connect(sock, "\0" + endpoint.removeprefix("unix-abstract:"))
        if os.getuid() != 0 and peer_uid(sock) not in (os.getuid(), 0):
            raise OSError("session: the endpoint is a process of another user")
        sock.sendall(token.encode())
    except BaseException:
        sock.close()
        raise
    return sock


def _connect(sock: socket.socket, name: str) -> None:
    """Again where the listener has no room for the moment.  Raises OSError."""
    until_s = time.monotonic() + _CONNECT_S
    sock.settimeout(_CONNECT_S)
    while True:
        try:
            return sock.connect(name)
        except BlockingIOError:  # EAGAIN: of a Unix socket, its backlog is full
            if time.monotonic() > until_s:
                raise
            time.sleep(_AGAIN_S)
