"""`bench compare`: ratios of two results, the least of several runs, what fails."""

import json

import pytest

from expertd_kernels.bench.__main__ import main


@pytest.fixture
def result(tmp_path):
    def write(name, **times):
        rows = [
            {"shape": "s", "scheme": "int4_g128", "backend": b, "routing": "uniform", "M": m, "us": us, "gb_s": 1.0}
            for b, points in times.items()
            for m, us in points.items()
        ]
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps({"machine": {}, "rows": rows}))
        return str(file)

    return write


def test_ratios_by_point_and_by_group(result, capsys):
    old = result("old", triton={1: 10.0, 8: 20.0}, gluon={1: 5.0})
    new = result("new", triton={1: 5.0, 8: 40.0}, gluon={1: 4.0}, more={1: 1.0})
    assert main(["compare", old, new]) == 0
    said = capsys.readouterr().out
    assert "s int4_g128 triton uniform M=8" in said
    assert "2.000" in said
    assert "s int4_g128 triton uniform: 1.000 of the old time over 2 points, worst 2.000" in said
    assert "s int4_g128 gluon uniform: 0.800 of the old time over 1 points" in said
    assert "only in new: s int4_g128 more uniform M=1" in said


def test_a_group_that_is_slower_is_an_exit_code(result, capsys):
    old, new = result("old", triton={1: 10.0}), result("new", triton={1: 10.8})
    assert main(["compare", old, new]) == 1
    assert "slower: s int4_g128 triton uniform" in capsys.readouterr().err
    assert main(["compare", old, new, "--slower", "1.1"]) == 0


def test_of_several_runs_the_least_time_counts(result):
    old = [result(f"old{i}", triton={1: us}) for i, us in enumerate((10.0, 14.0))]
    new = [result(f"new{i}", triton={1: us}) for i, us in enumerate((20.0, 10.2))]
    assert main(["compare", ",".join(old), ",".join(new)]) == 0
    assert main(["compare", old[0], new[0]]) == 1


def test_points_without_a_time_and_files_that_are_none(result, tmp_path, capsys):
    old, new = result("old", triton={1: 10.0, 8: None}), result("new", triton={8: 10.0})
    assert main(["compare", old, new]) == 1, "there is nothing to compare"
    other = tmp_path / "other.json"
    other.write_text("[]")
    assert main(["compare", str(other), new]) == 1
    assert "want a result of the bench" in capsys.readouterr().err
    assert main(["compare", str(tmp_path / "none.json"), new]) == 1
