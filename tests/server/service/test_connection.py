"""A session: who asks, deadlines, how much may be in flight, draining, failing."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from session_kit import IN_FLIGHT, TOKENS, H, K, Peer, Slot, busy, counted

from expertd.codec import TensorView, encode_stream_request
from expertd.errors import DrainingError, InternalError, OverloadedError
from expertd.v1 import expert_service_pb2 as pb


def test_the_engine_knows_who_asks(service, monkeypatch):
    seen = []
    submit = service.engine.submit
    monkeypatch.setattr(service.engine, "submit", lambda r: (seen.append((r.caller, r.request_id)), submit(r)))
    one, other = Peer(service, "alice"), Peer(service, "bob")
    one.wait(one.send(1))
    other.wait(other.send(1))
    assert seen == [("alice", 1), ("bob", 1)]


def test_under_pressure_a_request_without_time_is_refused_before_it_is_read(service, monkeypatch):
    asked = []

    def hopeless(head, caller, deadline_ns):
        asked.append((head.tokens, head.top_k, caller, deadline_ns))
        return OverloadedError("too late", retry_after_us=5) if head.layer == 0 else None

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
    peer.session.take(slot.view(timeout_us=40_000), arrival_ns)
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
    assert peer.session.busy, "in flight"
    experts.gate.set()
    peer.wait(slot)
    assert not peer.session.finished(), "its answer is still to be written"
    assert peer.session.busy
    peer.session.written()
    assert peer.session.finished()
    assert not peer.session.busy


def test_a_cancel_that_comes_too_late_or_of_nothing_says_nothing(service):
    peer = Peer(service)
    peer.wait(peer.send(1))
    for number in (0, 1, 7):
        peer.session.take(pb.CancelRequest(request_id=number), time.monotonic_ns())
    assert peer.outlet.said == []
    assert not peer.session.busy


def test_a_message_that_holds_nothing_or_a_request_without_an_id_is_refused(service):
    peer = Peer(service)
    peer.session.take(None, time.monotonic_ns())
    peer.wait(peer.send(0))
    assert (peer.outlet.said[0].reason, peer.outlet.said[0].request_id) == ("MALFORMED_MESSAGE", 0)
    assert [e.reason for e in peer.outlet.slots[0].errors] == ["MISSING_REQUEST_ID"]


def test_an_offer_is_answered(service):
    peer = Peer(service)
    peer.session.take(pb.SessionOffer(), time.monotonic_ns())
    assert [type(m) for m in peer.outlet.said] == [pb.SessionAnswer]


def test_a_stream_has_few_tokens_that_nobody_used(service, monkeypatch):
    class Offered:
        asked = 0

        def offer(self, caller, host):
            self.asked += 1
            return "t", "e", ""

    listener, peer = Offered(), Peer(service)
    monkeypatch.setattr(service, "offered", {"shm": listener})
    for _ in range(300):
        peer.session.take(pb.SessionOffer(transports=["shm"]), time.monotonic_ns())
    assert listener.asked == 4
    answers = peer.outlet.said
    assert [a.token for a in answers[:5]] == ["t"] * 4 + [""]
    assert "try again" in answers[-1].verdicts[0].reason
    assert not answers[-1].verdicts[0].accepted
    Peer(service).session.take(pb.SessionOffer(transports=["shm"]), time.monotonic_ns())
    assert listener.asked == 5, "another stream has its own"


def test_offers_count_for_ten_seconds(service, monkeypatch):
    class Offered:
        def offer(self, caller, host):
            return "t", "e", ""

    now_s, peer = 1000.0, Peer(service)
    monkeypatch.setattr("expertd_server.service.connection.time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(service, "offered", {"shm": Offered()})

    def offered() -> bool:
        peer.session.take(pb.SessionOffer(transports=["shm"]), 0)
        return peer.outlet.said[-1].verdicts[0].accepted

    assert [offered() for _ in range(6)] == [True] * 4 + [False] * 2
    now_s += 9.9
    assert not offered()
    now_s += 0.2
    assert [offered() for _ in range(5)] == [True] * 4 + [False], "those that were refused did not count"


def test_what_waits_of_a_connection_that_ended_is_not_computed(service, experts):
    busy(service, experts)
    gone, stays = Peer(service), Peer(service)
    gone.send(2)
    gone.session.close()
    last = stays.send(3)
    experts.gate.set()
    stays.wait(last)
    assert experts.computed == [1, 3]
    assert gone.outlet.slots[2].answers == []


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
    real = service._intake._generator.hidden

    def slow(*args):
        drawing.set()
        assert draw.wait(20)
        return real(*args)

    monkeypatch.setattr(service._intake._generator, "hidden", slow)
    monkeypatch.setattr("expertd_server.service.service._DRAW_AT_ONCE", 40)
    peer, other = Peer(service), Peer(service)
    seeds = pb.SyntheticValues(seed=3)
    slot = peer.outlet.slots[1] = Slot(1)
    view = slot.view()
    view.hidden_states = TensorView(pb.DATA_TYPE_F32, (TOKENS, H), 6, seeds, None)
    wait = peer.session.take(view, time.monotonic_ns())
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
    wait = peer.session.take(view, time.monotonic_ns())
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
