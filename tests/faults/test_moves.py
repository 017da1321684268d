"""Experts that move under load, and a plan for unequal servers, in short; `expertctl bench moves` and `bench unequal`
are the long forms."""

from __future__ import annotations

import pytest

from expertd_client.faults import moves, unequal


@pytest.mark.slow  # three servers start, and clients are given two seconds for each change
@pytest.mark.timeout(180)
def test_no_call_notices_a_move():
    (quiet, moving), failures = moves.run(rounds=2, callers=2, pace=15.0)
    assert not failures
    assert quiet.failed == moving.failed == 0
    assert quiet.calls > 50
    assert moving.calls > 50
    assert moving.moved == 2 * 4 * len(moves.MOVED)
    assert moving.follow_s < 2.5, "the bench's bound is 2; this machine may be busy with other tests"


@pytest.mark.slow  # five servers start
@pytest.mark.timeout(180)
def test_a_plan_of_unequal_servers_beats_the_even_split():
    (even, planned), alone, bars = unequal.run(seconds=3.0, callers=16)
    assert "--memory-limit allows" in alone
    assert even.failed == planned.failed == 0
    assert sum(planned.held) >= 4 * 64
    assert planned.forecast > 1.2
    assert planned.times > 1.0, "the bench is within 15 % of the forecast; this machine may be busy with other tests"
    assert len(bars) == 3
