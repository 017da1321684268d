"""Answers, refusals and cancels of a session, and how much memory unread answers may hold."""

from __future__ import annotations

import time

import numpy as np
from session_kit import TOKENS, H, Hoarder, K, Peer, Slot, busy, counted

from expertd.v1 import expert_service_pb2 as pb


def until(condition):
    end_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def test_every_slot_gets_its_answer(service):
    peer = Peer(service)
    slots = [peer.send(n) for n in (1, 2, 3)]
    peer.wait(*slots)
    for slot in slots:
        (answer,) = slot.answers
        assert answer.routes_computed == TOKENS * K
        np.testing.assert_array_equal(slot.out, slot.x)
    until(lambda: counted(service, "OK", "") == 3)


def test_a_refused_request_is_told_and_counted(service):
    peer = Peer(service)
    slot = peer.send(1, layer=7)
    assert [e.reason for e in slot.errors] == ["LAYER_NOT_HELD"]
    assert counted(service, "NOT_FOUND", "LAYER_NOT_HELD") == 1


def test_a_cancelled_request_is_told_at_once_and_gets_no_answer(service, experts):
    busy(service, experts)
    peer = Peer(service)
    waiting, computed = peer.send(1), peer.send(2)
    peer.session.take(pb.CancelRequest(request_id=1), 0)
    assert [e.reason for e in waiting.errors] == ["CANCELLED"], "the caller is told at once"
    experts.gate.set()
    peer.wait(waiting, computed)
    until(service.engine.idle)
    assert (waiting.answers, waiting.out[0]) == ([], -1)

    experts.gate.clear()
    experts.entered.clear()
    under_way = peer.send(3)
    assert experts.entered.wait(20)
    peer.session.take(pb.CancelRequest(request_id=3), 0)
    assert [e.reason for e in under_way.errors] == ["CANCELLED"]
    again = peer.send(3)
    experts.gate.set()
    peer.wait(under_way, again)
    until(service.engine.idle)
    assert (len(under_way.answers), len(again.answers)) == (0, 1), "the id was free at once, and is answered once"


def test_a_connection_that_goes_gets_no_answer(service, experts):
    busy(service, experts)
    peer = Peer(service)
    slots = [peer.send(n) for n in (1, 2, 3)]
    peer.session.close()
    experts.gate.set()
    until(service.engine.idle)
    assert [(s.answers, s.errors) for s in slots] == [([], [])] * 3
    service.drain()
    assert peer.outlet.said == [], "a closed session is not told that the server drains"


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
    assert service._unread_bytes == 2 * TOKENS * H * 4, "the one that keeps the engine busy, and this one"
    caller.session.take(pb.CancelRequest(request_id=2), time.monotonic_ns())
    experts.gate.set()
    end = time.monotonic() + 10
    while service._unread_bytes and time.monotonic() < end:
        time.sleep(0.005)
    assert service._unread_bytes == 0
