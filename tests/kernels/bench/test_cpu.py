"""The CPU benchmark: its names, its arithmetic, and one small run."""

from __future__ import annotations

import json

import pytest

import cpu_table
import peers_cpu
from expertd_kernels import reference, relative_error
from expertd_kernels.bench.__main__ import main
from expertd_kernels.bench.cpu import fraction, shape_of
from expertd_kernels.bench.cpu_memory import UNKNOWN, last_level_cache
from expertd_kernels.bench.points import read_points, write_points
from expertd_kernels.native import library as native
from expertd_kernels.sources.synthetic import random_inputs, random_weights
from peers_cpu import PEERS, peer

built = pytest.mark.skipif(bool(native.kernel_error()), reason=native.kernel_error() or "built")
PEAKS = {"read_gb_s": 20.0, "bf16_gflop_s": 100.0, "int8_gop_s": 400.0, "int16_gop_s": 200.0}


def row(backend, us, *, M=1, gb_s=10.0, gflop_s=20.0):
    return {"shape": "s", "scheme": "int4_g128", "backend": backend, "threads": 1, "M": M, "us": us, "gb_s": gb_s,
            "gflop_s": gflop_s, "roofline_fraction": gb_s / 20.0, "bound": "read", "relative_error": 0.0,
            "read_fraction": gb_s / 20.0, "runs_fraction": gb_s / 16.0, "fastest_us": us, "slowest_us": us,
            "processes": 1}  # fmt: skip


def test_a_slice_has_no_more_routes_than_experts():
    assert (shape_of("qwen3-30b-a3b/1").num_experts, shape_of("qwen3-30b-a3b/1").top_k) == (1, 1)
    assert (shape_of("deepseek-v3/16").num_experts, shape_of("deepseek-v3/16").top_k) == (16, 8)
    for name in ("qwen3-30b-a3b/0", "qwen3-30b-a3b/x", "nobody"):
        with pytest.raises(ValueError, match="want"):
            shape_of(name)


def test_the_last_level_cache_is_the_largest_that_the_system_names(tmp_path):
    assert last_level_cache(tmp_path) == UNKNOWN
    for index, size in enumerate(("48K", "32K", "2048K", "300M")):
        folder = tmp_path / f"cpu/cpu0/cache/index{index}"
        folder.mkdir(parents=True)
        (folder / "size").write_text(size + "\n")
    assert last_level_cache(tmp_path) == 300 << 20


def test_the_ceiling_that_applies_is_the_one_nearer():
    assert fraction("int4_g128", 15.0, 20.0, PEAKS, False) == (0.75, "read")
    assert fraction("int4_g128", 1.0, 100.0, PEAKS, False) == (0.5, "arithmetic")
    assert fraction("int4_g128", 1.0, 100.0, PEAKS, True) == (0.25, "arithmetic")
    assert fraction("bf16", 1.0, 100.0, PEAKS, False) == (1.0, "arithmetic"), "no integers are multiplied"


def test_ratios_are_to_the_fastest_peer_of_each_point():
    rows = [row("cpu", 10), row("cpu_w4a8", 8), row("torch_int4pack", 15), row("ggml", 20), row("torch_bf16", 5),
            row("cpu", 10, M=4), row("ggml", 60, M=4), row("plain_read", 1)]  # fmt: skip
    found = {r["backend"]: r for r in cpu_table.summary(rows)}
    assert found["cpu"]["geometric_mean"] == pytest.approx((1.5 * 6.0) ** 0.5)
    assert found["cpu"]["least"] == pytest.approx(1.5)
    assert found["cpu_w4a8"]["geometric_mean"] == pytest.approx(2.5)
    text = cpu_table.markdown(rows)
    assert "| cpu | 0 % | 0.01 (50 % r, 62 % s) **1.50x** |" in text
    assert "| s | int4_g128 | 1 | cpu | 3.00 | 1.50 |" in text
    assert cpu_table.summary([row("cpu", 10)]) == []


