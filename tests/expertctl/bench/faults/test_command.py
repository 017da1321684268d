"""What `expertctl bench faults` prints, without servers; tests/faults runs it with some."""

import json

import pytest

from expertctl.bench.faults import command, processes
from expertctl.bench.faults.failures import Failures
from expertctl.bench.faults.run import FAULTS, FaultMeasurement
from expertctl.cli import main
from expertd.errors import UnavailableError


@pytest.fixture
def asked(monkeypatch):
    """What the command asked for; each fault fails as many calls as `failed` says."""
    found = {"failed": 0}

    def run(faults, events, threads, tokens, away_s):
        found.update(faults=tuple(faults), events=events, threads=threads, tokens=tokens, away_s=away_s)
        for fault in faults:
            failures = Failures()
            failures.happened(f"{fault} begins")
            for _ in range(found["failed"]):
                failures.failed(0.0, UnavailableError("gone"))
            yield FaultMeasurement(fault, events, 1234, found["failed"], 56.7, 0.89, 4.5, 6.25), failures

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
    assert shown.count("UnavailableError: gone") == 2 * len(usual)
    assert "before: cut begins" in shown


def test_failed_calls_in_json(asked, capsys):
    asked["failed"] = 1
    assert main(["bench", "faults", "--fault", "kill", "--json"]) == 1
    (failure,) = json.loads(capsys.readouterr().out)["failures"]["kill"]
    assert failure["why"] == "UnavailableError: gone"
    assert failure["before"][0][1] == "kill begins"


def test_what_was_measured_is_shown_where_a_server_does_not_start(asked, monkeypatch, capsys):
    whole = command.run

    def run(*plan):
        yield next(whole(*plan))
        raise UnavailableError("server: it does not serve")

    monkeypatch.setattr(command, "run", run)
    assert main(["bench", "faults", "--fault", "kill,cut"]) == 1
    shown = capsys.readouterr().out
    assert "1,234" in shown
    assert shown.endswith("ended early: UNAVAILABLE: server: it does not serve\n")
    assert main(["bench", "faults", "--fault", "kill,cut", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (len(found["rows"]), found["ended_early"]) == (1, "UNAVAILABLE: server: it does not serve")


def test_a_server_that_takes_too_long_is_named(monkeypatch):
    monkeypatch.setattr(processes, "BOOT_S", 0.01)
    server = processes.ServerProcess([])
    with pytest.raises(UnavailableError, match=r"got no 'serving on' within 0\.01 s, want one; its log: nothing"):
        server.ready()


def test_a_wrong_fault(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "faults", "--fault", "kill,flood"])
    assert "got 'flood', want some of kill" in capsys.readouterr().err
