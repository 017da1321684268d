"""TCP: how callers on other hosts get a session of frames (expertd.tcp), which the engine's core then serves.

    listener.offer(caller)   a token and an endpoint for a SessionAnswer, or why not
    the client           connects to the endpoint, through TLS where gRPC has it, and sends the token
    the listener             takes the token once, says how long a message may be, gives the socket to the core
    the socket           stays open: when either side goes, the other sees it

A thread accepts; each client that is entering has one of its own, for seconds.  No error and no log names a token.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from expertd.common.accepting import Accepting
from expertd.tcp.entry import ENTRY_BYTES, Endpoint, read_exactly, settle, token_of, welcome
from expertd.tcp.tls import carried
from expertd_server.config.values import Address
from expertd_server.engine.tcp_connections import TcpBounds
from expertd_server.transports.tokens import Tokens, has_share

__all__ = ["TcpListener", "TcpEngine"]

log = logging.getLogger(__name__)

_ENTER_S = 3.0
"""For TLS and the token."""
_POLL_S = 0.002
_GONE_S = 1.0
_BACKLOG = 64
_MOST_ENTERING = 128
_WILDCARDS = ("0.0.0.0", "::")


class ServedConnections(Protocol):
    """Connections whose clients were let in: engine.tcp_connections.TcpConnections."""

    bell: int

    def add(self, fd: int, caller: str) -> int: ...

    def remove(self, handle: int) -> None: ...

    def gone(self) -> Sequence[int]: ...

    @property
    def unwritten(self) -> int: ...


class TcpEngine(Protocol):
    """What the listener needs of the engine."""

    def idle(self) -> bool:
        """Whether everything that was taken is answered."""
        ...

    def open_tcp_connections(self, bounds: TcpBounds) -> ServedConnections:
        """Serve sessions over TCP; once."""
        ...


class TcpListener:
    """A Listener.  tls: the context of a new connection, None = plain text."""

    def __init__(
        self,
        engine: TcpEngine,
        listen: Address,
        bounds: TcpBounds,
        *,
        tls: Callable[[], ssl.SSLContext] | None = None,
        most_sessions: int = 256,
    ) -> None:
        self._engine, self._listen, self._bounds = engine, listen, bounds
        self._tls, self._most = tls, most_sessions
        self._tokens: Tokens[str] = Tokens()
        self._lock = threading.Lock()
        self._sessions: dict[int, str] = {}  # their callers, by handle
        self._admitting: list[str] = []  # callers whose token was taken
        self._entering = threading.Semaphore(_MOST_ENTERING)
        self._draining = self._closing = self._open = False
        self.address = ""

    def start(self) -> str:
        """Raises OSError where the address cannot be had."""
        family = socket.AF_INET6 if ":" in self._listen.host else socket.AF_INET
        self._listener = socket.create_server((self._listen.host, self._listen.port), family=family, backlog=_BACKLOG)
        self._listener.setblocking(False)
        port = self._listener.getsockname()[1]
        self.address = str(Address(self._listen.host, port))
        host = "" if self._listen.host in _WILDCARDS else self._listen.host
        self._endpoint = str(Endpoint(self._tls is not None, host, port))
        self._tcp_connections = self._engine.open_tcp_connections(self._bounds)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="expertd-tcp", daemon=True)
        self._thread.start()
        self._open = True
        return self.address

    def open(self) -> None:
        """Sessions may come before: their requests wait."""

    def drain(self, until_s: float) -> bool:
        """Open no session any more, and end those that are there when everything is answered and read."""
        self._draining = True
        while not (done := self._engine.idle() and not self._tcp_connections.unwritten) and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        self.close()
        return done

    @property
    def notice(self) -> str:
        """Where it listens, after start()."""
        return f"sessions over TCP on {self.address}"

    @property
    def sessions(self) -> int:
        """That are served now."""
        return len(self._sessions)

    def offer(self, caller: str, host: str) -> tuple[str, str, str]:
        """(token, endpoint, "") for a caller, or ("", "", why not)."""
        del host
        if self._draining or self._closing or not self._open:
            return "", "", "the server drains"
        with self._lock:
            taken = [*self._sessions.values(), *self._admitting, *self._tokens.waiting()]
            own = taken.count(caller)
            if len(taken) >= self._most:
                return "", "", f"the server has {self._most} sessions over TCP, and no room for more"
            if not has_share(own, len(taken), self._most):
                return (
                    "",
                    "",
                    f"this caller has {own} of {self._most} sessions over TCP, its share",
                )
            token = self._tokens.issue(caller)
        return (token, self._endpoint, "") if token else ("", "", "too many sessions are being opened; try again")

    def dismiss(self, unwelcome: Callable[[str], bool]) -> None:
        """Ends the sessions of callers who are let in no more, and forgets their tokens."""
        self._tokens.drop(unwelcome)
        with self._lock:
            found = [handle for handle, caller in self._sessions.items() if unwelcome(caller)]
        for handle in found:
            self._tcp_connections.remove(handle)

    def close(self) -> None:
        """Ends every session."""
        if not self._open or self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(10)
        os.close(self._wake)

    # ---- the listener's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        poll = select.poll()
        accepting = Accepting(self._listener, poll, "tcp: clients")
        for fd in (self._wake, self._tcp_connections.bell):
            poll.register(fd, select.POLLIN)
        while not self._closing:
            for fd, _ in poll.poll(accepting.timeout_ms()):
                if fd == self._listener.fileno():
                    self._welcome(accepting)
                elif fd == self._tcp_connections.bell:
                    self._bury()
        self._listener.close()
        with self._lock:
            left = list(self._sessions)
        for handle in left:
            self._tcp_connections.remove(handle)
        until_s = time.monotonic() + _GONE_S
        while self._sessions and time.monotonic() < until_s:
            self._bury()
            time.sleep(_POLL_S)

    def _bury(self) -> None:
        gone = self._tcp_connections.gone()
        with self._lock:
            for handle in gone:
                self._sessions.pop(handle, None)

    def _welcome(self, accepting: Accepting) -> None:
        sock = accepting.accept()
        if sock is None:
            return
        if not self._entering.acquire(blocking=False):
            sock.close()
            return
        try:
            threading.Thread(target=self._enter, args=(sock,), name="expertd-tcp-enter", daemon=True).start()
        except RuntimeError as e:  # the host has no thread left
            self._entering.release()
            sock.close()
            log.warning("tcp: refused a client: %s", e)

    # ---- a client's thread -------------------------------------------------------------------------------------------

    def _enter(self, sock: socket.socket) -> None:
        try:
            self._admit(sock)
        except (OSError, ValueError):  # it went, or speaks no TLS
            sock.close()
        finally:
            self._entering.release()

    def _admit(self, sock: socket.socket) -> None:
        """Raises OSError, ValueError."""
        until_s = time.monotonic() + _ENTER_S
        settle(sock)
        if self._tls is not None:
            sock.settimeout(_ENTER_S)
            sock = self._tls().wrap_socket(sock, server_side=True)
        said = read_exactly(sock, ENTRY_BYTES, until_s)
        token = token_of(said) if len(said) == ENTRY_BYTES else None
        with self._lock:
            caller = None if token is None else self._tokens.take(token)
            if caller is not None:
                self._admitting.append(caller)
        if caller is None:
            if said:
                log.warning("tcp: refused a client with an invalid token")
            sock.close()
            return
        try:
            welcome(sock, self._bounds.most_message)
            if isinstance(sock, ssl.SSLSocket):
                sock = carried(sock, "expertd-tcp-tls")
            sock.setblocking(False)
        except BaseException:
            with self._lock:
                self._admitting.remove(caller)
            raise
        with self._lock:
            self._admitting.remove(caller)
            handle = self._tcp_connections.add(sock.detach(), caller)
            self._sessions[handle] = caller
        if self._closing:
            self._tcp_connections.remove(handle)
