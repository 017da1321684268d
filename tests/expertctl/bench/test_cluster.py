"""`expertctl bench cluster`: rows that say what they measured, and calls of real servers, over what users get."""

import json

import pytest

from expertctl.bench import cluster as bench_cluster
from expertctl.cli import main
from expertd.shm.region import supported
from expertd_client.tracing import recorder


def test_rows():
    row = bench_cluster.measure(4, 64, 8, 3, rounds=5)
    assert (row.tokens, row.hidden_size, row.top_k, row.servers) == (4, 64, 8, 3)
    assert row.bytes % (2 * 2 * 64) == 0
    assert 2 * 4 <= row.bytes // (2 * 64) <= 2 * 3 * 4, "each token at one to three servers, there and back"
    assert min(row.split_us, row.join_us, row.copy_us) > 0
    assert row.ratio == pytest.approx((row.split_us + row.join_us) / row.copy_us)


@pytest.mark.timeout(120)  # three echo servers start, one after another
def test_command(monkeypatch, capsys, caplog):
    monkeypatch.setattr(bench_cluster, "SIZES", ((1, 64), (2, 32)))
    monkeypatch.setattr(bench_cluster, "CALLS_HIDDEN", 64)
    monkeypatch.setattr(bench_cluster, "CALLS_TOKENS", (2, 5))
    run = main(["bench", "cluster", "--rounds", "2", "--servers", "2", "--json"])
    assert run == 0
    assert not caplog.records, "the echo servers have the same weights"
    found = json.loads(capsys.readouterr().out)
    assert [row["tokens"] for row in found["rows"]] == [1, 2]
    assert [(one["tokens"], one["hidden_size"]) for one in found["one"]] == [(2, 64), (5, 64)]
    assert {one["transport"] for one in found["one"]} == {"inline" if supported() else "shm"}
    assert all(one["cluster_us"] > 0 < one["client_us"] for one in found["one"])
    assert [(own["tokens"], own["servers"]) for own in found["own"]] == [(2, 2), (5, 2)]
    assert all(own["before_us"] > 0 < own["after_us"] for own in found["own"])


def test_tables_where_there_is_no_server(monkeypatch, capsys):
    monkeypatch.setattr(bench_cluster, "SIZES", ((1, 64),))
    monkeypatch.setattr(bench_cluster, "no_echo", lambda: "it is not there")
    assert main(["bench", "cluster", "--rounds", "2", "--servers", "2"]) == 0
    shown = capsys.readouterr().out
    assert "(split + join) / copy" in shown
    assert "calls were not measured: it is not there" in shown
    assert "ExpertClient" not in shown


def test_tables_of_calls(capsys):
    one, own = bench_cluster.One(8, 2048, "shm", 41.2, 55.9), bench_cluster.Own(8, 2048, 3, 70.4, 30.2, 0.25, 90.4)
    never = bench_cluster.Own(128, 2048, 3, 300.0, 100.0, 0.0, 0.0)
    bench_cluster._show([bench_cluster.ClusterMeasurement(8, 2048, 8, 3, 1, 1.0, 1.0, 1.0, 2.0)], [one], [own, never])
    shown = capsys.readouterr().out
    assert "a call to one server in microseconds: H 2048, shm" in shown
    assert ["8", "41", "56", "15"] in [line.replace("│", " ").split() for line in shown.splitlines()]
    rows = [line.replace("│", " ").split() for line in shown.splitlines()]
    assert ["8", "70", "30", "101", "90", "25%"] in rows
    assert ["128", "300", "100", "400", "-", "0%"] in rows


def test_calls_in_which_the_core_was_lost_are_left_out(monkeypatch):
    """Of four calls the second and third: both took twice as long."""

    class Cluster:
        servers = ("a", "b")

        def forward_request(self, request):
            if recorder.active is not None:
                call = recorder.active.call(request)
                slow = len(recorder.active.calls) in (2, 3)
                call.begin_ns, call.joined_ns, call.end_ns = 1000, 60_000, 70_000 + 10_000 * slow
                call.part("a", 1).sent_ns = 1000 + 20_000 * (1 + slow)

    lost = iter((5, 5, 6, 8, 8))
    monkeypatch.setattr(bench_cluster, "_cores_lost", lambda: next(lost))
    own = bench_cluster.measure_own(Cluster(), bench_cluster._request(3, 64, 2), 4)
    assert (own.before_us, own.after_us, own.kept, own.kept_us) == (30.0, 15.0, 0.5, 30.0)
