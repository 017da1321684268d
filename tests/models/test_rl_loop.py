"""examples/rl_loop.py as people run it, in short: a trainer, rollouts, two `expertd serve`, one of them killed."""

from __future__ import annotations

import re

import pytest
import rl_loop

pytestmark = pytest.mark.timeout(900)
SHORT = ["--steps", "2", "--episodes", "2", "--tokens", "8"]


def test_every_version_says_what_the_local_model_says(capsys):
    assert rl_loop.main(SHORT) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "again" in said, "no server was killed in the middle of an update"
    found = re.search(
        r"tokens of (\d+) of (\d+) versions equal .*\((\d+) are different ones\); (\d+) calls, (\d+) failed, (\d+)",
        said,
    )
    equal, versions, different, calls, failed, wrong = map(int, found.groups())
    assert (equal, versions, failed, wrong) == (3, 3, 0, 0)
    assert different > 1
    assert calls > 3 * 8 * 4


def test_a_difference_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(rl_loop, "expected", lambda *_: [1])
    assert rl_loop.main([*SHORT[:1], "1", *SHORT[2:], "--no-kill"]) == 1
    assert "tokens of 0 of 2 versions" in " ".join(capsys.readouterr().out.split())
