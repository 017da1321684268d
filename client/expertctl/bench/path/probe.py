"""A transport that looks at the clock when requests leave and answers come; otherwise it is the one that it wraps."""

from __future__ import annotations

import time
from collections.abc import Sequence

from expertctl.bench.path.rows import Samples
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.requests.request import Request
from expertd_client.transports.protocol import Channel, Closed, Connection, Deliver, Delivered, Ready, Transport, Waiter

__all__ = ["Probe"]


class Probe:
    """samples: where client_encode and client_decode go; may be exchanged while nothing is under way."""

    def __init__(self, transport: Transport) -> None:
        self.samples = Samples()
        self.target = transport.target
        self.channels: Sequence[Channel] = [_Channel(channel, self) for channel in transport.channels]
        self._transport = transport

    def connect(self, deliver: Deliver, closed: Closed) -> Connection:
        return _Connection(self._transport.connect(self.timed(deliver), closed), self)

    def describe(
        self, request: pb.DescribeRequest, timeout_s: float, wait_for_ready: bool, waiter: Waiter[pb.DescribeResponse]
    ) -> None:
        self._transport.describe(request, timeout_s, wait_for_ready, waiter)

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


class _Channel:
    def __init__(self, channel: Channel, probe: Probe) -> None:
        self.name = channel.name
        self._channel, self._probe = channel, probe

    def close(self) -> None:
        self._channel.close()

    def open(self, answer: pb.SessionAnswer, deliver: Deliver, closed: Closed, ready: Ready) -> None:
        def wrapped(outcome: Connection | Exception) -> None:
            ready(outcome if isinstance(outcome, Exception) else _Connection(outcome, self._probe))

        self._channel.open(answer, self._probe.timed(deliver), closed, wrapped)


class _Connection:
    def __init__(self, connection: Connection, probe: Probe) -> None:
        self._connection, self._probe = connection, probe
        self.takes, self.cancel = connection.takes, connection.cancel
        self.offer, self.close = connection.offer, connection.close
        if hasattr(connection, "broke"):
            self.broke = connection.broke
        if hasattr(connection, "call"):
            self.call, self.slot = connection.call, connection.slot  # type: ignore[attr-defined]

    def forward(self, request_id: int, timeout_us: int, request: Request) -> None:
        start = time.perf_counter_ns()
        self._connection.forward(request_id, timeout_us, request)
        self._probe.samples.add("client_encode", time.perf_counter_ns() - start)
