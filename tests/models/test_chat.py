"""examples/chat.py as people run it: `expertd quantize`, two `expertd serve`, a frontend without experts."""

from __future__ import annotations

import chat


def test_a_tiny_model_says_the_same_with_its_experts_on_two_servers(capsys):
    """Four processes, each of which imports torch: seconds."""
    assert chat.main(["--family", "qwen3_moe", "--tokens", "64"]) == 0
    assert "64 equal" in capsys.readouterr().out


def test_a_difference_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(chat, "compare", lambda *_: (False, ["f", "s", "DIFFERENT", "1", "1", "1", "1"]))
    assert chat.main(["--family", "mixtral"]) == 1
    assert "DIFFERENT" in capsys.readouterr().out
