"""The Markdown of GPU points: which peer a point is compared with, geometric means, what the committed peers say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cuda_table import best_peer, main, markdown, read_peers, summary

RESULTS = Path(__file__).parents[3] / "kernels/bench/results"
COMMITTED = RESULTS / "peers_h200.csv"
HEAD = "shape,scheme,implementation,M,us,relative_error,wrong\n"


def row(us: float | None = 10.0, M: int = 8, **more: Any) -> dict[str, Any]:
    return {
        "shape": "a", "scheme": "e4m3_block128", "backend": "ours", "routing": "uniform", "M": M, "us": us,
        "roofline_fraction": 0.5, "relative_error": 3e-3, "activations": "none", **more,
    }  # fmt: skip


@pytest.fixture
def peers(tmp_path: Path) -> Any:
    points = ["a,exact,8,20.0,0.005,0", "a,rounds,8,5.0,0.044,0", "a,bad,8,1.0,0.005,1", "a,exact,32,80.0,0.005,0"]
    points.append("b,exact,8,10.0,0.005,0")
    (tmp_path / "p.csv").write_text(HEAD + "".join(f"{p[:2]}e4m3_block128,{p[2:]}\n" for p in points))
    return read_peers(tmp_path / "p.csv")


def test_a_weight_only_row_is_compared_with_weight_only_rows(peers: Any) -> None:
    found = best_peer(row(), peers)
    assert found is not None
    assert (found.implementation, found.us) == ("exact", 20.0)


def test_a_row_that_rounds_activations_is_compared_with_all_that_are_right(peers: Any) -> None:
    found = best_peer(row(activations="e4m3_group128"), peers)
    assert found is not None
    assert (found.implementation, found.us) == ("rounds", 5.0)


def test_other_routing_and_unknown_points_have_no_peer(peers: Any) -> None:
    assert best_peer(row(routing="zipf"), peers) is None
    assert best_peer(row(M=9), peers) is None


def test_means_and_least_of_a_layer_and_of_all(peers: Any) -> None:
    lines = summary([row(), row(M=32), row(shape="b"), row(us=None)], peers)
    assert [(shape, round(mean, 3), least, n) for _, shape, _, _, mean, least, n in lines] == [
        ("a", 4.0, 2.0, 2),
        ("all", 2.52, 1.0, 3),
        ("b", 1.0, 1.0, 1),
    ]
    assert [line[1] for line in summary([row(), row(M=32)], peers)] == ["a"]  # "all" would say the same


def test_markdown_shows_each_point_losses_too(peers: Any) -> None:
    machine = {"gpu": "g", "read_gb_s": 4700.0}
    rows = [row(**machine), row(M=32, us=160.0, **machine), row(shape="c", us=None, relative_error=None, **machine)]
    text = markdown(rows, peers)
    assert "| gpu | read_gb_s |\n|---|---|\n| g | 4700 |\n" in text
    assert "| a e4m3_block128 | 3.0e-03 | 10.0 50 % **2.00** | 160 50 % **0.50** |" in text
    assert "| c e4m3_block128 | not finite | no time | - |" in text


@pytest.mark.parametrize("name", ["gluon_sm90_h200", "w8a8_h200"])
def test_the_committed_tables_are_what_the_committed_points_say(name: str, tmp_path: Path) -> None:
    assert main([str(tmp_path / "o.md"), str(RESULTS / f"{name}.csv"), "--against", str(COMMITTED)]) == 0
    assert (tmp_path / "o.md").read_text() in (RESULTS / f"{name}.md").read_text()


def test_a_file_of_another_form_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "o.md"), str(COMMITTED)]) == 1
    assert "want points of the bench" in capsys.readouterr().err


def test_the_committed_points_cover_the_layers_of_the_suite() -> None:
    peers = read_peers(COMMITTED)
    layers = {(shape, scheme) for shape, scheme, _ in peers}
    assert len(layers) == 16
    assert all((s, q, M) in peers for s, q in layers for M in (1, 8, 32, 128, 512, 2048, 8192))
    assert min(p.us for p in peers["qwen3-30b-a3b", "int4_g128", 8]) == 62.7
    assert not any(p.implementation == "Humming 0.1.10 grouped" for points in peers.values() for p in points)
