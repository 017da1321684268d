"""Tests that failed are run again alone, where they are few, and named; those that fail twice stay failures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

AGAIN = Path(__file__).with_name("again.py")
TESTS = """
import pathlib
def test_good(): pass
def test_clock():
    seen = pathlib.Path("seen")
    first, _ = not seen.exists(), seen.touch()
    assert not first
def test_bad(): assert False
def test_worse(): assert False
def test_worst(): assert False
"""


@pytest.fixture(autouse=True)
def plain_pytest(monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take a second of each start
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)


def again(folder, status):
    return subprocess.run([sys.executable, AGAIN, str(status)], cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("select", "status", "alone"),
    [
        ("good", 0, False),
        ("good or clock", 0, True),
        ("good or bad", 1, True),
        ("bad or clock", 1, True),
        ("bad or clock or worse or worst", 1, False),  # four: not a matter of clocks any more
    ],
)
def test_who_passes_alone_is_named_and_who_fails_alone_fails(tmp_path, select, status, alone):
    (tmp_path / "test_some.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", ".", "--cache-clear", "-k", select]
    first = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    done = again(tmp_path, first.returncode)
    assert done.returncode == status, done.stdout
    assert ("once more, alone" in done.stdout) == alone
    named = "FAILED BESIDE OTHERS, passed alone (mend the test): test_some.py::test_clock" in done.stdout
    assert named == (select == "good or clock")


@pytest.mark.parametrize("status", [1, 2, 5])
def test_a_run_that_was_cut_or_could_not_begin_stays_so(tmp_path, status):
    (tmp_path / ".pytest_cache/v/cache").mkdir(parents=True)
    (tmp_path / ".pytest_cache/v/cache/lastfailed").write_text('{"test_some.py": true}')
    done = again(tmp_path, status)
    assert (done.returncode, done.stdout) == (status, "")
