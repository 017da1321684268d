"""A server in a process that somebody else watches: it says where it stands, and raises nothing."""

from __future__ import annotations

import gc
import sys
import time

import numpy as np
import pytest

from expertd.errors import DrainingError, UnavailableError
from expertd_client import ExpertClient
from expertd_server.commands.hosted import Hosted
from expertd_server.config import logs

TINY = ["--synthetic", "tiny:int4_g128", "--layers", "0", "--device", "cpu", "--threads", "1"]
HERE = ["--listen", "127.0.0.1:0"]


@pytest.fixture
def made(monkeypatch):
    """Makes some, and ends them; what a process is set to by one is set back."""
    monkeypatch.setattr(logs, "configure", lambda level, form: None)  # of the process: pytest has its own
    all_of_them, interval_s = [], sys.getswitchinterval()

    def make(*argv) -> Hosted:
        all_of_them.append(Hosted(argv))
        return all_of_them[-1]

    yield make
    for hosted in all_of_them:
        hosted.close()
    sys.setswitchinterval(interval_s)
    gc.unfreeze()


def wait_for(hosted: Hosted, phase: str) -> dict:
    end_s = time.monotonic() + 30
    while (state := hosted.state())["phase"] == "loading" and time.monotonic() < end_s:
        time.sleep(0.01)
    assert state["phase"] == phase, state
    return state


def test_it_serves_and_drains(made):
    hosted = made(*TINY, *HERE, "--metrics-listen", "127.0.0.1:0")
    state = wait_for(hosted, "serving")
    assert state["address"].startswith("127.0.0.1:")
    assert state["metrics"].startswith("127.0.0.1:")
    assert state["metrics"] != state["address"]
    with ExpertClient(state["address"], timeout_s=10) as client:
        rows, weights = np.ones((2, 256), np.float32), np.ones((2, 2), np.float32)
        ids = np.array([[0, 1], [2, 3]], np.int32)
        assert client.forward(0, rows, ids, weights).routes_computed == 4
        assert hosted.drain(5.0)
        assert hosted.state()["phase"] == "drained"
        with pytest.raises((DrainingError, UnavailableError)):
            client.forward(0, rows, ids, weights)


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        ([*TINY, *HERE, "--max-tokens", "none"], "--max-tokens: got 'none'"),
        ([*TINY, *HERE, "--max-token", "4"], "unknown option --max-token; the nearest is --max-tokens"),
        ([*TINY, "--listen", "0.0.0.0:0"], "--listen 0.0.0.0:0: everybody who can reach it"),
        ([*HERE, "--checkpoint", "/there/is/none"], "/there/is/none"),
        ([*TINY, *HERE, "--memory-limit", "1KiB"], "memory"),
    ],
)
def test_what_keeps_it_from_serving_is_a_sentence(made, argv, why):
    state = wait_for(made(*argv), "failed")
    assert why in state["why"]
    assert state["address"] == ""


def test_a_server_that_loses_its_device_has_failed(made):
    hosted = made(*TINY, *HERE)
    wait_for(hosted, "serving")
    hosted._host._faulted("cuda:0 is lost")
    assert hosted.state()["phase"] == "failed"
    assert hosted.state()["why"] == "cuda:0 is lost"
    assert hosted.state()["address"] == "", "nobody is sent there"
