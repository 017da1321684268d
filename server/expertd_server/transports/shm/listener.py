"""Shared memory: how callers on this host get a region of their own (expertd.shm), which the engine's core then serves
without a message.

    listener.offer(caller)   a token and an endpoint for a SessionAnswer, or why not
    the client           connects to the endpoint, a Unix socket without a name in any file system, and sends the token
    the listener             looks who that is (the kernel says), takes the token once, makes a region and sends it
    the socket           stays open: bells go through it, and when either side goes, the other sees it

A thread of its own, which sleeps unless somebody comes or goes.  No error and no log names a token, a socket or a
descriptor.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from expertd.common.accepting import Accepting
from expertd.shm.layout import ENTRIES, PAGE, region_bytes
from expertd.shm.pool import Pool, PoolError
from expertd.shm.region import Region, RegionError, host_id, peer_uid, supported
from expertd_server.engine.sizes import MOST_POOLS, POOL_BYTES
from expertd_server.transports.tokens import Tokens, has_share

__all__ = ["GpuListener", "ShmListener", "ShmEngine"]

log = logging.getLogger(__name__)

_TOKEN_BYTES = 32
_HELLO_S = 2.0
"""How long a client that connected may take to send its token."""
_POLL_S = 0.002
_BACKLOG = 64
_WORDS_BYTES = PAGE
"""Of the arena of a session from a GPU: its tensors lie in the pool."""
_MOST_GUESTS = 512
"""Connections, those that have not sent their token and those that have a session."""


class ServedConnections(Protocol):
    """See engine.shm_connections."""

    def add(self, region: Region, caller: str, pool: Pool | None = None) -> int: ...

    def remove(self, handle: int) -> None: ...

    def pool(self, nbytes: int) -> Pool: ...

    def pool_refusal(self) -> str: ...


class ShmEngine(Protocol):
    """What the listener needs of the engine."""

    @property
    def shm_connections(self) -> ServedConnections: ...

    def idle(self) -> bool:
        """Whether everything that was taken is answered."""
        ...


@dataclass
class _Client:
    """One client's socket.  handle: of its session, 0 before it has one."""

    sock: socket.socket
    until_s: float
    said: bytes = b""
    handle: int = 0
    on_device: bool = False
    caller: str = ""


class _Token(NamedTuple):
    caller: str
    on_device: bool


class GpuListener:
    """A Listener for connections whose tensors lie on a GPU ("cuda_ipc").  It listens, drains and closes with the
    ShmListener that it belongs to."""

    notice = ""

    def __init__(self, listener: ShmListener) -> None:
        self._shm = listener

    def start(self) -> str:
        """The ShmListener listens already."""
        return ""

    def open(self) -> None:
        """See ShmListener."""

    def drain(self, until_s: float) -> bool:
        """The ShmListener does."""
        del until_s
        return True

    def close(self) -> None:
        """The ShmListener does."""

    def offer(self, caller: str, host: str) -> tuple[str, str, str]:
        """See ShmListener."""
        return self._shm.offer(caller, host, on_device=True)

    def dismiss(self, unwelcome: Callable[[str], bool]) -> None:
        """See ShmListener, whose sessions these are, too."""
        self._shm.dismiss(unwelcome)


