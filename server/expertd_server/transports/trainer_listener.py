"""Who may have a server read tensors in memory of a GPU of its host: a process of the server's own user that asked for
it at WeightsService.

    trainers.offer("step-7")     endpoint and token for BeginUpdateResponse
    the trainer                  connects to the endpoint, a Unix socket without a name in any file system, and sends it
    the listener                 looks who that is (the kernel says), and takes the token once
    trainers.admitted("step-7")  while that socket is open
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time

from expertd.common.accepting import REST_S, is_shortage, tell_shortage
from expertd.shm.region import host_id, peer_uid, supported
from expertd.tcp.entry import read_exactly
from expertd_server.transports.tokens import Tokens

__all__ = ["TrainerListener"]

log = logging.getLogger(__name__)

_TOKEN_CHARACTERS = 64
_HELLO_S = 2.0
_WELCOME = b"\x01"


class TrainerListener:
    """It listens from the first offer on, with a thread of its own.  One trainer at a time: there is one update."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens: Tokens[str] = Tokens()
        self._listener: socket.socket | None = None
        self._endpoint = ""
        self._inside: tuple[str, socket.socket] | None = None
        self._closed = False

    def offer(self, update: str, host: str) -> tuple[str, str, str]:
        """(endpoint, token, "") for a trainer on `host`, or ("", "", why not)."""
        if why := supported():
            return "", "", why
        if host != host_id():
            return "", "", "the caller is on another host, or in another network namespace"
        with self._lock:
            if self._closed:
                return "", "", "the server closes"
            if self._listener is None:
                self._listen()
            token = self._tokens.issue(update)
        return (self._endpoint, token, "") if token else ("", "", "too many updates are being begun; try again")

    def admitted(self, update: str) -> bool:
        """Whether the update's trainer has shown itself, and is still there."""
        with self._lock:
            inside = self._inside
            if inside is None or inside[0] != update:
                return False
            try:
                return inside[1].recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) != b""
            except BlockingIOError:
                return True
            except OSError:
                return False

    def close(self) -> None:
        with self._lock:
            self._closed = True
            listener, self._listener = self._listener, None
            inside, self._inside = self._inside, None
        if inside is not None:
            inside[1].close()
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # which accept() hears
            listener.close()

    def _listen(self) -> None:
        name = f"\0expertd-{secrets.token_hex(16)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        listener.bind(name)
        listener.listen(4)
        self._listener, self._endpoint = listener, "unix-abstract:" + name[1:]
        threading.Thread(target=self._run, args=(listener,), name="expertd-trainers", daemon=True).start()

    def _run(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError as e:
                if not is_shortage(e):
                    return  # close() was called
                tell_shortage("updates: trainers", e)
                time.sleep(REST_S)
                continue
            update = self._heard(sock)
            if update is None:
                sock.close()
                continue
            with self._lock:
                before, self._inside = self._inside, (update, sock)
            if before is not None:
                before[1].close()
            with contextlib.suppress(OSError):
                sock.sendall(_WELCOME)

    def _heard(self, sock: socket.socket) -> str | None:
        """The update that the socket's token is for; None: it has none, or is another user's."""
        try:
            if peer_uid(sock) not in (os.getuid(), 0):
                log.warning("updates: refused a process of another user")
                return None
            said = read_exactly(sock, _TOKEN_CHARACTERS, time.monotonic() + _HELLO_S)
            sock.setblocking(False)
        except OSError:
            said = b""
        update = self._tokens.take_said(said)
        if update is None:
            log.warning("updates: refused a trainer with an invalid token")
        return update
