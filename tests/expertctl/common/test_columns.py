"""What --help of a benchmark says of its columns is what the table shows."""

from __future__ import annotations

import pytest

from expertctl.bench import codec
from expertctl.bench.faults import command, moves, replicas, run, unequal
from expertctl.cli import main
from expertctl.common.columns import Column, explained, table_of


@pytest.mark.parametrize(
    ("part", "columns", "measurement"),
    [
        ("codec", codec.COLUMNS, codec.CodecMeasurement),
        ("replicas", replicas.COLUMNS, replicas.ReplicaMeasurement),
        ("faults", command.COLUMNS, run.FaultMeasurement),
        ("moves", moves.COLUMNS, moves.MoveMeasurement),
        ("unequal", unequal.COLUMNS, unequal.BalanceMeasurement),
    ],
)
def test_help_says_what_each_column_and_key_means(part, columns, measurement, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit):
        main(["bench", part, "--help"])
    shown = capsys.readouterr().out.splitlines()
    for column in columns:
        assert all(line in shown for line in column.lines())
    keys = {column.key or column.name for column in columns}
    left = set(measurement.__dataclass_fields__) - keys
    assert keys <= set(measurement.__dataclass_fields__)
    assert all(any(line.startswith(f"  {key}: ") for line in shown) for key in left)


def test_lines_that_are_broken_stay_indented(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    with pytest.raises(SystemExit):
        main(["bench", "replicas", "--help"])
    shown = capsys.readouterr().out.splitlines()
    at = shown.index("    stumbles: one replica delays 5% of its answers by 50")
    assert shown[at + 1] == "        ms"


def test_words_are_to_the_left_and_numbers_to_the_right():
    columns = (Column("case", "what", values={"a": "first"}), Column("p50 ms", "time", "p50_ms"))
    assert explained(columns, "more").splitlines()[1:] == [
        "  case: what",
        "    a: first",
        "  p50 ms (p50_ms): time",
        "more",
    ]
    assert [(c.header, c.justify) for c in table_of(columns, "").columns] == [("case", "left"), ("p50 ms", "right")]
