"""Lines about refused requests: who, why, and how often at most."""

from __future__ import annotations

import logging

import pytest

from expertd.errors import BadShapeError, InternalError, QueueFullError, RequestCancelledError
from expertd_server.service.refusals import Refusals, request_id_of


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.DEBUG, "expertd_server")
    return lambda: [r.getMessage() for r in caplog.records]


def test_a_line_says_who_and_why(clock, lines, caplog):
    told = Refusals(clock=clock).tell(BadShapeError("hidden_states: got [2]"), "decode-pool", "call-7")
    assert told == "call-7"
    assert lines() == ["BAD_SHAPE: request call-7 of decode-pool: hidden_states: got [2]"]
    record = caplog.records[0]
    want = {"reason": "BAD_SHAPE", "code": "INVALID_ARGUMENT", "caller": "decode-pool", "request": "call-7"}
    assert (record.levelno, record.fields) == (logging.INFO, want)


def test_who_gives_no_id_gets_one(clock, lines):
    told = Refusals(clock=clock).tell(BadShapeError("x"), "a")
    assert len(told) == 16
    assert told in lines()[0]


def test_a_fault_of_the_server_is_a_warning(clock, caplog):
    caplog.set_level(logging.DEBUG, "expertd_server")
    Refusals(clock=clock).tell(InternalError("x"), "a")
    assert caplog.records[0].levelno == logging.WARNING


def test_a_caller_in_a_loop_has_a_line_every_few_seconds(clock, lines):
    refusals = Refusals(every_s=10, clock=clock)
    for _ in range(1000):
        refusals.tell(QueueFullError("full"), "a", "1")
    refusals.flush()
    assert len(lines()) == 1
    clock.now_s += 11
    refusals.flush()
    assert lines()[1:] == ["QUEUE_FULL: 999 more requests of a"]
    refusals.tell(QueueFullError("full"), "a", "2")
    clock.now_s += 11
    refusals.flush()
    assert lines()[2:] == ["QUEUE_FULL: 1 more requests of a"]


def test_each_reason_and_each_caller_is_told_of(clock, lines):
    refusals = Refusals(clock=clock)
    for caller in ("a", "b"):
        refusals.tell(QueueFullError("full"), caller, "1")
        refusals.tell(BadShapeError("shape"), caller, "1")
    assert len(lines()) == 4


def test_many_callers_have_a_bounded_number_of_lines(clock, lines):
    refusals = Refusals(every_s=10, most=5, clock=clock)
    for i in range(100):
        refusals.tell(QueueFullError("full"), f"peer {i}", "1")
    assert len(lines()) == 5
    clock.now_s += 11
    refusals.flush()
    assert lines()[5:] == ["95 more requests of other clients were refused"]


def test_what_ended_long_ago_is_forgotten(clock):
    refusals = Refusals(every_s=10, clock=clock)
    for i in range(20):
        refusals.tell(QueueFullError("full"), f"peer {i}", "1")
    clock.now_s += 11
    refusals.flush()
    assert not refusals._lines


def test_who_cancels_was_not_refused(clock, lines):
    assert Refusals(clock=clock).tell(RequestCancelledError("x"), "a", "1") == ""
    assert lines() == []


def test_requests_of_sessions_come_by_number(clock, lines):
    refusals = Refusals(every_s=10, clock=clock)
    refusals.tell_many("OVERLOADED", "sessions", 3)
    refusals.tell_many("OVERLOADED", "sessions", 4)
    clock.now_s += 11
    refusals.flush()
    assert lines() == ["OVERLOADED: 3 requests of sessions", "OVERLOADED: 4 more requests of sessions"]


@pytest.mark.parametrize(
    ("value", "want"),
    [
        ("a.b-c_1:2/3@4+=", "a.b-c_1:2/3@4+="),
        ("", ""),
        ("a b", ""),
        ("a\nb", ""),
        ("-a", ""),
        ("x" * 129, ""),
        (b"a", ""),
    ],
)
def test_an_id_that_cannot_stand_in_a_log_is_none(value, want):
    assert request_id_of([("authorization", "Bearer secret"), ("x-request-id", value)]) == want


def test_no_id_is_none():
    assert request_id_of(None) == request_id_of([("x-other", "a")]) == ""
