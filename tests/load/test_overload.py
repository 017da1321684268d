"""The short form of `expertctl bench overload --paced`: twice what a server can do, in seconds.  The rules alone are in
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

from expertd.shm.region import supported
from expertd_client.overload.loop import LoopClock
from expertd_client.overload.run import Plan, measure
from expertd_client.overload.tally import Row

pytestmark = pytest.mark.timeout(180)  # two processes' start, and 4 s of load for each way: 8 s, five times at most


@pytest.mark.parametrize("way", ["streams", "one-stream", "synthetic", "shm", "tcp"])
def test_twice_the_peak(way):
    if way == "shm" and (why := supported()):
        pytest.skip(why)
    for _ in range(5):
        row = next(iter(measure(Plan(paced=True, ways=(way,), loads=(2.0,), tokens=4, seconds=1.5))))
        assert set(row.refused) <= {"OVERLOADED"}
        assert row.rss_mb is not None
        assert row.rss_mb[1] < row.rss_mb[0] + 50
        if quiet(row):
            break
    else:
        pytest.skip(f"this machine is too busy to judge: the generator itself was {row.lateness_p99_ms:.0f} ms late")
    assert row.offered_per_s > 1.5 * row.peak_per_s, "the load was there"
    assert row.refused
    assert row.goodput_of_peak >= 0.4
    assert row.late_admitted <= 0.3
    assert row.refusal_p99_ms < row.deadline_ms


def quiet(row: Row) -> bool:
    """Whether the machine let its processes run, by a control of the same run: how late the generator, which has little
    to do, was itself."""
    return row.lateness_p99_ms < row.deadline_ms / 10


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
