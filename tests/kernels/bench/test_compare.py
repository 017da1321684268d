"""kernels/bench/compare.py: who is ahead at a point, what a table calls a row, what is no layer."""

import pytest

pytest.importorskip("triton")

from compare import Layer, main, markdown, named


def point(backend: str, M: int, us: float | None, error: float = 1e-3) -> dict:
    return {
        "shape": "s", "scheme": "int4_g128", "activations": "none", "backend": backend, "M": M, "us": us,
        "relative_error": error, "tolerance": 1e-2,
    }  # fmt: skip


def test_the_fastest_other_row_over_our_fastest():
    rows = [
        point("gluon_sm90", 1, 10.0), point("triton", 1, 8.0), point("humming", 1, 12.0),
        point("gluon_sm90", 8, 20.0), point("triton", 8, 40.0), point("humming", 8, 15.0),
    ]  # fmt: skip
    said = markdown(rows, {"gpu": "one", "commit": "c"})
    assert "| **ratio** | | **1.50** | **0.75** |" in said
    assert "| s int4_g128 | 1.06 | 0.75 | 2 |" in said
    assert said.startswith("| gpu | commit |")


def test_a_wrong_answer_has_no_time_and_no_ratio():
    said = markdown([point("gluon_sm90", 1, 10.0), point("humming", 1, None, 0.2)], {"gpu": "one"})
    assert "| wrong |" in said
    assert "ratio" not in said


def test_rows_that_wrap_a_package_say_so():
    assert named("gluon_sm90") == "gluon_sm90"
    assert named("humming").startswith("humming-kernels ")
    assert named("humming").endswith("(wrapped)")
    assert named("torch").startswith("torch ")


def test_what_is_no_layer_is_refused(tmp_path, capsys):
    assert Layer.parse("a:b:c") == Layer("a", "b", "c")
    with pytest.raises(ValueError, match="want SHAPE:SCHEME"):
        Layer.parse("qwen3-30b-a3b")
    assert main([str(tmp_path / "o.md"), "--csv", str(tmp_path / "o.csv"), "--layer", "x"]) == 1
    assert "want SHAPE:SCHEME" in capsys.readouterr().err
