"""What is expected of a batch and of a request, as values; and the twin in C++ held to them."""

from __future__ import annotations

import ctypes as C
import random

import pytest
from core_library import needs_core

from expertd_server.engine.core import library
from expertd_server.engine.forecast import SAFETY, BatchTimes, Bounds, Forecast

pytestmark = pytest.mark.timeout(30)

MS, SECOND = 1_000_000, 1_000_000_000


def times(*batches: tuple[int, int, int]) -> BatchTimes:
    t = BatchTimes()
    for b in batches:
        t.saw(*b)
    return t


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


def forecast(*batches: tuple[int, int, int], max_tokens: int = 64) -> Forecast:
    f = Forecast(max_tokens)
    f.layer(3, 2, batches or [(1, 2, MS), (64, 2, 64 * MS)])
    return f


def foresee(f: Forecast, now: int, left: int, tokens: int = 4, own: int = 0, callers: int = 1, waiting: int = 0):
    return f.foresee(now, 3, 0, tokens, 2, now + left, own, callers, waiting)


def begin(f: Forecast, now: int, rows: int) -> None:
    work = f.find(3)
    assert work is not None
    f.begin(now, work, rows, 2)


def test_what_nobody_knows_is_taken():
    f = Forecast(64)
    assert foresee(f, 0, 1).late_ns == 0.0, "no such layer"
    f.layer(3, 2)
    assert foresee(f, 0, 1).late_ns == 0.0, "no batch of it yet"


def test_what_runs_and_what_waits_is_before_it():
    f = forecast()
    begin(f, 0, 10)
    assert f.running_ns(4 * MS) == pytest.approx(6 * MS)
    assert f.running_ns(13 * MS) == pytest.approx(3 * MS), "what should be over takes as long again"
    f.enter(3, 0, 20, 40)
    assert f.waiting_ns == pytest.approx(20 * MS)
    seen = foresee(f, 4 * MS, 40 * MS, waiting=40, own=40)
    assert seen.in_ns == pytest.approx(30 * MS)
    assert seen.late_ns == pytest.approx((SAFETY * 26 + 4 - 40) * MS)
    f.leave(3, 0, 20, 40)
    assert f.waiting_ns == 0.0


def test_more_than_a_batch_is_several_batches():
    f = forecast((64, 2, 10 * MS))
    f.enter(3, 0, 130, 260)
    assert f.waiting_ns == pytest.approx(30 * MS)
    wide = forecast((16, 8, 10 * MS))  # 16 rows of 8 routes are a batch where 64 rows have 2
    wide.enter(3, 1, 32, 256)
    assert wide.waiting_ns == pytest.approx(20 * MS)


def test_others_who_flood_do_not_count_for_one_who_asks_for_little():
    f = forecast()
    begin(f, 0, 1)
    f.enter(3, 0, 1000, 2000)
    flooder = foresee(f, 0, 100 * MS, own=2000, callers=1, waiting=2000)
    modest = foresee(f, 0, 100 * MS, own=0, callers=2, waiting=2000)
    assert flooder.late_ns > 0
    assert modest.late_ns < 0


def test_an_idle_server_tries_again_what_it_thinks_it_cannot_do():
    f = forecast()
    begin(f, 0, 1)
    work = f.find(3)
    assert work is not None
    f.computed(MS, work, 1, 2, MS, 0)
    f.end(MS)
    assert foresee(f, 2 * MS, MS).late_ns > 0, "four rows take 4 ms, and 1 ms is left"
    assert foresee(f, MS + SECOND, MS).late_ns == 0, "nothing was computed for a second: who knows"


def test_what_came_later_than_expected_is_allowed_for_and_forgotten():
    f = forecast()
    begin(f, 0, 1)
    work = f.find(3)
    assert work is not None
    before = foresee(f, 0, 100 * MS)
    f.computed(0, work, 1, 2, MS, 30 * MS)
    assert foresee(f, 0, 100 * MS).late_ns - before.late_ns == pytest.approx(30 * MS)
    assert foresee(f, 0, 20 * MS).late_ns == pytest.approx(
        foresee(f, 0, 40 * MS).late_ns + 10 * MS
    )  # at most half of it
    f.dropped(0, work, 4, 2, -50 * MS)
    assert foresee(f, 0, 200 * MS).late_ns - foresee(forecast_begun(), 0, 200 * MS).late_ns == pytest.approx(54 * MS)
    later = 10 * SECOND
    begin(f, later, 1)
    assert foresee(f, later, 200 * MS).late_ns < foresee(f, 0, 200 * MS).late_ns


def forecast_begun() -> Forecast:
    f = forecast()
    begin(f, 0, 1)
    return f


