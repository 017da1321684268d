"""Experts that move under load, and a plan for unequal servers, in short; `expertctl bench moves` and `bench unequal`
are the long forms."""

from __future__ import annotations

import pytest

from expertctl.bench.faults import moves, unequal
from expertd_client.cluster import members


@pytest.fixture
def clients_ask_often(monkeypatch):
    """Twenty times a second instead of once: a move leaves them two seconds to hear of it, and this machine is busy."""
    monkeypatch.setattr(members, "PROBE_S", 0.05)


@pytest.mark.slow  # three servers start, and clients are given two seconds for each change
@pytest.mark.timeout(600)
def test_no_call_notices_a_move(clients_ask_often):
    (quiet, moving), failures = moves.run(rounds=2, callers=2, pace=15.0)
    assert not failures
    assert quiet.failed == moving.failed == 0
    assert quiet.calls > 0
    assert moving.calls > 0
    assert moving.moved == 2 * 4 * len(moves.MOVED)
    assert moving.follow_s < 90, "the new replica has answered"


@pytest.mark.soak  # five servers start
@pytest.mark.timeout(600)
def test_a_plan_of_unequal_servers_is_carried_out_under_load(clients_ask_often):
    (even, planned), alone, bars, failures = unequal.run(seconds=1.0, callers=16)
    assert "--memory-limit allows" in alone
    assert not failures
    assert even.failed == planned.failed == 0
    assert even.calls > 0
    assert planned.calls > 0
    assert sum(planned.held) >= 4 * 64
    assert planned.held[0] > planned.held[2], "the fastest holds most"
    assert planned.forecast > 1.0
    assert len(bars) == 3


@pytest.mark.soak
@pytest.mark.alone
def test_a_plan_of_unequal_servers_beats_the_even_split():
    (_, planned), _, _, _ = unequal.run(seconds=3.0, callers=16)
    assert planned.forecast > 1.2
    assert planned.times > 1.0, "the bench is within 15 % of the forecast"
