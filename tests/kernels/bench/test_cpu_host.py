"""The benchmark of a CPU server on a host that others use: its figures, and one small run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import cpu_host
from cpu_host import Row, percentile, table
from expertd_kernels.native import library as native


def test_a_percentile_is_a_value_that_was_measured():
    assert percentile([3, 1, 2], 0.5) == 2
    assert percentile([5], 0.99) == 5
    assert percentile(list(range(1, 101)), 0.99) == 99
    assert percentile(list(range(1, 11)), 0.99) == 10


def test_shares_are_of_the_same_columns_quiet_run():
    taken = {("new", 2, 1, 0.0, 0): [10.0, 20.0, 30.0], ("new", 2, 1, 0.0, 2): [40.0, 40.0, 90.0],
             ("old", 2, 1, 0.0, 2): [7.0]}  # fmt: skip
    busy = cpu_host._row(("new", 2, 1, 0.0, 2), taken, used=1)
    assert (busy.quiet50, busy.quiet99, busy.used) == (2.0, 3.0, 1)
    alone = cpu_host._row(("old", 2, 1, 0.0, 2), taken, used=0)
    assert (alone.quiet50, alone.quiet99) == (0.0, 0.0), "nothing to compare with"


def test_the_table_has_a_block_for_each_number_of_tokens_and_gap():
    rows = [Row("new", 1, m, g, 0, 9, 1000.0, 2000.0, 1.0, 1.0, 1) for m in (1, 16) for g in (0.0, 5.0)]
    text = table(rows)
    assert [line for line in text.splitlines() if "tokens" in line] == [
        "1 tokens, 0 ms between calls", "1 tokens, 5 ms between calls",
        "16 tokens, 0 ms between calls", "16 tokens, 5 ms between calls"]  # fmt: skip
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.skipif(bool(native.kernel_error()), reason=native.kernel_error() or "built")
def test_a_small_run(tmp_path):
    script, out = Path(cpu_host.__file__), tmp_path / "rows.json"
    few = ["--shape", "4,64,32,2", "--tokens", "2", "--threads", "1,2", "--busy", "0,1", "--gap", "0"]
    command = [sys.executable, str(script), *few, "--rounds", "1", "--seconds", "0.02", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [(r["threads"], r["busy"]) for r in rows] == [(1, 0), (2, 0), (1, 1), (2, 1)]
    assert all(r["calls"] >= 1 and 0 < r["p50_us"] <= r["p99_us"] and r["used"] >= 1 for r in rows)