def test_the_way_out_counts():
    f = forecast_begun()
    before = foresee(f, 0, 100 * MS).late_ns
    f.went_out(0, 7 * MS)
    assert foresee(f, 0, 100 * MS).late_ns == pytest.approx(before + 7 * MS)


def test_bounds():
    b = Bounds(100, times((1, 1, 10), (8, 1, 80)), 5, 2)
    assert not b.doomed(1, 1, 117)
    assert b.doomed(1, 1, 116)
    assert not b.doomed(1, 1, 0)
    assert b.in_time(8, 1, 207)
    assert not b.in_time(8, 1, 206)
    assert b.in_time(8, 1, 0)
    assert Bounds(100).in_time(8, 1, 101)


class Native:
    """expertd_forecast of the core, with the methods of Forecast that the comparison needs."""

    def __init__(self, max_tokens: int) -> None:
        lib = library()
        u32, u64, f64, p = C.c_uint32, C.c_uint64, C.c_double, C.c_void_p
        self._lib = lib
        for name, result, arguments in (
            ("", p, (u64,)), ("_free", None, (p,)), ("_layer", None, (p, u32, u64)),
            ("_saw", None, (p, u32, u64, u64, u64)), ("_expect", f64, (p, u32, u64, u64)),
            ("_enter", None, (p, u32, u32, u64, u64)), ("_leave", None, (p, u32, u32, u64, u64)),
            ("_begin", None, (p, u64, u32, u64, u64)), ("_computed", None, (p, u64, u32, u64, u64, u64, f64)),
            ("_dropped", None, (p, u64, u32, u64, u64, u64)), ("_went_out", None, (p, u64, f64)),
            ("_wait", f64, (p, u64)), ("_foresee", None, (p, u64, u32, u32, u64, u64, u64, u64, u64, u64, p)),
        ):  # fmt: skip
            function = getattr(lib, "expertd_forecast" + name)
            function.restype, function.argtypes = result, arguments
        self._f = lib.expertd_forecast(max_tokens)

    def __getattr__(self, name):
        return lambda *args: getattr(self._lib, "expertd_forecast_" + name)(self._f, *args)

    def foresee(self, *args):
        out = (C.c_double * 2)()
        self._lib.expertd_forecast_foresee(self._f, *args, out)
        return tuple(out)


@needs_core
@pytest.mark.parametrize("seed", range(8))
def test_the_twin_in_cpp_expects_the_same(seed):
    rng = random.Random(seed)
    python, native = Forecast(256), Native(256)
    for layer in (1, 2):
        python.layer(layer, 4)
        native.layer(layer, 4)
    now, waiting, running, compared = SECOND, [], 0, 0
    for _ in range(800):
        now += rng.randrange(3 * MS)
        layer, line, tokens, k = rng.choice((1, 2)), rng.randrange(2), rng.randrange(1, 300), rng.randrange(1, 10)
        what = rng.random()
        if what < 0.35:
            waiting.append((layer, line, tokens, tokens * k))
            for f in (python, native):
                f.enter(*waiting[-1])
        elif what < 0.5 and waiting:
            gone = waiting.pop(rng.randrange(len(waiting)))
            for f in (python, native):
                f.leave(*gone)
        elif what < 0.65 and running < 3:
            running += 1
            python.begin(now, python.find(layer), tokens, k)
            native.begin(now, layer, tokens, k)
        elif what < 0.8 and running:
            running -= 1
            took, behind = rng.randrange(1, 50 * MS), float(rng.randrange(-MS, 5 * MS))
            python.computed(now, python.find(layer), tokens, k, took, behind)
            python.end(now)
            native.computed(now, layer, tokens, k, took, behind)
        elif what < 0.85:
            python.dropped(now, python.find(layer), tokens, k, now - MS)
            native.dropped(now, layer, tokens, k, now - MS)
            out = rng.randrange(2 * MS)
            python.went_out(now, out)
            native.went_out(now, out)
        own, more = rng.randrange(500), rng.randrange(500)
        asked = (now, layer, line, tokens, k, now + rng.randrange(1, 400 * MS), own, rng.randrange(1, 5), own + more)
        assert native.foresee(*asked) == pytest.approx(tuple(python.foresee(*asked)), rel=1e-9, abs=1e-3)
        assert native.expect(layer, tokens, k) == pytest.approx(python.find(layer).times.expect(tokens, k), rel=1e-12)
        assert native.wait(now) == pytest.approx(python.running_ns(now) + python.waiting_ns, rel=1e-9, abs=1e-3)
        compared += python.foresee(*asked).late_ns > 0
    assert compared > 50
    native.free()
