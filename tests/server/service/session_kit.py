"""A transport in this process, whose clients have a slot for each request."""

from __future__ import annotations

import threading
import time

import numpy as np

from expertd.codec import ForwardRequestView, TensorView
from expertd.v1 import expert_service_pb2 as pb
from expertd_server.engine.request import Answer
from expertd_server.service.connection import ClientConnection
from expertd_server.service.service import Service

H, K, TOKENS = 16, 2, 3
IN_FLIGHT = 4


class Experts:
    """out = x * (sum of weights); waits for `gate` before each call.  computed: the numbers of slots, as they came."""

    backend = "fake"

    def __init__(self) -> None:
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()
        self.computed: list[float] = []

    def __call__(self, x, ids, weights, *, router_weight_on_input=False, out=None):
        self.entered.set()
        assert self.gate.wait(20)
        self.computed += x[::TOKENS, 0].tolist()
        return out.copy_(x * weights.sum(1, keepdim=True))


class Slot:
    """One request: what the client fills, and what came for it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.x = np.full(TOKENS * H, number, np.float32)
        self.ids = np.tile(np.arange(K, dtype=np.int32), TOKENS)
        self.weights = np.full(TOKENS * K, 0.5, np.float32)
        self.out = np.full(TOKENS * H, -1, np.float32)
        self.answers: list[Answer] = []
        self.errors: list[pb.RequestError] = []

    def view(self, layer=0, **fields) -> ForwardRequestView:
        return ForwardRequestView(
            request_id=self.number,
            layer=layer,
            hidden_states=TensorView.of_raw(pb.DATA_TYPE_F32, (TOKENS, H), memoryview(self.x).cast("B")),
            topk_ids=TensorView.of_raw(pb.DATA_TYPE_I32, (TOKENS, K), memoryview(self.ids).cast("B")),
            topk_weights=TensorView.of_raw(pb.DATA_TYPE_F32, (TOKENS, K), memoryview(self.weights).cast("B")),
            **fields,
        )


class Slots:
    """The outlet.  `reads` = False: the caller leaves its answers where they are."""

    def __init__(self) -> None:
        self.slots: dict[int, Slot] = {}
        self.said: list[object] = []
        self.reads = True
        self.broken = False
        self.changed = threading.Condition()

    def answer(self, request, answer) -> None:
        assert threading.current_thread().name == "expertd-answers"
        if self.broken:
            raise BrokenPipeError("the ring is gone")
        slot = self.slots[request.request_id]
        slot.out[:] = answer.output.view(np.float32)
        self._note(slot.answers, answer, request.answer_bytes)

    def send(self, message) -> None:
        if isinstance(message, pb.RequestError) and message.request_id in self.slots:
            self._note(self.slots[message.request_id].errors, message)
        else:
            self._note(self.said, message)

    def _note(self, where, what, answer_bytes=0) -> None:
        if self.reads:
            self.session.written(answer_bytes)
        with self.changed:
            where.append(what)
            self.changed.notify_all()

    def wait(self, condition) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, 20)


class Peer:
    """One connection of such a transport."""

    def __init__(self, service: Service, caller: str = "test") -> None:
        self.outlet = Slots()
        self.outlet.session = self.session = ClientConnection(service, self.outlet, caller)

    def send(self, number: int, **fields) -> Slot:
        slot = self.outlet.slots[number] = Slot(number)
        self.session.take(slot.view(**fields), time.monotonic_ns())
        return slot

    def wait(self, *slots: Slot) -> None:
        self.outlet.wait(lambda: all(s.answers or s.errors for s in slots))


def counted(service: Service, code: str, reason: str) -> float:
    return service.metrics.registry.get_sample_value("expertd_requests_total", {"code": code, "reason": reason}) or 0.0


def busy(service: Service, experts: Experts) -> None:
    """Keep the engine in its kernel until experts.gate is set."""
    experts.gate.clear()
    experts.entered.clear()
    other = Peer(service)
    other.send(1)
    assert experts.entered.wait(20)
    experts.entered.clear()


class Hoarder:
    """An outlet that notes what it is given, and a caller who reads nothing of it."""

    def __init__(self, service) -> None:
        self.answers: list[int] = []
        self.errors: list[pb.RequestError] = []
        self.broken = False
        self.changed = threading.Condition()
        self.session = ClientConnection(service, self, "test")

    def ask(self, number: int) -> None:
        self.session.take(Slot(number).view(), time.monotonic_ns())

    def answer(self, request, answer) -> None:
        if self.broken:
            raise BrokenPipeError("the ring is gone")
        self.note(self.answers, request.answer_bytes)

    def send(self, message) -> None:
        self.note(self.errors, message)

    def note(self, where, what) -> None:
        with self.changed:
            where.append(what)
            self.changed.notify_all()

    def wait(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.answers) + len(self.errors) >= count, 20)
