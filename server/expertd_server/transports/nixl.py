"""NIXL: how callers on other hosts get a region that relays keep like one of theirs (expertd.nixl).

The door is that of sessions over TCP: a client comes with its token, through TLS where gRPC has it.  What it gets then
is a relay, a process of its own, which shares a region with the engine's core as a client of this host would, and keeps
the connection: when either side goes, the other sees it.  Tensors travel by NIXL, which encrypts nothing.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import threading
import weakref
from collections.abc import Sequence
from typing import Protocol

from expertd.nixl.process import RelayError, RelayProcess
from expertd.nixl.relay import FAR
from expertd.shm.region import Region, RegionError
from expertd_server.engine.peers import PeerBounds
from expertd_server.transports.shm import ShmEngine

__all__ = ["NixlEngine", "Relays"]

log = logging.getLogger(__name__)

_OPEN_S = 30.0
"""For a relay to start and to find its client's."""


class NixlEngine:
    """What a TcpDoor needs of the engine, for sessions over NIXL.  local: no client comes from beyond this host."""

    def __init__(self, engine: ShmEngine, *, local: bool) -> None:
        self._engine, self._local = engine, local

    def idle(self) -> bool:
        """Whether everything that was taken is answered."""
        return self._engine.idle()

    def open_peers(self, bounds: PeerBounds) -> Relays:
        """bounds.most_message: the bytes of an arena."""
        return Relays(self._engine.sessions, bounds.most_message, local=self._local)


class _Sessions(Protocol):
    """See engine.sessions."""

    def add(self, region: Region, caller: str) -> int: ...

    def remove(self, handle: int) -> None: ...


class Relays:
    """One for each session.  From any thread.  bell: an eventfd that is readable when gone() has something to say.
    unwritten: answers that their callers have not read; a relay carries them on when the session ends."""

    unwritten = 0

    def __init__(self, sessions: _Sessions, arena_bytes: int, *, local: bool) -> None:
        self._sessions, self._arena_bytes, self._local = sessions, arena_bytes, local
        self._handles = itertools.count(1)
        self._lock = threading.Lock()
        self._relays: dict[int, RelayProcess] = {}
        self._removed: set[int] = set()
        self._gone: list[int] = []
        self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self.bell).atexit = False

    def add(self, fd: int, caller: str) -> int:
        """Serve a session whose client has entered; fd is theirs from now on.  Its handle."""
        handle = next(self._handles)
        wire = socket.socket(fileno=fd)
        threading.Thread(target=self._live, args=(handle, wire, caller), name="expertd-nixl", daemon=True).start()
        return handle

    def remove(self, handle: int) -> None:
        """Serve it no more."""
        with self._lock:
            self._removed.add(handle)
            relay = self._relays.get(handle)
        if relay is not None:
            relay.end()

    def gone(self) -> Sequence[int]:
        """Handles of sessions that ended since the last call."""
        with self._lock:
            out, self._gone = self._gone, []
            if out:
                os.eventfd_read(self.bell)
            self._removed.difference_update(out)
        return out

    # ---- a session's thread ------------------------------------------------------------------------------------------

    def _live(self, handle: int, wire: socket.socket, caller: str) -> None:
        try:
            if why := self._serve(handle, wire, caller):
                log.warning("nixl: a session ended: %s", why)
        except (RegionError, RelayError, OSError) as e:
            wire.close()
            log.warning("nixl: a session could not be opened: %s", e)
        with self._lock:
            self._gone.append(handle)
            os.eventfd_write(self.bell, 1)

    def _serve(self, handle: int, wire: socket.socket, caller: str) -> str:
        """Until it ends: why, where that is worth a line.  Raises RegionError, RelayError, OSError."""
        region = Region.create(self._arena_bytes)
        bell = region.ring_here()
        try:
            session = self._sessions.add(region, caller)
        except OSError:
            bell.close()
            region.close()
            raise
        try:
            relay = RelayProcess(FAR, region, bell, wire, local=self._local)
            try:
                with self._lock:
                    self._relays[handle] = relay
                    unwanted = handle in self._removed
                if unwanted:
                    relay.end()
                relay.await_ready(_OPEN_S)
                return relay.last_word()
            finally:
                with self._lock:
                    del self._relays[handle]
                relay.close()
        finally:
            self._sessions.remove(session)
