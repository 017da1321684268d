"""How long messages were on their way, from two clocks that nobody set alike."""

from __future__ import annotations

import pytest

from expertd_server.service.age import WINDOW_NS, Age

MS = 1_000_000
SECOND = 1_000 * MS


def sent(now_ns: int, way_ns: int, ahead_ns: int = 0) -> int:
    """sent_us of a message that is read at now_ns after way_ns, on a clock that is ahead by so much."""
    return (now_ns - way_ns + ahead_ns) // 1000


@pytest.mark.parametrize("ahead", [0, 5_000 * SECOND, -40 * SECOND])
def test_what_it_took_longer_than_the_quickest(ahead):
    age, now = Age(), 100 * SECOND
    assert age.of(sent(now, 3 * MS, ahead), now) == 0, "the first says nothing but how far the clocks are apart"
    assert age.of(sent(now + MS, 203 * MS, ahead), now + MS) == 200 * MS
    assert age.of(sent(now + 2 * MS, MS, ahead), now + 2 * MS) == 0
    assert age.of(sent(now + 3 * MS, 201 * MS, ahead), now + 3 * MS) == 200 * MS


def test_who_does_not_say_is_not_old():
    assert Age().of(0, 100 * SECOND) == 0


def test_a_backlog_that_grows_is_told_from_a_clock_that_was_set_anew():
    age, now = Age(), 100 * SECOND
    for n in range(50):
        assert age.of(sent(now, n * 10 * MS), now) == n * 10 * MS
        now += 20 * MS
    found = []
    for _ in range(25):  # its clock went back by a minute: nothing can be said until the window is over
        now += SECOND
        found.append(age.of(sent(now, 0, -60 * SECOND), now))
    assert found[0] == 60 * SECOND
    assert found[-1] == 0


@pytest.mark.parametrize(("windows", "old_ms"), [(1, 200), (2, 0), (3, 0)])
def test_the_quickest_message_counts_for_two_windows(windows, old_ms):
    age, now = Age(), 100 * SECOND
    assert age.of(sent(now, MS), now) == 0
    now += windows * WINDOW_NS
    assert age.of(sent(now, 201 * MS), now) == old_ms * MS


def test_clocks_may_drift():
    age, now = Age(), 100 * SECOND
    for n in range(100):
        now += SECOND
        assert age.of(sent(now, MS, -n * 50_000), now) <= 2 * WINDOW_NS * 50e-6 + 50_000
