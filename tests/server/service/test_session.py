"""Sessions, called by a transport made for the purpose: slots of memory that a caller fills and reads, as a ring in
shared memory has them.  Nothing is encoded; the engine reads the slots and writes into them."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from expertd.errors import DrainingError, InternalError
from expertd.v1 import expert_service_pb2 as pb
from expertd.wire import ForwardRequestView, TensorView, encode_stream_request
from expertd_server.engine.admission import Limits, QueueLimits, overloaded
from expertd_server.engine.engine import Engine
from expertd_server.engine.request import Answer
from expertd_server.engine.scheduler import Policy
from expertd_server.engine.served import ServedLayer
from expertd_server.service.service import Service
from expertd_server.views.metrics import Metrics

H, K, TOKENS = 16, 2, 3
IN_FLIGHT = 4


class Experts:
    """out = x * (sum of weights); waits for `gate` before each call."""

    backend = "fake"

    def __init__(self) -> None:
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()

    def __call__(self, x, ids, weights, *, router_weight_on_input=False, out=None):
        self.entered.set()
        assert self.gate.wait(20)
        return out.copy_(x * weights.sum(1, keepdim=True))


class Slot:
    """Memory of one request: what the caller fills, and what it reads when `state` says so."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.x = np.full(TOKENS * H, number, np.float32)
        self.ids = np.tile(np.arange(K, dtype=np.int32), TOKENS)
        self.weights = np.full(TOKENS * K, 0.5, np.float32)
        self.out = np.full(TOKENS * H, -1, np.float32)
        self.answers: list[Answer] = []
        self.errors: list[pb.RequestError] = []
        self.released = 0

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
        assert threading.current_thread().name == "expertd-engine"
        if self.broken:
            raise BrokenPipeError("the ring is gone")
        slot = self.slots[request.request_id]
        assert answer.output is slot.out, "nothing to copy: it lies where it is read"
        self._note(slot.answers, answer)

    def send(self, message) -> None:
        if isinstance(message, pb.RequestError) and message.request_id in self.slots:
            self._note(self.slots[message.request_id].errors, message)
        else:
            self._note(self.said, message)

    def released(self, memory) -> None:
        with self.changed:
            memory.released += 1
            self.changed.notify_all()

    def _note(self, where, what) -> None:
        with self.changed:
            where.append(what)
            self.changed.notify_all()
        if self.reads:
            self.session.written()

    def wait(self, condition) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, 20)


class Peer:
    """One connection of such a transport."""

    def __init__(self, service: Service, caller: str = "test") -> None:
        self.outlet = Slots()
        self.outlet.session = self.session = service.session(self.outlet, caller)

    def send(self, number: int, **fields) -> Slot:
        slot = self.outlet.slots[number] = Slot(number)
        self.session.take(slot.view(**fields), time.monotonic_ns(), into=slot.out, memory=slot)
        return slot

    def wait(self, *slots: Slot) -> None:
        self.outlet.wait(lambda: all(s.released for s in slots))


@pytest.fixture
def experts():
    return Experts()


@pytest.fixture
def service(experts):
    metrics = Metrics()
    engine = Engine(
        torch.device("cpu"),
        compute_dtype="f32",
        policy=Policy(64),
        limits=QueueLimits(requests=8),
        observe=metrics.batch,
    )
    engine.hold([ServedLayer(0, K, range(K), K, H, 32, experts, "fake")])
    engine.start()
    service = Service(engine, metrics, Limits(64, 1 << 20, IN_FLIGHT))
    service.open(lambda decisions: pb.DescribeResponse())
    yield service
    experts.gate.set()
    service.drain()
    engine.stop(10)
    service.close()


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


def test_answers_lie_in_the_callers_slots(service):
    peer = Peer(service)
    slots = [peer.send(n) for n in (1, 2, 3)]
    peer.wait(*slots)
    for slot in slots:
        (answer,) = slot.answers
        assert answer.routes_computed == TOKENS * K
        np.testing.assert_array_equal(slot.out, slot.x)
        assert slot.released == 1
    assert counted(service, "OK", "") == 3


