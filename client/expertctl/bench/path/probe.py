"""A transport that looks at the clock when requests leave and answers come; otherwise it is the one that it wraps."""

from __future__ import annotations

import time

from expertctl.bench.path.measurements import Samples
from expertctl.common.hooked import Forward, HookedTransport
from expertd_client.requests.request import Request
from expertd_client.transports.protocol import Deliver, Delivered, Transport

__all__ = ["Probe"]


class Probe(HookedTransport):
    """samples: where client_encode and client_decode go; may be exchanged while nothing is under way."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport, self._send, self._timed)
        self.samples = Samples()

    def _send(self, _: str, forward: Forward, request_id: int, timeout_us: int, request: Request) -> None:
        start = time.perf_counter_ns()
        forward(request_id, timeout_us, request)
        self.samples.add("client_encode", time.perf_counter_ns() - start)

    def _timed(self, deliver: Deliver) -> Deliver:
        def timed(message: Delivered) -> None:
            start = time.perf_counter_ns()
            deliver(message)
            self.samples.add("client_decode", time.perf_counter_ns() - start)

        return timed
