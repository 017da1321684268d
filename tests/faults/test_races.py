"""The short form of `python tests/faults/races`: no call fails under any of these schedules, and planted faults are
found."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

RACES = Path(__file__).parent / "races"


def explored(*options):
    return subprocess.run([sys.executable, RACES, *options], capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_schedule_fails_a_call():
    done = explored("--schedules", "40")
    assert done.returncode == 0, done.stdout + done.stderr
    (schedules, kills, calls) = (
        int(n.replace(",", "")) for n in re.findall(r"([\d,]+) (?:schedules|kills|calls)", done.stdout)
    )
    assert schedules == 40
    assert kills > 200
    assert calls > 2000


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("fault", "noticed"),
    [
        ("forgets-why", "RequestCancelledError: session: closed by this client"),
        ("counts-twice", "a call failed: AssertionError"),
    ],
)
def test_a_planted_fault_is_found(fault, noticed):
    done = explored("--plant", fault, "--schedules", "600", "--most", "1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert noticed in done.stdout
