"""kernels/bench/against.py: two trees at the same points, in turns; what is slower, wrong or ends."""

import csv
import json
import sys
from pathlib import Path

import pytest

import against
from against import Layer, main, parse_layer, ratios
from trees import Process

ROOT = Path(__file__).resolve().parents[3]

SIDE = """
import json, sys
us, error, log = float(sys.argv[1]), float(sys.argv[2]), open(sys.argv[3], "a")
for line in sys.stdin:
    asked = json.loads(line)
    do = asked["do"]
    log.write(f"{sys.argv[4]} {do}\\n"); log.flush()
    if do == "point" and asked["M"] == 666:
        sys.exit(3)
    if do == "point" and asked["M"] == 13:
        answer = {"fault": "ValueError: no thirteen"}
    else:
        answer = {
            "machine": {"gpu": "none", "commit": sys.argv[4]},
            "layer": {"backend": "cpu", "tolerance": 0.01},
            "warm": {}, "point": {"error": error}, "time": {"us": [us, us * 1.01, us * 5.0, us]},
        }[do]
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """main() over two made-up trees, each (microseconds, error) -> exit code; run.log: what was asked."""
    (tmp_path / "side.py").write_text(SIDE)
    log = tmp_path / "log"

    def run(old, new, *more):
        figures = {"old": old, "new": new}

        def tree(name, root, commit):
            us, error = figures[name]
            return lambda: Process(
                name, [sys.executable, str(tmp_path / "side.py"), str(us), str(error), str(log), name]
            )

        monkeypatch.setattr(against, "tree", tree)
        log.write_text("")
        return main([str(tmp_path), "--layer", "s:int4_g128", "--m", "1,8", "--rounds", "4", *more])

    run.log = log
    return run


def test_a_faster_tree_passes_and_a_slower_one_does_not(planted, capsys):
    assert planted((100.0, 1e-3), (99.0, 2e-3)) == 0
    said = capsys.readouterr().out
    assert "| s int4_g128 | `cpu` | 99.5 (0.990) | 99.5 (0.990) | 0.990 |" in said
    assert "2 points, 0 above 1.02" in said
    assert "largest relative error 2.0e-03" in said
    assert planted((100.0, 1e-3), (103.0, 1e-3)) == 1
    assert "Above: s int4_g128 cpu M=8: 100.5 -> 103.5 us, 1.030" in capsys.readouterr().out
    assert planted((100.0, 1e-3), (103.0, 1e-3), "--slower", "1.05") == 0


def test_a_point_above_the_limit_is_measured_again(planted):
    planted((100.0, 1e-3), (101.0, 1e-3))
    assert planted.log.read_text().count("time") == 2 * 2 * 4
    planted((100.0, 1e-3), (103.0, 1e-3))
    assert planted.log.read_text().count("time") == 2 * 2 * (4 + 3 * 4)


def test_rounds_begin_with_the_other_tree_in_turn(planted):
    planted((100.0, 1e-3), (100.0, 1e-3), "--m", "1")
    who = [line.split()[0] for line in planted.log.read_text().splitlines() if line.endswith("time")]
    assert who == ["old", "new", "new", "old"] * 2


@pytest.mark.parametrize("side", [0, 1])
def test_a_wrong_answer_on_either_side_fails(planted, capsys, side):
    errors = [1e-3, 1e-3]
    errors[side] = 0.02
    assert planted((100.0, errors[0]), (90.0, errors[1])) == 1
    assert "WRONG: errors" in capsys.readouterr().err


def test_a_side_that_ends_or_refuses_costs_its_layer_only(planted, capsys):
    assert planted((100.0, 1e-3), (90.0, 1e-3), "--m", "1,13", "--layer", "t:int4_g128") == 1
    said = capsys.readouterr()
    assert "ValueError: no thirteen" in said.err
    assert planted((100.0, 1e-3), (90.0, 1e-3), "--m", "666") == 1
    assert "its process ended at point {'M': 666}, exit code 3" in capsys.readouterr().err


def test_what_is_compiled_first_is_each_layer_of_each_tree(planted):
    assert planted((100.0, 1e-3), (90.0, 1e-3), "--jobs", "2") == 0
    asked = planted.log.read_text().splitlines()
    assert asked.count("old warm") == asked.count("new warm") == 2 + 1, (
        "two halves of the sizes, then the timed process"
    )


def test_ratios_are_of_rounds_not_of_all():
    old = [[10.0], [20.0], [40.0]]  # a clock that falls
    new = [[9.0], [18.0], [44.0]]
    assert ratios(old, new) == pytest.approx((0.9, 0.9, 1.0))
    assert ratios([[10.0]], [[11.0]]) == pytest.approx((1.1, 1.1, 1.1))


def test_layers_by_name():
    assert parse_layer("a:b") == Layer("a", "b")
    assert parse_layer("a:b:c@d") == Layer("a", "b", "c", "d")
    for text in ("a", "a:", ":b", "a:b:c:d"):
        with pytest.raises(ValueError, match="want SHAPE:SCHEME"):
            parse_layer(text)


def test_a_folder_that_is_no_tree(tmp_path, capsys):
    assert main([str(tmp_path), "--layer", "a:b"]) == 1
    assert "want a tree with kernels/expertd_kernels/bench in it" in capsys.readouterr().err


@pytest.mark.timeout(120)  # two processes that import torch and pack a layer
def test_this_tree_against_itself_on_the_cpu(tmp_path, capsys):
    file = tmp_path / "points.csv"
    argv = [str(ROOT), "--layer", "tiny:int4_g128", "--m", "1,4", "--rounds", "2", "--seconds", "0.001"]
    assert main([*argv, "--slower", "100", "--commits", "abc,def", "--csv", str(file)]) == 0
    with file.open(newline="") as f:
        points = list(csv.DictReader(f))
    assert [p["M"] for p in points] == ["1", "4"]
    for p in points:
        assert (p["backend"], p["old_error"]) == ("cpu", p["new_error"])
        assert 0 < float(p["old_error"]) < 1e-2
        assert float(p["old_us"]) > 0
        assert float(p["new_us"]) > 0
    assert json.loads(capsys.readouterr().out.splitlines()[0].removeprefix("old: "))["cpu"]
