"""The channels that clients offer a server, best first."""

from __future__ import annotations

from collections.abc import Sequence

from expertd_client.transports.credentials import Credentials
from expertd_client.transports.protocol import Channel
from expertd_client.transports.shm.session import AioShmChannel, ShmChannel
from expertd_client.transports.tcp.session import AioTcpChannel, TcpChannel

__all__ = ["channels_in_a_loop", "channels_of_threads"]


def channels_of_threads(target: str, credentials: Credentials | None) -> Sequence[Channel]:
    """ExpertClient's, to one gRPC target."""
    return [ShmChannel(), TcpChannel(target, credentials)]


def channels_in_a_loop(target: str, credentials: Credentials | None) -> Sequence[Channel]:
    """AsyncExpertClient's."""
    return [AioShmChannel(), AioTcpChannel(target, credentials)]
