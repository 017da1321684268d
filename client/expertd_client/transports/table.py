"""The transports that clients offer a server besides gRPC, best first.

A transport is a folder here, a folder of the server, and an entry in each side's table (CONTRIBUTING.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from expertd_client.transports.credentials import Credentials
from expertd_client.transports.protocol import SessionTransport
from expertd_client.transports.shm.connection import AsyncShmTransport, ShmTransport
from expertd_client.transports.tcp.connection import AsyncTcpTransport, TcpTransport

__all__ = ["TRANSPORTS", "Entry", "Make", "blocking_transports", "loop_transports"]

Make: TypeAlias = Callable[[str, "Credentials | None"], SessionTransport]
"""Takes a gRPC target and its credentials."""


class Entry(NamedTuple):
    """One transport.

    name       as in SessionOffer.transports
    blocking   makes it for ExpertClient
    loop       makes it for AsyncExpertClient, in whose event loop it is opened
    """

    name: str
    blocking: Make
    loop: Make


TRANSPORTS: list[Entry] = [
    Entry("shm", ShmTransport, AsyncShmTransport),
    Entry("tcp", TcpTransport, AsyncTcpTransport),
]


def blocking_transports(target: str, credentials: Credentials | None) -> Sequence[SessionTransport]:
    """ExpertClient's, to one gRPC target."""
    return [entry.blocking(target, credentials) for entry in TRANSPORTS]


def loop_transports(target: str, credentials: Credentials | None) -> Sequence[SessionTransport]:
    """AsyncExpertClient's."""
    return [entry.loop(target, credentials) for entry in TRANSPORTS]
