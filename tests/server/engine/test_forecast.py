"""What is expected of a batch and of a request (csrc/forecast.h), as values."""

from __future__ import annotations

import pytest
from rules_kit import MS, SECOND, Asked, Rules

from expertd_server.engine.admission import QueueLimits

SAFETY = 1.25
"""Work counts for so much more where a request is let in or joins a batch."""


class Times:
    """Batches of one layer: (rows, routes a token, nanoseconds) of each."""

    def __init__(self, *batches: tuple[int, int, float]) -> None:
        self._rules = Rules()
        for b in batches:
            self.saw(*b)

    def saw(self, rows: int, top_k: int, ns: int) -> None:
        self._rules.rules_saw(0, rows, top_k, ns)

    def expect(self, rows: int, top_k: int) -> float:
        return self._rules.rules_expect(0, rows, top_k)


times = Times


def test_nothing_is_known_before_the_first_batch():
    assert times().expect(8, 2) == 0.0


def test_between_two_sizes_and_beyond_them():
    t = times((4, 2, 100), (8, 2, 180))
    assert [t.expect(n, 2) for n in (1, 4, 6, 8, 16)] == [100, 100, 140, 180, 360]


def test_other_numbers_of_routes_are_in_proportion_or_an_upper_bound():
    t = times((8, 2, 100))
    assert t.expect(8, 8) == 400
    assert t.expect(8, 1) == 100
    assert times((8, 2, 100), (8, 8, 250)).expect(8, 8) == 250


def test_the_first_batches_count_alike_and_later_ones_for_a_fifth():
    t = times(*((8, 2, ns) for ns in (100, 200, 300)))
    assert t.expect(8, 2) == pytest.approx(200)
    for _ in range(40):
        t.saw(8, 2, 1000)
    before = t.expect(8, 2)
    t.saw(8, 2, 0)
    assert t.expect(8, 2) == pytest.approx(0.8 * before)


def test_sizes_of_one_power_of_two_are_kept_by_their_mean():
    t = times((5, 2, 50), (7, 2, 70))
    assert t.expect(6, 2) == pytest.approx(60)
    assert t.expect(12, 2) == pytest.approx(120)


def forecast(*batches: tuple[int, int, int], max_tokens: int = 64) -> Rules:
    f = Rules(max_tokens, QueueLimits(), layers=((3, 2),))
    for b in batches or [(1, 2, MS), (64, 2, 64 * MS)]:
        f.rules_saw(3, *b)
    return f


def foresee(f: Rules, now: int, left: int, tokens: int = 4, own: int = 0, callers: int = 1, waiting: int = 0):
    return f.foresee(now, 3, 0, tokens, 2, now + left, own, callers, waiting)


def begin(f: Rules, now: int, rows: int) -> None:
    f.forecast_begin(now, 3, rows, 2)


def test_what_nobody_knows_is_taken():
    assert foresee(Rules(layers=()), 0, 1).late_ns == 0.0, "no such layer"
    assert foresee(Rules(layers=((3, 2),)), 0, 1).late_ns == 0.0, "no batch of it yet"


def test_what_runs_and_what_waits_is_before_it():
    f = forecast()
    begin(f, 0, 10)
    assert f.forecast_running(4 * MS) == pytest.approx(6 * MS)
    assert f.forecast_running(13 * MS) == pytest.approx(3 * MS), "what should be over takes as long again"
    f.forecast_enter(3, 0, 20, 40)
    assert f.forecast_waiting() == pytest.approx(20 * MS)
    seen = foresee(f, 4 * MS, 40 * MS, waiting=40, own=40)
    assert seen.in_ns == pytest.approx(30 * MS)
    assert seen.late_ns == pytest.approx((SAFETY * 26 + 4 - 40) * MS)
    assert seen.less_ns == pytest.approx(26 * MS), "what runs and waits, without what is added for safety"
    f.forecast_leave(3, 0, 20, 40)
    assert f.forecast_waiting() == 0.0


def test_more_than_a_batch_is_several_batches():
    f = forecast((64, 2, 10 * MS))
    f.forecast_enter(3, 0, 130, 260)
    assert f.forecast_waiting() == pytest.approx(30 * MS)
    wide = forecast((16, 8, 10 * MS))  # 16 rows of 8 routes are a batch where 64 rows have 2
    wide.forecast_enter(3, 1, 32, 256)
    assert wide.forecast_waiting() == pytest.approx(20 * MS)