def test_runs_cut_by_scheme_make_one_table(tmp_path):
    files = []
    for i, backend in enumerate(("cpu", "ggml")):
        files.append(tmp_path / f"{i}.csv")
        write_points(files[-1], [row(backend, 10.0 + 5 * i), row("plain_read", 5.0, gb_s=20.0)])
    assert cpu_table.main([str(tmp_path / "out.md"), *map(str, files)]) == 0
    text = (tmp_path / "out.md").read_text()
    assert "**1.50x**" in text
    assert "| s | int4_g128 | 1 | cpu | 1.50 | 1.50 |" in text


TINY = ["--device", "cpu", "--shape", "tiny/1", "--scheme", "int4_g128,int8_g128", "--m", "1,3", "--threads", "1"]


@built
def test_one_small_run_with_a_peer(tmp_path, capsys):
    out, points = tmp_path / "out.json", tmp_path / "out.csv"
    files = ["--json", str(out), "--csv", str(points)]
    more = ["--quick", "--seconds", "0.001", "--clock", "cpu", "--peers", "torch_int4pack"]
    assert peers_cpu.main([*TINY, *more, *files, "--table", str(tmp_path / "table.md")]) == 0
    result = json.loads(out.read_text())
    assert {"read_gb_s", "bf16_gflop_s", "int8_gop_s"} <= set(result["ceilings"])
    assert all(value > 0 for value in result["ceilings"].values())
    facts = {**result["machine"], **result["peaks"]["1"]}
    assert read_points(points) == [{**r, **facts} for r in result["rows"]]
    assert set(result["rows"][0]) == {*row("cpu", 1)}
    assert {(r["scheme"], r["backend"]) for r in result["rows"]} == {
        ("int4_g128", "cpu"), ("int4_g128", "cpu_w4a8"), ("int4_g128", "torch_int4pack"), ("int4_g128", "plain_read"),
        ("int4_g128", "same_runs"), ("int8_g128", "cpu"), ("int8_g128", "plain_read"),
        ("int8_g128", "same_runs")}  # fmt: skip
    assert all(
        0 < r["relative_error"] < 0.05 for r in result["rows"] if r["backend"] not in ("plain_read", "same_runs")
    )
    assert all(r["read_fraction"] > 0 and r["runs_fraction"] > 0 for r in result["rows"])
    assert {r["runs_fraction"] for r in result["rows"] if r["backend"] == "same_runs"} == {1.0}
    assert all(r["roofline_fraction"] > 0 for r in result["rows"])
    assert all(r["roofline_fraction"] == pytest.approx(1) for r in result["rows"] if r["backend"] == "plain_read")
    shown = capsys.readouterr()
    assert shown.err.count("torch_int4pack: torch's int4 operator does not take this scheme") == 1
    for text in ("tiny/1 int4_g128, 1 thread, 1 process", "\nsame_runs", "times as fast as the fastest 4-bit peer"):
        assert text in shown.out
    assert max(map(len, shown.out[shown.out.index("tiny/1 int4") :].splitlines())) <= 80
    assert cpu_table.main([str(tmp_path / "out.md"), str(points)]) == 0
    assert "## tiny/1, int4_g128, 1 thread" in (tmp_path / "out.md").read_text()
    assert (tmp_path / "table.md").read_text() == (tmp_path / "out.md").read_text()


@built
def test_the_bench_alone_times_ours_and_refuses_a_clock_that_sees_one_thread(capsys):
    assert main([*TINY, "--seconds", "0.001", "--processes", "2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {r["backend"] for r in rows} == {"cpu", "cpu_w4a8", "plain_read", "same_runs"}
    assert all(r["processes"] == 2 and r["fastest_us"] <= r["us"] <= r["slowest_us"] for r in rows)
    assert main(["--device", "cpu", "--shape", "tiny/1", "--clock", "cpu", "--threads", "2"]) == 1


def test_an_unknown_peer_is_named(capsys):
    assert peers_cpu.main(["--device", "cpu", "--shape", "tiny/1", "--peers", "nobody"]) == 1
    assert "peers nobody: want --device cpu, and of torch_int4pack" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(PEERS))
def test_peers_compute_the_layer(name):
    weights = random_weights("int4_g64", 6, 128, 64)
    call = peer(name, weights, 2, 1)
    if isinstance(call, str):
        pytest.skip(f"{name}: {call}")
    inputs = random_inputs(5, 128, 6, 2)
    assert relative_error(call(*inputs), reference(weights, *inputs)) < 0.03
