"""Requests over NIXL (expertd.nixl): for servers on other hosts, by RDMA where both have it.

For this client it is a session in shared memory, whose server is a relay: a process that carries requests to the
server's host and answers back.  What travels is not encrypted, whatever the session is, and UCX, which carries it,
listens for whoever comes: so a client offers it where EXPERTD_NIXL=on asks for it alone.

    NixlChannel       ExpertClient
    AioNixlChannel    AsyncExpertClient
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from typing import TypeAlias

from expertd.errors import UnavailableError
from expertd.nixl.find import missing
from expertd.nixl.process import RelayError, RelayProcess
from expertd.nixl.relay import NEAR
from expertd.shm.client import Client
from expertd.shm.library import LibraryMissingError
from expertd.shm.region import Region, RegionError, supported
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.transports.protocol import Closed, Deliver
from expertd_client.transports.shm.session import AioShmChannel, AioShmConnection, ShmChannel, ShmConnection
from expertd_client.transports.tcp.session import ByTcp, TcpWay

__all__ = ["AioNixlChannel", "NixlChannel", "NixlConnection"]

_OPEN_S = 30.0
"""For the two processes to start and to find each other."""
_MOST_ARENA = 1 << 32


_Entered: TypeAlias = tuple[socket.socket, Client]


class NixlChannel(ByTcp, ShmChannel):
    """For ExpertClient."""

    name = "nixl"

    def _enter(self, answer: pb.SessionAnswer) -> _Entered:
        return _entered(self._way, answer)

    def _connection(self, entered: _Entered, deliver: Deliver, closed: Closed) -> NixlConnection:
        return NixlConnection(entered, deliver, closed)


class AioNixlChannel(ByTcp, AioShmChannel):
    """For AsyncExpertClient, whose event loop opens it."""

    name = "nixl"

    def _enter(self, answer: pb.SessionAnswer) -> _Entered:
        return _entered(self._way, answer)

    def _connection(
        self, entered: _Entered, deliver: Deliver, closed: Closed, loop: asyncio.AbstractEventLoop
    ) -> _AioNixlConnection:
        return _AioNixlConnection(entered, deliver, closed, loop)


class NixlConnection(ShmConnection):
    """One session, from any thread.  read(): for the thread that made it, until the session ends."""

    what = "nixl"


class _AioNixlConnection(AioShmConnection):
    """One session, in an event loop."""

    what = "nixl"


def _entered(way: TcpWay, answer: pb.SessionAnswer) -> _Entered:
    """The relay's socket, and the region.  Raises UnavailableError."""
    why = missing() or supported()
    if why:
        raise UnavailableError(f"nixl: {why}")
    region: Region | None = None
    relay: RelayProcess | None = None
    try:
        wire, arena_bytes, local = _wire(way, answer)
        if not 0 < arena_bytes <= _MOST_ARENA:
            wire.close()
            raise RegionError(f"the server wants a session of {arena_bytes} bytes, at most {_MOST_ARENA} can be had")
        region = Region.create(arena_bytes)
        relay = RelayProcess(NEAR, region, region.ring_here(), wire, local=local)
        relay.await_ready(_OPEN_S)
        client = Client(region)
    except (UnavailableError, RegionError, RelayError, LibraryMissingError, OSError) as e:
        if relay is not None:
            relay.close()
        if region is not None:
            region.close()
        raise e if isinstance(e, UnavailableError) else UnavailableError(f"nixl: {e}") from e
    threading.Thread(target=relay.reap, name="expertd-nixl-reap", daemon=True).start()
    relay.owner.setblocking(False)
    return relay.owner, client


def _wire(way: TcpWay, answer: pb.SessionAnswer) -> tuple[socket.socket, int, bool]:
    """To the server's relay, the bytes of an arena, and whether that is on this host.  Raises UnavailableError."""
    sock, arena_bytes, host = way.dial(answer)
    return sock, arena_bytes, ipaddress.ip_address(host.partition("%")[0]).is_loopback
