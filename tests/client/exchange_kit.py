"""A transport and an alarm in the hands of a test, for the parts between a forward() and the wire."""

from __future__ import annotations

import numpy as np

from expertd.codec import ForwardResponseView, TensorView
from expertd.errors import RequestCancelledError
from expertd.v1 import expert_service_pb2 as pb
from expertd_client import Request
from expertd_client.exchange.exchange import Exchange

X = np.ones((3, 8), np.float32)


def request(layer=4, **options):
    return Request(layer, X, np.ones((3, 2), np.int32), np.ones((3, 2), np.float32), **options)


def answer(request_id, **fields):
    output = TensorView.of_raw(pb.DATA_TYPE_F32, (3, 8), X.tobytes())
    return ForwardResponseView(**{"request_id": request_id, "output": output, "routes_computed": 6, **fields})


class Way:
    """A connection: keeps what is sent; the test delivers."""

    blocking = None

    def __init__(self, deliver, closed):
        self.deliver, self._closed = deliver, closed
        self.sent, self.cancelled, self.offers, self.ended = {}, [], [], False

    def takes(self, request):
        return True

    def forward(self, request_id, timeout_us, request):
        self.sent[request_id] = (timeout_us, request)

    def cancel(self, request_id):
        self.cancelled.append(request_id)

    def offer(self, offer):
        self.offers.append(offer)

    def breaks(self, error):
        if not self.ended:
            self.ended = True
            self._closed(error)

    def close(self):
        self.breaks(RequestCancelledError("closed by this client"))

    def broke(self, error):
        self.breaks(error)


class Hand:
    """A transport; ways: its connections, in order."""

    target = "hand"

    def __init__(self, *offers):
        self.offers = offers
        self.ways = []

    def connect(self, deliver, closed):
        self.ways.append(Way(deliver, closed))
        return self.ways[-1]


class Beside:
    """A channel; ways: those that it opened; answers: what it opened them with; refuses: why it does not open."""

    def __init__(self, name, refuses=None):
        self.name, self.refuses = name, refuses
        self.ways, self.answers = [], []

    def close(self):
        pass

    def open(self, answer, deliver, closed, ready):
        if self.refuses is not None:
            ready(self.refuses)
            return
        self.answers.append(answer)
        self.ways.append(Way(deliver, closed))
        self.opened(ready)

    def opened(self, ready):
        ready(self.ways[-1])


class HandAlarm:
    """when_s: the earliest time that was set since it rang."""

    def __init__(self, ring):
        self._ring = ring
        self.when_s, self.sets, self.closed = None, 0, False

    def set(self, when_s):
        if self.when_s is None or when_s < self.when_s:
            self.when_s = when_s
            self.sets += 1

    def ring(self):
        self.when_s = None
        self._ring()

    def close(self):
        self.closed = True


class Waiter:
    """Keeps what it is told, which is to happen once."""

    def __init__(self):
        self.told = []

    def answer(self, value):
        self.told.append(value)

    def fail(self, error):
        self.told.append(error)

    @property
    def what(self):
        (value,) = self.told
        return value


def exchange(*offers, **options):
    """(the exchange, its transport, its alarm)."""
    transport, alarms = Hand(*offers), []

    def make(ring):
        alarms.append(HandAlarm(ring))
        return alarms[0]

    return Exchange(transport, make, **options), transport, alarms[0]
