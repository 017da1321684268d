"""The examples of docs/engines.md as they stand there, each in a process of its own, with a server of a tiny model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_server
from hosts import hosts

ROOT = Path(__file__).parents[2]
PAPER = (ROOT / "docs/engines.md").read_text()
EXAMPLES = {
    "transformers_model.py": "24 greedy tokens: equal",
    "own_engine.py": "together against one by one",
    "own_engine.py --compile": "together against one by one",
    "own_adapter.py": "2 layers at",
    "kt_wrapper.py": "2 experts here, 6 at",
}
"""A command of the page, less its arguments, and what it prints."""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(checkpoint, address)"""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_server.make(folder)
    with hosts([{"checkpoint": folder}]) as [address]:
        yield folder, address


def commands():
    """Those of the page that call an example, as they stand there."""
    text = "\n".join(re.findall(r"```sh\n(.*?)```", PAPER, re.DOTALL)).replace("\\\n", " ")
    lines = [re.sub(r"\s+#.*", "", line) for line in text.splitlines()]
    return [line for line in lines if "client/examples/" in line and "tiny_server" not in line]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs_as_the_page_says(example, served):
    script, *options = example.split()
    found = [c for c in commands() if script in c and set(options) <= set(c.split())]
    assert found, f"docs/engines.md does not call {example}"
    checkpoint, address = served
    command = next(c for c in found if options or "--" not in c.partition(script)[2])
    command = command.replace("DIR", str(checkpoint)).replace("127.0.0.1:50051", address)
    words = re.sub(r"^((?:\w+=\S+ )*)python ", rf"\1{sys.executable} ", command)
    done = subprocess.run(
        words, shell=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert EXAMPLES[example] in done.stdout


def test_every_example_of_the_page_is_run():
    assert {re.search(r"examples/(\w+\.py)", c)[1] for c in commands()} == {e.split()[0] for e in EXAMPLES}


def test_the_adapter_has_sixty_lines_at_most():
    text = (ROOT / "client/examples/own_adapter.py").read_text()
    adapter = re.search(r"# ---- the adapter.*?\n(.*?)# ---- end of the adapter", text, re.DOTALL)[1]
    assert 10 < len([line for line in adapter.splitlines() if line.strip()]) <= 60


def test_a_wrong_answer_is_an_error(served, monkeypatch, capsys):
    """Or the examples would show nothing."""
    import kt_wrapper

    real = kt_wrapper.reference
    monkeypatch.setattr(kt_wrapper, "reference", lambda weights, x, ids, scores: real(weights, x, ids, 1.01 * scores))
    checkpoint, address = served
    assert kt_wrapper.main(str(checkpoint), address) == 1
    assert "relative error" in capsys.readouterr().out
