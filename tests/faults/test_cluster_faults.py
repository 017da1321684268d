"""Servers of a cluster that are killed, stopped, restarted, slowed and cut off under load: no call fails.

The long form is `expertctl bench faults`."""

from __future__ import annotations

import os
import subprocess
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from expertctl.bench.faults.load import LoadClients, effect, p99_ms
from expertctl.bench.faults.netns import Namespace
from expertctl.bench.faults.run import FAULTS, run
from expertd.errors import UnimplementedError

HERE = tuple(fault for fault in FAULTS if fault != "partition")


@pytest.mark.slow  # servers start seven times, which takes most of its time
@pytest.mark.timeout(600)
def test_no_call_fails():
    rows = list(run(HERE, events=1, threads=3, away_s=1.5))
    assert [row.fault for row, _ in rows] == list(HERE)
    assert_fine(rows)


@pytest.mark.soak  # the same with three servers in namespaces, three outside
@pytest.mark.timeout(600)
def test_no_call_fails_where_packets_are_dropped():
    try:
        with Namespace():
            pass
    except UnimplementedError as why:
        pytest.skip(str(why))
    assert_fine(run(["partition"], events=2, threads=3, away_s=1.5))
    assert (
        f"expertd-{os.getpid()}-" not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    )


def assert_fine(rows):
    for row, failures in rows:
        assert not failures, row
        assert row.failed == 0
        assert row.calls > 3, "each caller has answers from during the event, or it is among the failures"
        assert row.quiet_p99_ms > 0
        assert 0 < row.p99_ms <= row.longest_ms + 0.1


class Forwarder:
    """Answers [[1.0]] while its gate is open."""

    def __init__(self):
        self.gate, self.asked = threading.Event(), 0
        self.gate.set()

    def forward_request(self, request):
        self.asked += 1
        assert self.gate.wait(60)
        return SimpleNamespace(output=[[1.0]])


def test_a_caller_that_hangs_during_an_event_is_noticed():
    forwarder = Forwarder()
    with LoadClients(forwarder, None, np.ones((1, 1), np.float32), 0.1, 2) as callers:
        assert callers.all_go_on(20)
        forwarder.gate.clear()
        before = forwarder.asked
        assert not callers.all_go_on(0.05), "answers to calls from before do not count"
        forwarder.gate.set()
        assert callers.all_go_on(20)
        assert forwarder.asked > before
    assert not callers.failures


def test_what_an_event_did():
    """A call a tenth of a second; nothing for half a second after the event, then half as fast."""
    calls = [(n * 0.1, n * 0.1 + 0.1) for n in range(100)]  # to 10 s
    calls += [(10.0, 10.5)] + [(10.5 + n * 0.2, 10.7 + n * 0.2) for n in range(60)]
    found = effect(calls, 9.0, 10.05, 20.0, 20.0, window_s=0.4)
    assert found.longest_s == pytest.approx(0.5)
    while_back = effect([*calls, (20.5, 21.2), (30.0, 33.0)], 9.0, 10.05, 20.0, 22.0, window_s=0.4)
    assert while_back.longest_s == pytest.approx(0.7)
    assert while_back.recovered_s == found.recovered_s
    assert 0.4 <= found.recovered_s <= 1.0
    assert found.before == pytest.approx([0.1] * 10 + [0.5])
    assert found.during == pytest.approx([0.2] * 48)
    assert effect([], 0.0, 0.0, 3.0, 4.0).recovered_s == 3.0
    assert p99_ms(found.before) == pytest.approx(500.0)
    assert p99_ms([]) == 0.0