def test_the_engine_knows_who_asks(service, monkeypatch):
    seen = []
    submit = service.engine.submit
    monkeypatch.setattr(service.engine, "submit", lambda r: (seen.append((r.caller, r.request_id)), submit(r)))
    one, other = Peer(service, "alice"), Peer(service, "bob")
    one.wait(one.send(1))
    other.wait(other.send(1))
    assert seen == [("alice", 1), ("bob", 1)]


def test_memory_of_a_refused_request_is_free_at_once(service):
    peer = Peer(service)
    slot = peer.send(1, layer=7)
    assert [e.reason for e in slot.errors] == ["LAYER_NOT_HELD"]
    assert slot.released == 1
    assert counted(service, "NOT_FOUND", "LAYER_NOT_HELD") == 1


def test_memory_of_a_cancelled_request_is_free_when_its_batch_is_done(service, experts):
    busy(service, experts)
    peer = Peer(service)
    waiting, computed = peer.send(1), peer.send(2)
    peer.session.take(pb.CancelRequest(request_id=1), 0)
    assert [e.reason for e in waiting.errors] == ["CANCELLED"], "the caller is told at once"
    assert waiting.released == 0, "its memory may still be read"
    experts.gate.set()
    peer.wait(waiting, computed)
    assert (waiting.released, waiting.answers, waiting.out[0]) == (1, [], -1)

    experts.gate.clear()
    experts.entered.clear()
    under_way = peer.send(3)
    assert experts.entered.wait(20)
    peer.session.take(pb.CancelRequest(request_id=3), 0)
    assert [e.reason for e in under_way.errors] == ["CANCELLED"]
    again = peer.send(3)
    assert under_way.released == 0
    experts.gate.set()
    peer.wait(under_way, again)
    assert (len(under_way.answers), len(again.answers)) == (0, 1), "the id was free at once, and is answered once"


def test_a_connection_that_goes_gets_all_its_memory_back_and_no_answer(service, experts):
    busy(service, experts)
    peer = Peer(service)
    slots = [peer.send(n) for n in (1, 2, 3)]
    peer.session.close()
    experts.gate.set()
    peer.wait(*slots)
    assert [(s.released, s.answers, s.errors) for s in slots] == [(1, [], [])] * 3
    service.drain()
    assert peer.outlet.said == [], "a closed session is not told that the server drains"


def test_under_pressure_a_request_without_time_is_refused_before_it_is_read(service, monkeypatch):
    asked = []

    def hopeless(head, caller, deadline_ns):
        asked.append((head.tokens, head.top_k, caller, deadline_ns))
        return overloaded(deadline_ns, 0, 5000.0) if head.layer == 0 else None

    monkeypatch.setattr(service.engine, "hopeless", hopeless)
    peer, now = Peer(service), time.monotonic_ns()
    view = Slot(7).view(timeout_us=1000)
    data = encode_stream_request(view)
    assert not peer.session.turn_away(data, now), "nobody was refused for the time yet"
    assert asked == []
    assert peer.send(1, timeout_us=1).errors[0].reason == "DEADLINE_EXCEEDED"  # 1 us is over before it is looked at
    now = time.monotonic_ns()
    assert peer.session.turn_away(data, now)
    assert asked == [(TOKENS, K, "test", now + 1_000_000)]
    error = peer.outlet.said[-1]
    assert (error.request_id, error.reason, error.retryable) == (7, "OVERLOADED", True)
    assert counted(service, "RESOURCE_EXHAUSTED", "OVERLOADED") == 1

    # What is for the whole way in to say: no deadline, no id, one that is in flight, time enough, another message.
    for fields in ({"timeout_us": 0}, {"request_id": 0}, {"layer": 1}):
        assert not peer.session.turn_away(encode_stream_request(replace(view, **fields)), now)
    assert not peer.session.turn_away(encode_stream_request(pb.CancelRequest(request_id=7)), now)
    peer.session._in_flight[7] = None
    assert not peer.session.turn_away(data, now)
    del peer.session._in_flight[7]
    assert peer.session.turn_away(data, now + 90_000_000)
    assert peer.session.turn_away(data, now + 180_000_000), "each refusal makes it last longer"
    assert not peer.session.turn_away(data, now + 300_000_000), "nobody was refused for long"
    service.engine.drain()
    assert not peer.session.turn_away(data, now + 190_000_000), "DRAINING says more"


