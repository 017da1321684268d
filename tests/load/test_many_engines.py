"""many_engines.py: its arithmetic, and a short form of it with real engines and servers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import engine_process
import many_engines
from many_engines import PHASES, Spans, judged

SCRIPT = Path(many_engines.__file__)
LIMIT_S = 1500


def run(*options):
    """What the script found; it has to end with 0."""
    command = [sys.executable, str(SCRIPT), "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def held(found, engines):
    """Every token of every engine was the one of its own model, in every phase, and all that should happen happened."""
    assert (found["wrong"], found["errors"], found["bad"]) == (0, {}, [])
    assert found["events"]["join"] == engines
    assert all(found["events"][what] >= 1 for what in ("kill", "still", "leave"))
    assert found["compared"] > 0
    for phase in PHASES:
        generations, tokens, calls, p50, p99, worst = found["phases"][phase]
        assert generations > 0, phase
        assert 0 < tokens < found["compared"]
        assert calls > 0
        assert 0 < p50 <= p99
        assert worst > 0
    assert found["floods"]["flood"] > 0


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_eight_engines_of_three_kinds_on_one_server():
    held(run("--engines", "8", "--seconds", "8", "--steps-per-s", "50"), 8)


@pytest.mark.soak
@pytest.mark.timeout(LIMIT_S)
def test_thirty_two_engines_on_three_servers():
    """Longer, and with more engines: the program itself."""
    held(run("--engines", "32", "--servers", "3", "--seconds", "60"), 32)


def line(began, *calls, equal=True, tokens=16):
    return {"began": began, "equal": equal, "tokens": tokens, "calls": calls}


def test_generations_are_counted_in_the_phase_in_which_they_began_and_calls_where_they_were_made():
    spans = Spans({"quiet": (0.0, 10.0), "churn": (10.0, 20.0), "flood": (20.0, 30.0)})
    lines = {"a": [{"pid": 1, "began": 0.5}, line(1.0, (2.0, 1000), (9.9, 3000)), line(9.0, (9.5, 5000), (11.0, 7000))]}
    found = judged(spans, lines)
    quiet, churn = found.phases["quiet"], found.phases["churn"]
    assert (quiet.generations, quiet.tokens, quiet.us) == (2, 32, {"a": [1000, 3000, 5000]})
    assert (churn.generations, churn.us) == (0, {"a": [7000]})
    assert quiet.row() == [2, 32, 3, 3.0, pytest.approx(4.96), pytest.approx(4.96)]
    assert found.compared == 32


def test_calls_of_an_engine_that_was_itself_stopped_are_left_out_and_its_tokens_are_not():
    spans = Spans({"churn": (0.0, 10.0)}, {"a": [(4.0, 6.0)]})
    calls = (3.0, 1000), (3.9, 900_000), (5.0, 1000), (6.5, 1000)
    found = judged(spans, {"a": [line(1.0, *calls, equal=False)], "b": [line(1.0, (5.0, 2000))]})
    assert found.phases["churn"].us == {"a": [1000, 1000], "b": [2000]}
    assert found.wrong == ["a: the generation at 1.0 s"]


def test_an_error_is_counted_by_its_reason():
    spans = Spans({"quiet": (0.0, 10.0)})
    found = judged(spans, {"a": [{"began": 1.0, "tokens": 16, "error": "QUEUE_FULL", "calls": []}]})
    assert found.errors == {"QUEUE_FULL": 1}
    assert not found.compared


def test_the_worst_engine_is_the_one_whose_own_p99_is_the_largest():
    phase = many_engines.Phase(1, 16, {"a": [1000] * 99 + [2000], "b": [9000] * 2, "c": []})
    *_, p99, worst = phase.row()
    assert worst == 9.0
    assert p99 <= 9.0


def test_half_a_line_of_a_killed_engine_is_cut(tmp_path):
    (tmp_path / "x").write_text('{"a": 1}\n{"b"')
    many_engines.cut_short(tmp_path / "x")
    assert (tmp_path / "x").read_text() == '{"a": 1}\n'


def test_each_engine_has_a_token_of_its_own_that_nobody_else_can_read(tmp_path):
    callers, files = many_engines.identities(tmp_path, ["a", "b"])
    tokens = {file.read_text() for file in files.values()}
    assert len(tokens) == 2
    assert all(token in callers.read_text() for token in tokens)
    assert {os.stat(file).st_mode & 0o077 for file in (callers, *files.values())} == {0}


@pytest.mark.parametrize("wrong", ["one per cent", "another expert", "nothing"])
def test_a_decoder_whose_experts_are_wrong_is_seen(wrong):
    """Of few tokens alone a small error would not be."""
    decoder = engine_process.Decoder(3, hidden=32, layers=2, experts=8, top_k=2)
    scales = np.linspace(0.5, 2.0, 8, dtype=np.float32)

    def experts(layer, x, ids, weights):
        return x[:, ::-1] * (scales[ids] * weights).sum(1, keepdims=True)

    def wrongly(layer, x, ids, weights):
        factor = {"one per cent": 1.01, "another expert": 1, "nothing": 0}[wrong]
        return factor * experts(layer, x, (ids + (wrong == "another expert")) % 8, weights)

    prompt = np.array([[1, 2, 3], [4, 5, 6]])
    said, margin, last = decoder.generate(prompt, 16, experts, lambda: None)
    again, _, as_last = decoder.generate(prompt, 16, experts, lambda: None)
    assert margin > 0
    assert engine_process.equal(again, as_last, said, last)
    others, _, other_last = decoder.generate(prompt, 16, wrongly, lambda: None)
    assert not engine_process.equal(others, other_last, said, last)
