"""Short forms of `expertctl bench overload --paced`: twice what a server can do, in seconds.  The rules alone are in
tests/server/engine/test_overload.py, on a clock of their own; here are sockets, rings and the way between.

The bounds lie between what admission reaches on a quiet machine (99 % of the peak in time, hardly any late) and what
there is without it: a sixth of the peak in time, and four of five late.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors

import pytest

from expertctl.bench.overload.loop import LoopClock
from expertctl.bench.overload.run import OverloadPlan, measure
from expertctl.bench.overload.tally import OverloadMeasurement
from expertd.shm.region import supported

WAYS = ("streams", "one-stream", "synthetic", "shm", "tcp")


def at_twice_the_peak(way: str, seconds: float) -> OverloadMeasurement:
    if way == "shm" and (why := supported()):
        pytest.skip(why)
    (row,) = measure(OverloadPlan(paced=True, ways=(way,), loads=(2.0,), tokens=4, seconds=seconds))
    assert isinstance(row, OverloadMeasurement), row
    assert set(row.refused) <= {"OVERLOADED"}
    assert row.rss_mb is not None
    assert row.rss_mb[1] < row.rss_mb[0] + 50
    return row


@pytest.mark.parametrize("way", WAYS)
def test_what_is_refused_at_twice_the_peak_is_refused_as_overload(way):
    """Whatever else this machine does; how much is in time is for the soak test."""
    row = at_twice_the_peak(way, 0.5)
    assert row.peak_per_s > 0
    assert row.offered_per_s > 0


@pytest.mark.soak
@pytest.mark.alone
@pytest.mark.parametrize("way", WAYS)
def test_twice_the_peak(way):
    """Judged on a run in which the generator, which has little to do, was itself in time: the machine let it run."""
    rows = (at_twice_the_peak(way, 1.5) for _ in range(5))
    row = next((row for row in rows if row.lateness_p99_ms < row.deadline_ms / 10), None)
    assert row is not None, "this machine is too busy to measure on"
    assert row.offered_per_s > 1.5 * row.peak_per_s, "the load was there"
    assert row.refused
    assert row.goodput_of_peak >= 0.4
    assert row.late_admitted <= 0.3
    assert row.refusal_p99_ms < row.deadline_ms


@pytest.fixture
def many_descriptors():
    """Room for two thousand, while it lasts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip(f"a process may have {hard} descriptors here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_descriptors_beyond_select_are_watched_too(many_descriptors):
    """A process that holds a thousand others."""
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1024)]
    try:
        with contextlib.closing(LoopClock()) as clock:
            reads, writes = os.pipe()
            held += [reads, writes]
            assert reads >= 1024
            clock.register(reads, selectors.EVENT_READ)
            assert clock.select(0.01) == []
            os.write(writes, b"x")
            [(key, what)] = clock.select(5)
            assert (key.fd, what) == (reads, selectors.EVENT_READ)
    finally:
        for fd in held:
            os.close(fd)
