"""gRPC's own view of its servers, connections and streams (grpc.channelz.v1.Channelz), for those who may describe."""

from __future__ import annotations

import importlib.util
from typing import Any

from expertd.errors import ExpertdError
from expertd_server.service.access import DESCRIBE
from expertd_server.transports.security import Gate

__all__ = ["NAME", "add_channelz", "missing"]

NAME = "grpc.channelz.v1.Channelz"
_METHODS = (
    *("GetTopChannels", "GetServers", "GetServer", "GetServerSockets"),
    *("GetChannel", "GetSubchannel", "GetSocket"),
)


def missing() -> str:
    """Why there is no channelz, "" where there is."""
    if importlib.util.find_spec("grpc_channelz") is not None:
        return ""
    return "grpcio-channelz is not installed: pip install grpcio-channelz"


def add_channelz(server: Any, gate: Gate) -> None:
    """Serve it beside the other services of a grpc.aio server."""
    from grpc_channelz.v1 import channelz_pb2_grpc
    from grpc_channelz.v1.channelz import aio

    def guarded(name: str) -> Any:
        inner = getattr(aio.ChannelzServicer, name)

        async def method(self: Any, request: Any, context: Any) -> Any:
            try:
                gate.admit(context, DESCRIBE)
            except ExpertdError as e:
                await context.abort(e.code.grpc, e.message, e.to_trailing_metadata())
            return await inner(request, context)

        return method

    kind: Any = type("GuardedChannelz", (aio.ChannelzServicer,), {name: guarded(name) for name in _METHODS})
    channelz_pb2_grpc.add_ChannelzServicer_to_server(kind(), server)
