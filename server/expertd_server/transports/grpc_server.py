"""The gRPC side: a listening server in front of a Service, its health, and how it drains."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from expertd.v1 import expert_service_pb2 as pb
from expertd_server.boot.assignment import BootError
from expertd_server.config import Address
from expertd_server.engine.engine import Engine
from expertd_server.service.intake import Intake
from expertd_server.service.service import Limits, Service, State
from expertd_server.transports.grpc_service import Servicer
from expertd_server.views.metrics import SERVICE, Metrics

__all__ = ["ExpertServer"]

_POLL_S = 0.005
"""How often a draining server looks whether it is done."""
_QUIET_S, _QUIET_LIMIT_S = 0.15, 2.0
"""gRPC resets a call that comes in the moment in which the server closes: its caller sees CANCELLED and can't know that
nothing was computed.  So a drained server closes when no call came for _QUIET_S, at the latest after _QUIET_LIMIT_S."""
_SLACK = 2
"""gRPC's own limit is this many times ours: up to it one large request fails alone, with its reason."""


class ExpertServer:
    """The gRPC side: a listening server in front of a Service.  Used by `serve` and by tests.

    address: where it listens, known after start()
    """

    def __init__(self, metrics: Metrics, limits: Limits) -> None:
        self.service = Service(metrics, limits, asyncio.get_running_loop())
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", _SLACK * limits.max_message_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),  # a second server on the port is an error, not a silent share of its calls
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ]
        )
        self._server.add_generic_rpc_handlers((Servicer(self.service).handler(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)

    async def start(self, listen: Address) -> Address:
        """Listen; health is NOT_SERVING.  Raises BootError where the address cannot be had."""
        await self._report(health_pb2.HealthCheckResponse.NOT_SERVING)
        _try_bind("--listen", listen)
        try:
            port = self._server.add_insecure_port(str(listen))
        except RuntimeError as e:
            raise BootError(f"--listen {listen}: cannot listen there: {e}") from e
        await self._server.start()
        self.address = Address(listen.host, port)
        return self.address

    async def ready(self, engine: Engine, intake: Intake, describe: Callable[[bool], pb.DescribeResponse]) -> None:
        """Take requests; health is SERVING."""
        self.service.ready(engine, intake, describe)
        if self.service.state is State.SERVING:
            await self._report(health_pb2.HealthCheckResponse.SERVING)

    async def drain(self, grace_s: float) -> bool:
        """Refuse new requests, finish those taken, close.  False: grace_s was over before everything was answered."""
        until = time.monotonic() + grace_s
        self.service.drain()
        await self._report(health_pb2.HealthCheckResponse.NOT_SERVING)
        engine = self.service.engine
        while time.monotonic() < until and not self._idle():
            await asyncio.sleep(_POLL_S)
        if done := self._idle():
            await self._quiet(min(until, time.monotonic() + _QUIET_LIMIT_S))
        await self._server.stop(0 if not done else max(0.1, until - time.monotonic()))
        if engine is not None:
            await asyncio.get_running_loop().run_in_executor(
                None, engine.stop, max(0.1, until - time.monotonic()) if done else 0.1
            )
        self.service.close()
        return done

    def _idle(self) -> bool:
        engine = self.service.engine
        return self.service.open_calls == 0 and (engine is None or engine.idle())

    async def _quiet(self, until: float) -> None:
        """Return when no call has come for _QUIET_S, or at the monotonic time `until`."""
        begun, since = self.service.calls_begun, time.monotonic()
        while (now := time.monotonic()) < until and now - since < _QUIET_S:
            await asyncio.sleep(_POLL_S)
            if self.service.calls_begun != begun:
                begun, since = self.service.calls_begun, time.monotonic()

    async def close(self) -> None:
        """Close at once, whatever is under way."""
        await self._server.stop(0)
        self.service.close()

    async def _report(self, status: Any) -> None:
        for name in (health.OVERALL_HEALTH, SERVICE):
            await self._health.set(name, status)


def _try_bind(option: str, a: Address) -> None:
    """Raises BootError when the address is taken or not ours: gRPC would tell only its own log why."""
    try:
        family, kind, proto, _, where = socket.getaddrinfo(a.host, a.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(where)
    except OSError as e:
        raise BootError(f"{option} {a}: cannot listen there: {e.strerror or e}") from e
