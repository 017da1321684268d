"""Where a server's AdminService and WeightsService listen, and a channel to them."""

from __future__ import annotations

import re
from typing import Any

import grpc

from expertd.errors import UnavailableError
from expertd.v1 import expert_service_pb2
from expertd_client.transports.address import parse_address, reach
from expertd_client.transports.credentials import Credentials
from expertd_client.transports.grpc.common import channel_options

__all__ = ["admin_address", "admin_channel"]

_KEEPALIVE = (("grpc.keepalive_time_ms", 5_000), ("grpc.keepalive_timeout_ms", 5_000))
"""A server that hangs, or a network that is gone, is found out although loading may take an hour."""


def admin_address(address: str, described: expert_service_pb2.DescribeResponse) -> str:
    """Where the services of the server at `address` listen.  Raises UnavailableError where they are off."""
    told = described.admin_address
    if not told:
        raise UnavailableError.about(
            f"{address}: AdminService", got="none", want="one", remedy="start the server with --admin-listen"
        )
    host, _, port = told.rpartition(":")
    if re.fullmatch(r"0\.0\.0\.0|\[[0:]+\]", host):  # every address of its host
        return parse_address(address).with_port(port)
    return told


def admin_channel(server: str, address: str, credentials: Credentials | None) -> tuple[Any, Any]:
    """(channel, metadata of its calls).  server: the address of ExpertService, whose TLS the other address has, too."""
    address, c = reach(address, reach(server, credentials)[1])
    options, tls = channel_options([*c.options(), *_KEEPALIVE]), c.channel()
    channel = grpc.insecure_channel(address, options) if tls is None else grpc.secure_channel(address, tls, options)
    return channel, c.metadata()
