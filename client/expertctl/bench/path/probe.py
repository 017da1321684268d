"""A transport that looks at the clock when requests leave and answers come; otherwise it is the one that it wraps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from expertctl.bench.path.measurements import Samples
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.requests.request import Request
from expertd_client.transports.protocol import (
    Closed,
    Connection,
    Deliver,
    Delivered,
    MainConnection,
    Ready,
    SessionConnection,
    SessionTransport,
    Transport,
    Waiter,
)

__all__ = ["Probe"]


class Probe:
    """samples: where client_encode and client_decode go; may be exchanged while nothing is under way."""

    def __init__(self, transport: Transport) -> None:
        self.samples = Samples()
        self.target = transport.target
        self.offers: Sequence[SessionTransport] = [_SessionTransport(offered, self) for offered in transport.offers]
        self._transport = transport

    def connect(self, deliver: Deliver, closed: Closed) -> MainConnection:
        return _MainConnection(self._transport.connect(self.timed(deliver), closed), self)

    def unary(
        self, method: str, request: Any, answer: Any, timeout_s: float, wait_for_ready: bool, waiter: Waiter[Any]
    ) -> None:
        self._transport.unary(method, request, answer, timeout_s, wait_for_ready, waiter)

    def close(self) -> None:
        self._transport.close()

    async def wait_closed(self) -> None:
        await self._transport.wait_closed()

    def timed(self, deliver: Deliver) -> Deliver:
        def timed(message: Delivered) -> None:
            start = time.perf_counter_ns()
            deliver(message)
            self.samples.add("client_decode", time.perf_counter_ns() - start)

        return timed


class _SessionTransport:
    def __init__(self, transport: SessionTransport, probe: Probe) -> None:
        self.name = transport.name
        self._transport, self._probe = transport, probe

    def close(self) -> None:
        self._transport.close()

    def open(self, answer: pb.SessionAnswer, deliver: Deliver, closed: Closed, ready: Ready) -> None:
        def wrapped(outcome: SessionConnection | Exception) -> None:
            ready(outcome if isinstance(outcome, Exception) else _SessionConnection(outcome, self._probe))

        self._transport.open(answer, self._probe.timed(deliver), closed, wrapped)


class _Connection:
    def __init__(self, connection: Connection, probe: Probe) -> None:
        self._connection, self._probe = connection, probe
        self.takes, self.cancel, self.close = connection.takes, connection.cancel, connection.close

    def forward(self, request_id: int, timeout_us: int, request: Request) -> None:
        start = time.perf_counter_ns()
        self._connection.forward(request_id, timeout_us, request)
        self._probe.samples.add("client_encode", time.perf_counter_ns() - start)


class _MainConnection(_Connection):
    def __init__(self, connection: MainConnection, probe: Probe) -> None:
        super().__init__(connection, probe)
        self.offer = connection.offer


class _SessionConnection(_Connection):
    def __init__(self, connection: SessionConnection, probe: Probe) -> None:
        super().__init__(connection, probe)
        self.blocking, self.broke = connection.blocking, connection.broke