class ShmListener:
    """A Listener.  arena_bytes: of each connection's region; most_bytes: of all together.  pool_bytes: of each
    connection from a GPU, on the server's; most_pools: connections from GPUs; most_guests: connections, with a session
    or not yet."""

    notice = ""

    def __init__(
        self,
        engine: ShmEngine,
        *,
        arena_bytes: int = 64 << 20,
        most_bytes: int = 4 << 30,
        pool_bytes: int = POOL_BYTES,
        most_pools: int = MOST_POOLS,
        most_guests: int = _MOST_GUESTS,
    ) -> None:
        self._engine, self._most_guests = engine, most_guests
        self._arena_bytes, self._most = arena_bytes, most_bytes
        self._pool_bytes, self._most_pools = pool_bytes, most_pools
        self._each = region_bytes(ENTRIES, arena_bytes)
        self._lock = threading.Lock()
        self._tokens: Tokens[_Token] = Tokens()
        self._guests: dict[int, _Client] = {}
        self._why_not = supported()
        self._draining = self._closing = self._open = False

    def start(self) -> str:
        """Raises OSError where this host lacks what it needs."""
        if self._why_not:
            raise OSError(self._why_not)
        name = f"\0expertd-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._listener.bind(name)
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)
        self._endpoint = "unix-abstract:" + name[1:]
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._accepting = Accepting(self._listener, self._poll, "shared memory: clients")
        self._poll.register(self._wake, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="expertd-shm", daemon=True)
        self._thread.start()
        self._open = True
        return self._endpoint

    def open(self) -> None:
        """Sessions may come before: their requests wait for nobody, and are refused like all others."""

    def drain(self, until_s: float) -> bool:
        """Open no session any more, and end those that are there when everything is answered."""
        self._draining = True
        while not (done := self._engine.idle()) and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        self.close()
        return done

    @property
    def sessions(self) -> int:
        """Regions that are served now."""
        return sum(guest.handle != 0 for guest in list(self._guests.values()))

    @property
    def gpu(self) -> GpuListener | str:
        """The way in for tensors on GPUs of this host, or why there is none."""
        return self._engine.shm_connections.pool_refusal() or GpuListener(self)

    def offer(self, caller: str, host: str, *, on_device: bool = False) -> tuple[str, str, str]:
        """(token, endpoint, "") for a caller on `host`, or ("", "", why not)."""
        why = self._why_not
        if not why and (not host or host != host_id()):
            why = "the caller is on another host, or in another network namespace"
        with self._lock:
            if not why and (self._draining or self._closing or not self._open):
                why = "the server drains"
            why = why or self._no_room(caller, on_device)
            if why:
                return "", "", why
            token = self._tokens.issue(_Token(caller, on_device))
        return (token, self._endpoint, "") if token else ("", "", "too many sessions are being opened; try again")

    def dismiss(self, unwelcome: Callable[[str], bool]) -> None:
        """Ends the sessions of callers who are let in no more, and forgets their tokens."""
        self._tokens.drop(lambda token: unwelcome(token.caller))
        for guest in list(self._guests.values()):
            if guest.handle and unwelcome(guest.caller):
                with contextlib.suppress(OSError):  # it goes by itself
                    guest.sock.shutdown(socket.SHUT_RDWR)  # which the listener's thread hears

    def close(self) -> None:
        """Ends every session."""
        if not self._open or self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(10)
        os.close(self._wake)

    def _no_room(self, caller: str, on_device: bool) -> str:
        taken = [g.caller for g in list(self._guests.values()) if g.handle and g.on_device == on_device]
        taken += [t.caller for t in self._tokens.waiting() if t.on_device == on_device]
        most = self._most_pools if on_device else self._most // self._each
        if has_share(taken.count(caller), len(taken), most):
            return ""
        if len(taken) < most:
            return f"this caller has {taken.count(caller)} of the server's {most} sessions, its share"
        if on_device:
            return f"the server has {len(taken)} sessions from GPUs, and no memory of its GPU for more"
        return f"the server's shared memory is used up: {self._most} bytes for all sessions, {self._each} for each"

    # ---- the listener's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            impatient = any(not g.handle for g in self._guests.values())
            for fd, _ in self._poll.poll(self._accepting.timeout_ms(_HELLO_S * 1000 if impatient else None)):
                if fd == self._listener.fileno():
                    self._welcome()
                elif fd in self._guests:
                    self._hear(self._guests[fd])
            self._dismiss_the_silent()
        for guest in list(self._guests.values()):
            self._dismiss(guest)
        self._listener.close()

    def _welcome(self) -> None:
        sock = self._accepting.accept()
        if sock is None:
            return
        with contextlib.suppress(OSError):
            why = "a process of another user" if peer_uid(sock) not in (os.getuid(), 0) else ""
            if not why and len(self._guests) >= self._most_guests:
                why = f"a connection: {len(self._guests)} are open, with and without a session, want fewer"
            if why:
                log.warning("shared memory: refused %s", why)
                sock.close()
                return
            sock.setblocking(False)
            self._guests[sock.fileno()] = _Client(sock, time.monotonic() + _HELLO_S)
            self._poll.register(sock.fileno(), select.POLLIN)

    def _hear(self, guest: _Client) -> None:
        """Bytes, or the end.  What a client that has its session still sends are bells, which the core reads."""
        if guest.handle:
            self._dismiss(guest)
            return
        try:
            said = guest.sock.recv(2 * _TOKEN_BYTES + 1)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        guest.said += said
        if not said or len(guest.said) > 2 * _TOKEN_BYTES:
            self._dismiss(guest)
        elif len(guest.said) == 2 * _TOKEN_BYTES:
            self._admit(guest)

    def _admit(self, guest: _Client) -> None:
        token = self._tokens.take_said(guest.said)
        if token is None:
            log.warning("shared memory: refused a client with an invalid token")
            return self._dismiss(guest)
        guest.caller = token.caller
        made: list[Region | Pool] = []
        try:
            region, pool = Region.create(_WORDS_BYTES if token.on_device else self._arena_bytes), None
            made.append(region)
            region.ring_by(guest.sock)
            if token.on_device:
                pool = self._engine.shm_connections.pool(self._pool_bytes)
                made.append(pool)
                guest.on_device = True
            guest.handle = self._engine.shm_connections.add(region, token.caller, pool)
            region.send(guest.sock)
            if pool is not None:
                pool.send(guest.sock)
            self._poll.modify(guest.sock.fileno(), select.POLLRDHUP)
        except (RegionError, PoolError, OSError) as e:
            log.warning("shared memory: a connection could not be opened: %s", e)
            if not guest.handle:
                for memory in made:
                    memory.close()
            self._dismiss(guest)

    def _dismiss_the_silent(self) -> None:
        now = time.monotonic()
        for guest in [g for g in self._guests.values() if not g.handle and g.until_s < now]:
            self._dismiss(guest)

    def _dismiss(self, guest: _Client) -> None:
        self._poll.unregister(guest.sock.fileno())
        del self._guests[guest.sock.fileno()]
        with contextlib.suppress(OSError):  # it was faster
            guest.sock.shutdown(socket.SHUT_RDWR)  # the region has it, too
        guest.sock.close()
        if guest.handle:
            self._engine.shm_connections.remove(guest.handle)
