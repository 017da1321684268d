"""`expertctl bench codec`: it measures, in the shape that programs read."""

from __future__ import annotations

import argparse
import json

import pytest

from expertctl.bench import codec as bench_codec


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench_codec.add_arguments(parser)
    return parser.parse_args(words)


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_codec.run_command(parse("--json", "--sizes", "8192,65536", "--seconds", "0", "--untuned")) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["bytes"] for row in rows] == [8192, 65536]
    for row in rows:
        assert set(row) == {
            "bytes",
            "expertd_us",
            "bytes_stream_us",
            "protobuf_us",
            "ratio_vs_bytes_stream",
            "ratio_vs_protobuf",
        }
        assert all(value > 0 for value in row.values())
        assert row["ratio_vs_bytes_stream"] == pytest.approx(row["expertd_us"] / row["bytes_stream_us"], rel=0.01)
        assert row["ratio_vs_protobuf"] == pytest.approx(row["expertd_us"] / row["protobuf_us"], rel=0.01)


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_codec.run_command(parse("--sizes", "8192", "--seconds", "0", "--untuned")) == 0
    assert "8,192" in capsys.readouterr().out


def test_default_sizes_and_refused_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert (parse().sizes[0], parse().sizes[-1]) == (8 << 10, 16 << 20)
    with pytest.raises(SystemExit):
        parse("--sizes", "1000")
    assert "multiples of 4096" in capsys.readouterr().err
