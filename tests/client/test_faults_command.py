"""What `expertctl bench faults` prints, without servers; tests/faults runs it with some."""

import json

import pytest

from expertd_client.cli import main
from expertd_client.faults import command
from expertd_client.faults.run import FAULTS, Row


@pytest.fixture
def asked(monkeypatch):
    """What the command asked for; each fault fails as many calls as `failed` says."""
    found = {"failed": 0}

    def run(faults, events, threads, tokens, away_s):
        found.update(faults=tuple(faults), events=events, threads=threads, tokens=tokens, away_s=away_s)
        for fault in faults:
            yield (
                Row(fault, events, 1234, found["failed"], 56.7, 0.89, 4.5, 6.25),
                ["UnavailableError: gone"] * found["failed"],
            )

    monkeypatch.setattr(command, "run", run)
    return found


def test_json(asked, capsys):
    assert main(["bench", "faults", "--fault", "kill,cut", "--events", "3", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    keys = ("fault", "events", "calls", "failed", "longest_ms", "recovered_s", "quiet_p99_ms", "p99_ms")
    assert rows == [
        dict(zip(keys, (fault, 3, 1234, 0, 56.7, 0.89, 4.5, 6.25), strict=True)) for fault in ("kill", "cut")
    ]


def test_table_and_failed_calls(asked, capsys):
    asked["failed"] = 2
    assert main(["bench", "faults"]) == 1
    usual = tuple(name for name in FAULTS if name != "partition")
    assert (asked["faults"], asked["events"]) == (usual, 20)
    shown = capsys.readouterr().out
    assert "1,234" in shown
    assert f"{2 * len(usual)} calls: UnavailableError: gone" in shown


def test_a_wrong_fault(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "faults", "--fault", "kill,flood"])
    assert "got 'flood', want some of kill" in capsys.readouterr().err
