"""The short forms of tests/load/fuzz.py and soak.py: some thousand messages that nobody sends, and controls between;
callers that come and go for some seconds."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from in_process import hosts

from expertd_server.host.host import Host


def load(name: str):
    """A module of this folder that is a program."""
    spec = importlib.util.spec_from_file_location(f"{name}_of_load", Path(__file__).parent / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


@pytest.fixture(scope="module")
def fuzz():
    return load("fuzz")


@pytest.fixture
def host() -> Iterator[Host]:
    with hosts(synthetic="tiny:int4_g128", tcp="on") as serve:
        yield serve()


@pytest.mark.timeout(120)
def test_messages_that_nobody_sends_leave_the_server_as_it_was(fuzz, host):
    said, controls = fuzz.fuzz(host.address, stream=3000, unary=300, seed=7)
    assert controls.wrong == 0, said
    assert controls.count == 12
    assert {"forward", "MALFORMED_MESSAGE", "BAD_SHAPE", "unary OK", "unary MALFORMED_MESSAGE"} <= said.keys()
    assert host.drain(10), "nothing of it is left in flight"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("way", ["tcp", "shm"])
def test_so_do_frames_and_submissions_of_noise(fuzz, host, way):
    said, controls = fuzz.fuzz_beside(host.address, way, 3000, seed=7)
    assert controls.wrong == 0, said
    assert controls.count == 6
    assert said["sessions"] >= 1
    assert way == "shm" or {"ForwardResponseView", "MALFORMED_MESSAGE", "BAD_BYTE_COUNT"} <= said.keys()
    assert host.drain(10), "nothing of it is left in flight"


@pytest.mark.timeout(120)
def test_callers_that_come_and_go(host):
    """For 4 s, and on until each way was used, requests were cancelled, and some had no time."""
    soak, counted = load("soak"), set()
    server = SimpleNamespace(address=host.address, process=SimpleNamespace(poll=lambda: None), memory=lambda: 1)
    with soak.bare_server() as control:
        for _ in range(15):
            seen = soak.soak(server, 4.0, callers=4, control=control)
            assert seen.wrong == []
            assert len(seen.control) > 20
            counted |= seen.counts.keys()
            if {"stream", "shm", "tcp", "unary", "cancelled", "no time"} <= counted:
                break
        else:
            pytest.fail(f"seen in a minute: {counted}")
    assert host.drain(10)


@pytest.mark.parametrize(("machine", "server", "drift"), [(2.0, 2.0, 1.0), (1.0, 3.0, 3.0), (4.0, 2.0, 0.5)])
def test_drift_is_the_servers_and_not_the_machines(machine, server, drift):
    """In the last third times are so many times those of the first, on a bare server beside it and on this one."""
    soak = load("soak")
    seen = soak.Seen()
    for third in range(3):
        for n in range(100):
            at = 100 * third + n
            seen.rss.append((at, 1000))
            seen.control.append((at, 0.001 * (machine if third == 2 else 1)))
            seen.times.append((at, 0.010 * (server if third == 2 else 1)))
    out = soak.report(seen, 300)
    assert out["drift"] == drift
    assert out["p99_ms"] == [10, 10, 10 * server]