def test_a_deadline_counts_from_the_arrival_of_the_message(service, experts):
    peer = Peer(service)
    slot = peer.outlet.slots[1] = Slot(1)
    arrival_ns = time.monotonic_ns() - 50_000_000
    peer.session.take(slot.view(timeout_us=40_000), arrival_ns, memory=slot)
    peer.wait(slot)
    assert [e.reason for e in slot.errors] == ["DEADLINE_EXCEEDED"]


def test_answers_that_are_not_read_count_as_in_flight(service):
    peer = Peer(service)
    peer.outlet.reads = False
    slots = [peer.send(n) for n in range(1, IN_FLIGHT + 1)]
    peer.wait(*slots)
    one_more = peer.send(99)
    assert [e.reason for e in one_more.errors] == ["TOO_MANY_REQUESTS_IN_FLIGHT"]
    assert "0 requests in flight, 4 answers unread" in one_more.errors[0].message
    assert not peer.session.finished()
    for _ in range(IN_FLIGHT + 1):
        peer.session.written()
    peer.outlet.reads = True
    peer.wait(peer.send(100))


def test_a_session_is_finished_when_everything_is_written(service, experts):
    busy(service, experts)
    peer = Peer(service)
    peer.outlet.reads = False
    slot = peer.send(1)
    peer.session.end()
    assert not peer.session.finished()
    experts.gate.set()
    peer.wait(slot)
    assert not peer.session.finished(), "its answer is still to be written"
    peer.session.written()
    assert peer.session.finished()


def test_a_draining_server_tells_its_sessions_and_ends_them_when_all_is_answered(service, experts):
    busy(service, experts)
    peer = Peer(service)
    slot = peer.send(1)
    service.drain()
    assert [m.draining for m in peer.outlet.said] == [True]
    late = peer.send(2)
    assert [e.reason for e in late.errors] == ["DRAINING"]
    assert not peer.session.finished()
    experts.gate.set()
    peer.wait(slot)
    assert len(slot.answers) == 1
    with pytest.raises(DrainingError, match="every request that it had taken from this stream is answered"):
        peer.session.finished()
    peer.session.end()
    assert peer.session.finished(), "a caller that has sent everything ends as ever"


def test_an_outlet_that_fails_gives_its_caller_an_error(service):
    peer = Peer(service)
    peer.outlet.broken = True
    slot = peer.send(1)
    peer.wait(slot)
    assert [e.reason for e in slot.errors] == [InternalError.reason]
    assert "the ring is gone" in slot.errors[0].message
    peer.session.end()
    assert peer.session.finished()
    assert counted(service, "INTERNAL", "INTERNAL") == 1
    assert counted(service, "OK", "") == 0


def test_much_that_is_to_be_drawn_keeps_its_caller_waiting_and_nobody_else(service, monkeypatch):
    draw, drawing = threading.Event(), threading.Event()
    real = service._intake._drawer.hidden

    def slow(*args):
        drawing.set()
        assert draw.wait(20)
        return real(*args)

    monkeypatch.setattr(service._intake._drawer, "hidden", slow)
    monkeypatch.setattr("expertd_server.service.service._DRAW_AT_ONCE", 40)
    peer, other = Peer(service), Peer(service)
    seeds = pb.SyntheticValues(seed=3)
    slot = peer.outlet.slots[1] = Slot(1)
    view = slot.view()
    view.hidden_states = TensorView(pb.DATA_TYPE_F32, (TOKENS, H), 6, seeds, None)
    wait = peer.session.take(view, time.monotonic_ns(), into=slot.out, memory=slot)
    assert wait is not None
    assert drawing.wait(20)
    assert not wait.done()
    other.wait(other.send(1))
    draw.set()
    wait.result(20)
    peer.wait(slot)
    np.testing.assert_array_equal(slot.out, real(3, TOKENS, H, "f32").values)

    draw.clear()
    drawing.clear()
    slot = peer.outlet.slots[2] = Slot(2)
    view.request_id = 2
    blocked = service._draw.submit(draw.wait, 20)
    wait = peer.session.take(view, time.monotonic_ns(), into=slot.out, memory=slot)
    peer.session.take(pb.CancelRequest(request_id=2), 0)
    draw.set()
    assert blocked.result(20)
    wait.result(20)
    peer.wait(slot)
    assert not drawing.is_set(), "what is cancelled is not drawn"


