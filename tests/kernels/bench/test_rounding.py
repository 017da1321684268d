"""rounding.py: the table, and that it prints no time of wrong bits."""

from __future__ import annotations

import sys

import pytest

import rounding
from expertd_kernels.native.library import use_threads
from expertd_kernels.weights import quantize


@pytest.fixture(autouse=True)
def arguments(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["rounding.py", "--rows", "32", "--columns", "256", "--turns", "1"])
    monkeypatch.setattr(rounding.torch, "set_num_threads", lambda n: None)
    yield
    use_threads(0)


def test_every_scheme_has_a_row(capsys):
    assert rounding.main() == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == list(rounding.SCHEMES)
    assert all(float(row[1]) > 0 and float(row[2]) > 0 for row in rows)


def test_wrong_bits_end_it(capsys, monkeypatch):
    real = quantize.round_rows

    def wrong(*args):
        real(*args)
        args[5][0, 0, 0] ^= 1  # codes

    monkeypatch.setattr(quantize, "round_rows", wrong)
    assert rounding.main() == 1
    assert "int4_g128: codes differ" in capsys.readouterr().out
