"""`expertctl bench replicas`: what it prints; the figures themselves are the machine's."""

import json

import pytest

from expertd_client.cli import main


@pytest.mark.timeout(60)
def test_rows(capsys):
    assert main(["bench", "replicas", "--calls", "150", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    found = {(row["case"], row["way"]): row for row in rows}
    assert len(found) == 6
    for row in rows:
        assert row["calls"] == 150
        assert 2.0 <= row["p50_ms"] <= row["p99_ms"]
        assert row["extra"] == 0 or row["way"] == "hedged"
        assert row["extra"] <= 0.06
    assert found["slow", "two choices"]["p50_ms"] < found["slow", "in turn"]["p50_ms"]
    assert main(["bench", "replicas", "--calls", "20"]) == 0
    assert "two choices" in capsys.readouterr().out
