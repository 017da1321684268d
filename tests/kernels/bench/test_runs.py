"""kernels/bench/runs.py: ratios of two results, the least of several runs, what fails."""

import json

import pytest

from expertd_kernels.bench.points import write_points
from runs import main


@pytest.fixture
def result(tmp_path):
    def write(name, **times):
        rows = [
            {"shape": "s", "scheme": "int4_g128", "backend": b, "routing": "uniform", "M": m, "us": us, "gb_s": 1.0}
            for b, points in times.items()
            for m, us in points.items()
        ]
        file = tmp_path / f"{name}.csv"
        write_points(file, rows)
        return str(file)

    return write


def test_ratios_by_point_and_by_group(result, capsys):
    old = result("old", triton={1: 10.0, 8: 20.0}, gluon={1: 5.0})
    new = result("new", triton={1: 5.0, 8: 40.0}, gluon={1: 4.0}, more={1: 1.0})
    assert main([old, new]) == 0
    said = capsys.readouterr().out
    assert "s int4_g128 triton uniform M=8" in said
    assert "2.000" in said
    assert "s int4_g128 triton uniform: 1.000 of the old time over 2 points, worst 2.000" in said
    assert "s int4_g128 gluon uniform: 0.800 of the old time over 1 points" in said
    assert "only in new: s int4_g128 more uniform M=1" in said


def test_a_group_that_is_slower_is_an_exit_code(result, capsys):
    old, new = result("old", triton={1: 10.0}), result("new", triton={1: 10.8})
    assert main([old, new]) == 1
    assert "slower: s int4_g128 triton uniform" in capsys.readouterr().err
    assert main([old, new, "--slower", "1.1"]) == 0


def test_of_several_runs_the_least_time_counts(result):
    old = [result(f"old{i}", triton={1: us}) for i, us in enumerate((10.0, 14.0))]
    new = [result(f"new{i}", triton={1: us}) for i, us in enumerate((20.0, 10.2))]
    assert main([",".join(old), ",".join(new)]) == 0
    assert main([old[0], new[0]]) == 1


def test_points_without_a_time_and_files_that_are_none(result, tmp_path, capsys):
    old, new = result("old", triton={1: 10.0, 8: None}), result("new", triton={8: 10.0})
    assert main([old, new]) == 1, "there is nothing to compare"
    for name, text in (("other.json", "[]"), ("other.csv", "a,b\n1,2\n")):
        other = tmp_path / name
        other.write_text(text)
        assert main([str(other), new]) == 1
        assert "want a result of the bench" in capsys.readouterr().err
    assert main([str(tmp_path / "none.json"), new]) == 1


def test_both_forms_in_which_the_bench_writes_are_read(result, tmp_path, capsys):
    rows = [{"shape": "s", "scheme": "int4_g128", "backend": "triton", "routing": "uniform", "M": 1, "us": 20.0}]
    (tmp_path / "new.json").write_text(json.dumps({"machine": {}, "rows": rows}))
    assert main([result("old", triton={1: 10.0}), str(tmp_path / "new.json")]) == 1
    assert "s int4_g128 triton uniform: 2.000 of the old time over 1 points" in capsys.readouterr().out