def test_others_who_flood_do_not_count_for_one_who_asks_for_little():
    f = forecast()
    begin(f, 0, 1)
    f.forecast_enter(3, 0, 1000, 2000)
    flooder = foresee(f, 0, 100 * MS, own=2000, callers=1, waiting=2000)
    modest = foresee(f, 0, 100 * MS, own=0, callers=2, waiting=2000)
    assert flooder.late_ns > 0
    assert modest.late_ns < 0


def test_an_idle_server_tries_again_what_it_thinks_it_cannot_do():
    f = forecast()
    begin(f, 0, 1)
    f.forecast_computed(MS, 3, 1, 2, MS, 0)
    f.forecast_end(MS)
    assert foresee(f, 2 * MS, MS).late_ns > 0, "four rows take 4 ms, and 1 ms is left"
    assert foresee(f, 2 * MS, MS).less_ns == 0, "that is so whenever it is asked for"
    assert foresee(f, MS + SECOND, MS).late_ns == 0, "nothing was computed for a second: who knows"


def test_what_came_later_than_expected_is_allowed_for_and_forgotten():
    f = forecast()
    begin(f, 0, 1)
    before = foresee(f, 0, 100 * MS)
    f.forecast_computed(0, 3, 1, 2, MS, 30 * MS)
    assert foresee(f, 0, 100 * MS).late_ns - before.late_ns == pytest.approx(30 * MS)
    assert foresee(f, 0, 20 * MS).late_ns == pytest.approx(
        foresee(f, 0, 40 * MS).late_ns + 10 * MS
    )  # at most half of it
    f.forecast_dropped(50 * MS, 3, 4, 2, 0)
    assert foresee(f, 0, 200 * MS).late_ns - foresee(forecast_begun(), 0, 200 * MS).late_ns == pytest.approx(54 * MS)
    later = 10 * SECOND
    begin(f, later, 1)
    assert foresee(f, later, 200 * MS).late_ns < foresee(f, 0, 200 * MS).late_ns


def forecast_begun() -> Rules:
    f = forecast()
    begin(f, 0, 1)
    return f


def test_one_outlier_counts_as_four_batches_and_two_in_a_row_as_what_they_are():
    t = times(*[(8, 2, 100)] * 10, (8, 2, 100_000))
    assert t.expect(8, 2) == pytest.approx(100 + 300 * 0.2)
    t.saw(8, 2, 100)
    assert t.expect(8, 2) < 160
    t.saw(8, 2, 100_000)
    t.saw(8, 2, 100_000)
    assert t.expect(8, 2) > 20_000


def test_an_idle_server_does_not_refuse_for_what_went_wrong_before():
    f = forecast_begun()
    f.forecast_computed(MS, 3, 1, 2, MS, 90 * MS)
    f.forecast_went_out(MS, 90 * MS)
    assert foresee(f, MS, 10 * MS).late_ns > 0, "while something runs"
    f.forecast_end(MS)
    assert foresee(f, MS, 10 * MS).late_ns < 0
    f.forecast_went_out(MS, 90 * MS)
    assert foresee(f, MS, 10 * MS).late_ns > 0, "two in a row: answers take long"


def test_the_way_out_counts():
    f = forecast_begun()
    before = foresee(f, 0, 100 * MS).late_ns
    f.forecast_went_out(0, 7 * MS)
    assert foresee(f, 0, 100 * MS).late_ns == pytest.approx(before + 7 * MS)


def test_a_request_that_would_be_late_alone_is_dropped_when_its_turn_comes():
    f = forecast((1, 2, 10 * MS), (8, 2, 80 * MS))
    for at in (0, 100 * MS):
        begin(f, at, 1)
        f.forecast_end(at)
    f.forecast_went_out(0, 5 * MS)
    out = 5 * MS * 2 ** (-100 / 5000)
    on_time = Asked(3, 1, 2, 0, int(100 * MS + 10 * MS + out) + 1000, "a")
    late = Asked(3, 1, 2, 0, int(100 * MS + 10 * MS + out) - 1000, "a")
    for r in (on_time, late):
        assert f.come(r, 1)[0] == ""
    c = f.cut(100 * MS)
    assert c is not None
    assert (c.run, c.dead) == ([on_time], [late])
