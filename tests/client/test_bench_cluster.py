"""`expertctl bench cluster`: rows that say what they measured, and calls that reach every server."""

import json

import pytest

from expertd_client import bench_cluster
from expertd_client.cli import main


def test_rows():
    row = bench_cluster.measure(4, 64, 8, 3, rounds=5)
    assert (row.tokens, row.hidden_size, row.top_k, row.servers) == (4, 64, 8, 3)
    assert row.bytes % (2 * 2 * 64) == 0
    assert 2 * 4 <= row.bytes // (2 * 64) <= 2 * 3 * 4, "each token at one to three servers, there and back"
    assert min(row.split_us, row.join_us, row.copy_us) > 0
    assert row.ratio == pytest.approx((row.split_us + row.join_us) / row.copy_us)
    assert row.call_us > row.split_us + row.join_us
    one = bench_cluster.measure_one(4, 64, 8, rounds=20)
    assert one.cluster_us > one.client_us > 0


def test_command(monkeypatch, capsys):
    monkeypatch.setattr(bench_cluster, "SIZES", ((1, 64), (2, 32)))
    assert main(["bench", "cluster", "--rounds", "2", "--servers", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["tokens"] for row in found["rows"]] == [1, 2]
    assert [one["hidden_size"] for one in found["one"]] == [64, 32]
    assert main(["bench", "cluster", "--rounds", "2", "--servers", "2", "--profile"]) == 0
    shown = capsys.readouterr().out
    assert "(split + join) / copy" in shown
    assert "flight.py" in shown