def test_a_batch_of_no_tokens_is_answered_without_the_engine(service, experts):
    busy(service, experts)
    got = []
    view = Slot(5).view(output_form=pb.OUTPUT_FORM_DIGEST)
    view.hidden_states = TensorView.of_raw(pb.DATA_TYPE_F32, (0, H), b"")
    view.topk_ids = TensorView.of_raw(pb.DATA_TYPE_I32, (0, K), b"")
    view.topk_weights = TensorView.of_raw(pb.DATA_TYPE_F32, (0, K), b"")
    service.forward(view, lambda r, outcome: got.append(outcome), caller="me", arrival_ns=time.monotonic_ns())
    assert got[0].digest == (0.0, 0.0, 0)
    service.drain()
    with pytest.raises(DrainingError):
        service.forward(view, lambda r, outcome: got.append(outcome), caller="me", arrival_ns=time.monotonic_ns())
    assert len(got) == 1


def test_answers_that_nobody_reads_are_bounded_in_bytes(service, experts):
    """A caller who leaves his answers where they are gets no more of them, and others theirs; what he held is free when
    he goes."""
    each = TOKENS * H * 4
    service.limits = service.limits._replace(max_unread_bytes=3 * each, max_in_flight=100)
    hoarder, other = Hoarder(service), Hoarder(service)
    for number in range(1, 7):
        hoarder.ask(number)
    hoarder.wait(6)
    assert [e.reason for e in hoarder.errors] == ["TOO_MANY_REQUESTS_IN_FLIGHT"] * 3
    assert f"{3 * each} bytes of this connection that are not read" in hoarder.errors[0].message
    other.ask(1)
    other.wait(1)
    assert not other.errors
    other.session.written(other.answers.pop())
    hoarder.session.written(hoarder.answers.pop())
    hoarder.ask(7)
    hoarder.wait(6)
    assert len(hoarder.errors) == 3
    hoarder.session.close()
    for number in range(2, 5):
        other.ask(number)
    other.wait(3)
    assert not other.errors
    other.session.close()
    assert service._unread_bytes == 0


def test_an_answer_that_cannot_be_handed_over_holds_nothing(service):
    caller = Hoarder(service)
    caller.broken = True
    for number in (1, 2, 3):
        caller.ask(number)
    caller.wait(3)
    assert [e.reason for e in caller.errors] == ["INTERNAL"] * 3
    assert service._unread_bytes == 0
    caller.broken = False
    caller.ask(4)
    caller.wait(4)
    assert service._unread_bytes == TOKENS * H * 4
    caller.session.close()
    assert service._unread_bytes == 0


def test_requests_that_fail_or_are_taken_back_hold_nothing(service, experts):
    caller = Hoarder(service)
    bad = Slot(1)
    bad.ids[0] = 99
    caller.session.take(bad.view(), time.monotonic_ns())
    caller.wait(1)
    assert caller.errors[0].reason == "EXPERT_ID_OUT_OF_RANGE"
    assert service._unread_bytes == 0
    busy(service, experts)
    caller.ask(2)
    assert service._unread_bytes == TOKENS * H * 4
    caller.session.take(pb.CancelRequest(request_id=2), time.monotonic_ns())
    experts.gate.set()
    end = time.monotonic() + 10
    while service._unread_bytes and time.monotonic() < end:
        time.sleep(0.005)
    assert service._unread_bytes == 0


class Hoarder:
    """An outlet that notes what it is given, and a caller who reads nothing of it."""

    def __init__(self, service) -> None:
        self.answers: list[int] = []
        self.errors: list[pb.RequestError] = []
        self.broken = False
        self.changed = threading.Condition()
        self.session = service.session(self, "test")

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
