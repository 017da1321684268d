"""cut(): what runs next, as properties of a pure function."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertd_server.engine.request import Operand, Request
from expertd_server.engine.scheduler import (
    LastBatch,
    Line,
    Policy,
    Shares,
    Waiting,
    cut,
    trust_after,
    urgency,
    wake_at,
)
from expertd_server.engine.served import ServedLayer

NOTHING = Operand("bf16", np.empty(0, np.uint16))
LAYERS = [ServedLayer(n, 8, range(8), 2, 16, 32, None, "none") for n in range(4)]


def request(layer=0, tokens=1, arrival=0, deadline=0, cancelled=False, on_input=False, caller="", top_k=1) -> Request:
    r = Request(
        LAYERS[layer], tokens, top_k, NOTHING, NOTHING, None, lambda *_: None, caller=caller,
        arrival_ns=arrival, deadline_ns=deadline, router_weight_on_input=on_input,
    )  # fmt: skip
    r.cancelled = cancelled
    return r


def line_of(r: Request) -> Line:
    return Line(r.layer.generation, r.router_weight_on_input)


def line(layer: int) -> Line:
    return Line(LAYERS[layer].generation, False)


@dataclass(frozen=True)
class Spec:
    layer: int
    tokens: int
    gap: int
    deadline_after: int | None
    cancelled: bool
    on_input: bool


specs = st.lists(
    st.builds(
        Spec,
        st.integers(0, 3),
        st.integers(1, 40),
        st.integers(0, 5),
        st.none() | st.integers(1, 60),
        st.sampled_from([False, False, False, True]),
        st.booleans(),
    ),
    max_size=40,
)


def fill(items: list[Spec]) -> tuple[Waiting, list[Request]]:
    waiting, all_, now = Waiting(), [], 0
    for s in items:
        now += s.gap
        deadline = 0 if s.deadline_after is None else now + s.deadline_after
        r = request(s.layer, s.tokens, now, deadline, s.cancelled, s.on_input)
        waiting.push(r)
        all_.append(r)
    return waiting, all_


@given(specs, st.integers(1, 64), st.integers(0, 20))
def test_every_request_leaves_once_and_batches_are_sound(items, max_tokens, step):
    waiting, all_ = fill(items)
    now = max((r.arrival_ns for r in all_), default=0)
    policy = Policy(max_tokens)
    ran: list[Request] = []
    dead: list[Request] = []
    cuts = 0
    while (c := cut(waiting.lines, now, policy)) is not None:
        heads = {line: min(map(urgency, q)) for line, q in waiting.lines.items()}
        assert heads[c.line] == min(heads.values()), "the line with the most urgent request comes first"
        tokens = sum(r.tokens for r in c.run)
        assert tokens <= max_tokens or len(c.run) == 1
        assert all(line_of(r) == c.line for r in (*c.run, *c.dead))
        assert not any(r.cancelled or r.expired(now) for r in c.run)
        assert all(r.expired(now) or r.cancelled for r in c.dead)
        assert c.run or c.dead
        waiting.remove(c)
        ran += c.run
        dead += c.dead
        now += step
        cuts += 1
        assert cuts <= len(all_), "it ends"
    assert waiting.requests == waiting.tokens == 0
    assert not waiting.lines
    assert sorted(map(id, ran + dead)) == sorted(map(id, all_)), "each leaves exactly once"
    assert not waiting.of


@given(specs, st.integers(1, 64))
def test_a_request_waits_for_at_most_as_many_batches_as_there_are_older_requests(items, max_tokens):
    waiting, all_ = fill(items)
    now = max((r.arrival_ns for r in all_), default=0)
    number = 0
    while (c := cut(waiting.lines, now, Policy(max_tokens))) is not None:
        waiting.remove(c)
        number += 1
        for r in c.run:
            assert number <= sum(urgency(other) <= urgency(r) for other in all_)


@given(specs, st.integers(0, 100))
def test_sweep_takes_the_dead_and_leaves_the_living_in_order(items, later):
    waiting, all_ = fill(items)
    now = max((r.arrival_ns for r in all_), default=0) + later
    dead = waiting.sweep(now)
    assert {id(r) for r in dead} == {id(r) for r in all_ if r.expired(now) or r.cancelled}
    left = [r for q in waiting.lines.values() for r in q]
    assert {id(r) for r in left} == {id(r) for r in all_ if not r.expired(now) and not r.cancelled}
    assert waiting.requests == len(left)
    assert waiting.tokens == sum(r.tokens for r in left)
    for q in waiting.lines.values():
        assert [r.arrival_ns for r in q] == sorted(r.arrival_ns for r in q)


def test_requests_of_all_clients_for_one_layer_make_one_batch():
    lines = {line(3): deque(request(3, 8, arrival=i) for i in range(8))}
    c = cut(lines, 100, Policy(4096))
    assert c is not None
    assert len(c.run) == 8


def test_router_weight_on_input_is_a_batch_of_its_own():
    waiting = Waiting()
    for i in range(4):
        waiting.push(request(0, 1, arrival=i, on_input=i % 2 == 1))
    c = cut(waiting.lines, 10, Policy(64))
    assert c is not None
    assert [r.arrival_ns for r in c.run] == [0, 2]


def test_a_request_that_does_not_fit_waits_and_is_not_overtaken_in_its_line():
    waiting = Waiting()
    for i, tokens in enumerate((6, 6, 1)):
        waiting.push(request(0, tokens, arrival=i))
    c = cut(waiting.lines, 10, Policy(8))
    assert c is not None
    assert [r.tokens for r in c.run] == [6]
    waiting.remove(c)
    c = cut(waiting.lines, 10, Policy(8))
    assert c is not None
    assert [r.tokens for r in c.run] == [6, 1]


def test_one_request_above_the_limit_makes_a_batch_alone():
    lines = {line(0): deque([request(0, 100), request(0, 1, arrival=1)])}
    c = cut(lines, 5, Policy(8))
    assert c is not None
    assert [r.tokens for r in c.run] == [100]


@pytest.mark.parametrize(("now", "runs"), [(10, False), (49, False), (50, True)])
def test_waiting_for_company_ends_in_time(now, runs):
    policy = Policy(64, max_wait_ns=50)
    lines = {line(0): deque([request(0, 4, arrival=0), request(0, 4, arrival=9)])}
    c = cut(lines, now, policy)
    assert (c is not None) == runs
    assert wake_at(lines, policy) == 50


def test_a_full_batch_does_not_wait_for_company():
    policy = Policy(8, max_wait_ns=1000)
    young = {line(0): deque([request(0, 2)]), line(1): deque([request(1, 8, arrival=1)])}
    c = cut(young, 2, policy)
    assert c is not None
    assert c.line == line(1)


def test_nothing_waits():
    assert cut({}, 0, Policy(8)) is None
    assert wake_at({}, Policy(8)) is None


@pytest.mark.parametrize(
    ("now", "waiting", "runs"),
    [
        (1000, 1, False),  # one of eight is back at once: the others are waited for
        (1049, 7, False),
        (1000, 8, True),  # all are back
        (1050, 1, True),  # a twentieth of the last batch's time is over
    ],
)
def test_callers_just_answered_are_waited_for_a_part_of_their_batch_s_time(now, waiting, runs):
    policy = Policy(64, patience=0.05)
    last = LastBatch(end_ns=1000, service_ns=1000, requests=8)
    lines = {line(0): deque(request(0, 1, arrival=999) for _ in range(waiting))}
    c = cut(lines, now, policy, last)
    assert (c is not None) == runs
    if c is not None:
        assert len(c.run) == waiting
    assert wake_at(lines, policy, last) == (999 if waiting == 8 else 1050)


def test_a_caller_alone_is_never_waited_with():
    last = LastBatch(end_ns=1000, service_ns=1000, requests=1)
    assert cut({line(0): deque([request()])}, 1000, Policy(64, patience=1.0), last) is not None


def test_patience_shrinks_with_callers_that_do_not_come_back_and_grows_again():
    trust = 1.0
    for want in (0.5, 0.25, 0.125, 0.0625, 0.0625):
        trust = trust_after(trust, came=1, expected=8)
        assert trust == want
    last = LastBatch(end_ns=1000, service_ns=1000, requests=8, trust=trust)
    lines = {line(0): deque([request(arrival=999)])}
    assert wake_at(lines, Policy(64, patience=0.32), last) == 1020
    for want in (0.125, 0.25, 0.5, 1.0, 1.0):
        trust = trust_after(trust, came=8, expected=8)
        assert trust == want


def run_all(waiting: Waiting, policy: Policy, shares: Shares, now: int = 10**9) -> list[Request]:
    """Everything, in the order of its batches."""
    out: list[Request] = []
    while waiting.lines:
        shares.settle(waiting.of)
        c = cut(waiting.lines, now, policy, None, shares)
        assert c is not None
        waiting.remove(c)
        shares.serve(c.run)
        shares.saw(sum(r.routes for r in c.run), 1000 * sum(r.routes for r in c.run))
        out += c.run
    return out


def test_one_who_floods_a_line_does_not_hold_up_the_next():
    waiting = Waiting()
    for i in range(100):
        waiting.push(request(tokens=8, arrival=i, caller="greedy"))
    modest = request(tokens=8, arrival=100, caller="modest")
    waiting.push(modest)
    assert run_all(waiting, Policy(16), Shares()).index(modest) < 2


def test_one_who_floods_all_layers_does_not_hold_up_the_next():
    """Lines with older requests go first; a caller's larger share puts them off."""
    waiting, shares = Waiting(), Shares()
    shares.serve([request(tokens=4096, top_k=8, caller="greedy") for _ in range(16)])
    shares.saw(1, 1000)
    for i in range(300):
        waiting.push(request(i % 3, tokens=8, arrival=i, caller="greedy"))
    modest = request(3, tokens=8, arrival=50_000_000, caller="modest")
    waiting.push(modest)
    assert run_all(waiting, Policy(8), shares)[0] is modest


