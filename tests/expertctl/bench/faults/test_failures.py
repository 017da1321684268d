"""What a benchmark keeps of calls that failed."""

from __future__ import annotations

import time

import numpy as np

from expertctl.bench.faults.failures import Failures
from expertctl.bench.faults.load import LoadClients
from expertd.errors import UnavailableError
from expertd_client.requests.request import Request


def test_the_first_ones_are_kept_with_reason_place_and_what_happened_before():
    failures, begin_s = Failures(most=2), time.monotonic()
    failures.happened("kill of a begins")
    try:
        raise UnavailableError("gone")
    except UnavailableError as error:
        failures.failed(begin_s, error)
    failures.failed(begin_s, "wrong: 3.0e-01 away", "moving")
    failures.failed(begin_s, "another")
    assert len(failures) == 3
    first, second = failures.first
    assert first.why == "UnavailableError: gone"
    assert first.where[0].startswith("test_failures.py:")
    assert [what for _, what in first.before] == ["kill of a begins"]
    assert first.took_s >= 0
    assert (second.why, second.where) == ("wrong: 3.0e-01 away", ())
    assert failures.about == ["", "moving", ""]
    shown = next(iter(failures))
    assert "kill of a begins" in shown
    assert "raised at test_failures.py" in shown


class Breaks:
    """A forwarder whose third call fails."""

    def __init__(self):
        self.calls = 0

    def forward_request(self, request):
        self.calls += 1
        if self.calls == 3:
            raise UnavailableError("the third")
        return type("Answer", (), {"output": request.hidden_states})


def test_callers_keep_them():
    x = np.ones((1, 4), np.float32)
    request = Request(0, x, np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32))
    with LoadClients(Breaks(), request, x, 1e-3, 1) as callers:
        callers.wait(5, 20.0)
    assert [failure.why for failure in callers.failures.first] == ["UnavailableError: the third"]
