"""The channels that clients offer a server, best first."""

from __future__ import annotations

import os
from collections.abc import Sequence

from expertd_client.transports.credentials import Credentials
from expertd_client.transports.nixl.session import AioNixlChannel, NixlChannel
from expertd_client.transports.protocol import Channel
from expertd_client.transports.shm.session import AioShmChannel, ShmChannel
from expertd_client.transports.tcp.session import AioTcpChannel, TcpChannel

__all__ = ["channels_in_a_loop", "channels_of_threads"]

NIXL = "EXPERTD_NIXL"
"""Of the environment; "on" asks for it.  Nobody gets NIXL who did not: it encrypts nothing, and trusts the network."""


def channels_of_threads(target: str, credentials: Credentials | None) -> Sequence[Channel]:
    """ExpertClient's, to one gRPC target."""
    nixl = [NixlChannel(target, credentials)] if _wants_nixl() else []
    return [ShmChannel(), *nixl, TcpChannel(target, credentials)]


def channels_in_a_loop(target: str, credentials: Credentials | None) -> Sequence[Channel]:
    """AsyncExpertClient's."""
    nixl = [AioNixlChannel(target, credentials)] if _wants_nixl() else []
    return [AioShmChannel(), *nixl, AioTcpChannel(target, credentials)]


def _wants_nixl() -> bool:
    return os.environ.get(NIXL) == "on"