def test_shares_are_of_routes_not_of_requests_or_tokens():
    waiting = Waiting()
    for i in range(8):
        waiting.push(request(tokens=4, top_k=2, arrival=i, caller="wide"))
        waiting.push(request(tokens=4, top_k=1, arrival=i, caller="narrow"))
    first = run_all(waiting, Policy(4), Shares())[:9]
    assert sum(r.caller == "narrow" for r in first) == 6


def test_who_was_away_cannot_save_up():
    shares = Shares()
    shares.serve([request(tokens=1000, caller="here")])
    shares.settle(["here"])
    assert shares.of("new") == shares.of("here")


def test_a_share_costs_the_time_of_its_routes_as_late_batches_took_it():
    shares = Shares()
    shares.serve([request(tokens=10, caller="served")])
    assert shares.lag_ns("served") == 0, "nobody knows what a route takes"
    shares.saw(routes=10, ns=1000)
    assert shares.lag_ns("served") == 10 * 100
    shares.saw(routes=10, ns=2000)
    assert 10 * 100 < shares.lag_ns("served") < 10 * 200, "one batch does not change it all"
    for _ in range(50):
        shares.saw(routes=10, ns=2000)
    assert shares.lag_ns("served") == pytest.approx(10 * 200, abs=2)
    assert shares.lag_ns("new") == 0


def test_a_deadline_makes_more_urgent_and_none_does_not():
    usual = urgency(request(arrival=50))
    assert usual == 50 + 100_000_000
    assert urgency(request(arrival=50, deadline=usual - 1)) == usual - 1
    assert urgency(request(arrival=50, deadline=usual + 1)) == usual, "far ahead, it does not put him behind others"


def test_callers_that_are_gone_are_forgotten():
    shares = Shares()
    for i in range(20_000):
        shares.serve([request(caller=str(i))])
    assert len(shares._served) <= 4097


def test_a_batch_has_no_more_routes_than_its_layer_s_own_tokens_have():
    """One wide request would make every row of its batch as wide: memory that nobody planned."""
    waiting = Waiting()
    waiting.push(request(tokens=4, top_k=8, arrival=0))
    waiting.push(request(tokens=12, top_k=2, arrival=1))
    c = cut(waiting.lines, 10, Policy(16))  # 16 rows of 8 are 128, and 16 of the layer's own 2 are 32
    assert c is not None
    assert [r.top_k for r in c.run] == [8]
