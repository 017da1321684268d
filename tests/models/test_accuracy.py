"""examples/accuracy.py: a tiny model's perplexity and task with served experts and with its own, and the intervals."""

from __future__ import annotations

import json
import math
import random
from importlib.util import find_spec

import accuracy
import chat
import pytest
import torch


def test_a_tiny_model_has_the_same_perplexity_with_served_experts(capsys, tmp_path):
    """Four processes, as in test_chat.py."""
    scores = tmp_path / "scores.json"
    assert accuracy.main(["--window", "64", "--limit", "8", "--json", str(scores)]) == 0
    said = capsys.readouterr().out
    assert "perplexity" in said
    found = json.loads(scores.read_text())
    own, served = (found[which][accuracy.NLL] for which in ("own", "served"))
    assert len(own) == len(served) == 8
    assert max(abs(a - b) for a, b in zip(own, served, strict=True)) < 1e-4
    assert min(own) > 1, "a random model does not know the next word"


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed")
def test_a_tiny_model_answers_a_task_of_lm_eval_alike_with_served_experts(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    scores = tmp_path / "scores.json"
    options = ["--tasks", "synthetic", "--window", "64", "--limit", "16", "--json", str(scores)]
    assert accuracy.main(options) == 0
    assert "synthetic acc" in capsys.readouterr().out
    found = json.loads(scores.read_text())
    own, served = (found[which]["synthetic acc"] for which in ("own", "served"))
    assert own == served
    assert len(own) == 16
    assert set(own) == {0.0, 1.0}, "a random model gets some of the answers right, and not all"


def test_a_checkpoint_is_measured_in_two_runs(capsys, tmp_path):
    """Own experts first, then served ones beside those scores."""
    words = [f"w{n}" for n in range(accuracy.WORDS)]
    chat.make("qwen3_moe", tmp_path / "model")
    accuracy.tokenizer_of(words).save_pretrained(tmp_path / "model")
    text, scores = tmp_path / "text.txt", tmp_path / "own.json"
    text.write_text(" ".join(random.Random(2).choices(words, k=4 * 32)))
    options = ["--checkpoint", str(tmp_path / "model"), "--text", str(text), "--window", "32", "--device-map", "cpu"]
    assert accuracy.main([*options, "--only", "own", "--json", str(scores)]) == 0
    assert "nats a token" in capsys.readouterr().out
    found = json.loads(scores.read_text())
    assert len(found["own"][accuracy.NLL]) == 4
    beside = [*options, "--only", "served", "--beside", str(scores)]
    assert accuracy.main(beside) == 0
    assert "perplexity" in capsys.readouterr().out
    scores.write_text(json.dumps({"own": {accuracy.NLL: [v + 0.1 for v in found["own"][accuracy.NLL]]}}))
    assert accuracy.main(beside) == 1
    assert "more than 0.001" in capsys.readouterr().out


def test_a_difference_is_an_error_beyond_what_is_allowed(capsys):
    own = {"acc": [0.0, 1.0] * 50}
    worse = {"acc": [0.0, 1.0, 0.0, 0.0] * 25}
    assert accuracy.verdict(own, own, 0.0) == 0
    assert accuracy.verdict(own, worse, 1e-3) == 1
    assert accuracy.verdict(own, worse, 0.5) == 0
    assert "more than 0.001" in capsys.readouterr().out
    assert accuracy.verdict({"acc": [1.0]}, {"acc": [0.0]}, 1e-3) == 1, "one value has no interval"
    assert accuracy.verdict({"acc": [1.0, 0.0]}, {"acc": [math.nan, 0.0]}, 1e-3) == 1
    with pytest.raises(SystemExit, match="options differ"):
        accuracy.verdict(own, {"acc": [1.0]}, 0.0)


def test_intervals():
    mean, half = accuracy.interval([1.0, 2.0, 3.0, 4.0])
    assert mean == 2.5
    assert half == pytest.approx(1.96 * math.sqrt(5 / 3) / 2)
    assert accuracy.interval([1.0])[1] == math.inf


def test_likelihoods_are_those_of_the_logits():
    class Model:
        device = torch.device("cpu")

        def __call__(self, input_ids):
            logits = torch.zeros(1, input_ids.shape[1], 4)
            logits[0, :, 1] = math.log(3.0)  # token 1 has a half, the others a sixth each
            return type("Out", (), {"logits": logits})

    windows = accuracy.windows_of(torch.tensor([0, 1, 1, 2, 1, 1, 3]), 3)
    assert [w.tolist() for w in windows] == [[[0, 1, 1]], [[2, 1, 1]]]
    assert accuracy.likelihoods(Model(), windows) == pytest.approx([math.log(2)] * 2)
    assert accuracy.likelihoods(Model(), [torch.tensor([[1, 2, 3]])]) == pytest.approx([math.log(6)])


@pytest.mark.parametrize(
    "wrong", [["--only", "own"], ["--checkpoint", "x"], ["--checkpoint", "x", "--text", "y", "--beside", "z"]]
)
def test_options_that_do_not_go_together(wrong):
    with pytest.raises(SystemExit) as found:
        accuracy.arguments_of(wrong)
    assert found.value.code == 2
