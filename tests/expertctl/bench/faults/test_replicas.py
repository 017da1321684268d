"""`expertctl bench replicas`: what it prints; the figures themselves are the machine's."""

import json

import pytest

from expertctl.cli import main


@pytest.mark.timeout(60)
def test_rows(capsys, caplog):
    assert main(["bench", "replicas", "--calls", "150", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len({(row["case"], row["way"]) for row in rows}) == 6
    for row in rows:
        assert row["calls"] == 150
        assert 2.0 <= row["p50_ms"] <= row["p99_ms"]
        assert row["extra"] == 0 or row["way"] != "in turn"
        assert row["extra"] <= 0.1
    assert not caplog.records, "the replicas have the same weights"
    assert main(["bench", "replicas", "--calls", "20"]) == 0
    assert "two choices" in capsys.readouterr().out
