"""Callers on a second GPU of the host, and a server whose GPU they do not see: tests/load/gpu_callers.py, and a session
that a client of `expertd serve` asks for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2 or torch.version.cuda is None, reason="needs two NVIDIA GPUs of one host"
    ),
]
SCRIPT = Path(__file__).parents[1] / "load" / "gpu_callers.py"


@pytest.mark.parametrize("how", [["--reconnects", "100", "--kill"], ["--hide", "--callers", "4x8"]])
def test_answers_are_right_and_either_side_may_be_killed(how):
    command = [sys.executable, str(SCRIPT), "--shapes", "qwen3", "--tokens", "1,128", *how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    if "--kill" in how:
        assert "NaN: True" in done.stdout
        assert "left at the server: 0 0" in done.stdout
