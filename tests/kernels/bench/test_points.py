"""Points of a bench in a CSV file: what was written is read back, and what is no such file is told."""

import pytest

from expertd_kernels.bench.points import read_points, write_points

POINT = {
    "shape": "tiny", "scheme": "int4_g128", "backend": "cpu", "routing": "uniform", "threads": 2, "M": 8, "us": 10.25,
    "roofline_fraction": 0.5, "bound": "read", "relative_error": None, "gpu": "G", "commit": "12345e6", "torch": "2.11",
    "read_gb_s": 20.0, "int8_gop_s": 400.0,
}  # fmt: skip


def test_what_was_written_is_read_back_and_a_commit_of_digits_is_no_number(tmp_path):
    lines = [POINT, {**POINT, "us": None, "M": 16}]
    write_points(tmp_path / "p.csv", lines)
    assert read_points(tmp_path / "p.csv") == lines


def test_files_put_one_behind_the_other_lose_nothing(tmp_path):
    write_points(tmp_path / "p.csv", [POINT])
    write_points(tmp_path / "q.csv", [{**POINT, "M": 32}])
    more = (tmp_path / "q.csv").read_text().partition("\n")[2]
    (tmp_path / "both.csv").write_text((tmp_path / "p.csv").read_text() + more)
    assert [p["M"] for p in read_points(tmp_path / "both.csv")] == [8, 32]


def test_no_points_make_no_file_and_another_file_is_refused(tmp_path):
    write_points(tmp_path / "p.csv", [])
    assert not (tmp_path / "p.csv").exists()
    for text in ("", "a,b\n1,2\n", "shape,scheme,backend,M,us\n"):
        (tmp_path / "p.csv").write_text(text)
        with pytest.raises(ValueError, match="want points of the bench"):
            read_points(tmp_path / "p.csv")
