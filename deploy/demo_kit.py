"""What both parts of the demo use: batches with their reference answers, and servers as processes of their own."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console

from expertd_kernels import Weights, reference
from expertd_kernels.sources.source import LayerInfo
from expertd_kernels.sources.synthetic import random_inputs

IN_FLIGHT = 8
BOOT_TIMEOUT_S = 600.0
console = Console(width=120)


@dataclass(frozen=True)
class Call:
    """One batch: what went in, and what the reference says."""

    layer: int
    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    expected: torch.Tensor


def make_calls(layers: dict[int, tuple[LayerInfo, Weights]], batches: int) -> list[Call]:
    """Random batches of 1 to 32 tokens over the layers, with their reference answers.

    Tokens are cut from one reference run for each layer, so that the check costs little beside the calls."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 33, size=batches)
    calls = []
    order = sorted(layers)
    for n, layer in enumerate(order):
        info, weights = layers[layer]
        mine = sizes[n :: len(order)]
        x, ids, w = random_inputs(int(mine.sum()), info.hidden_size, info.num_experts, info.top_k, seed=layer)
        expected = reference(weights, x, ids, w)
        start = 0
        for m in mine.tolist():
            part = slice(start, start + m)
            calls.append(Call(layer, x[part], ids[part], w[part], expected[part]))
            start += m
    return calls


class Server:
    """A server process, starting.  options: more of the command line; log: whether its boot log is shown."""

    def __init__(self, args: Namespace, layers: Sequence[int], options: Sequence[str] = (), log: bool = True) -> None:
        command = [sys.executable, "-m", "expertd_server.commands.cli", "serve", "--checkpoint", str(args.checkpoint)]
        command += ["--listen", "127.0.0.1:0", "--layers", ",".join(map(str, layers)), "--device", args.device]
        self._log = log
        self._process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)

    def address(self) -> str:
        """Its address, once it serves."""
        assert self._process.stdout is not None
        deadline, lines = time.monotonic() + BOOT_TIMEOUT_S, []
        for line in self._process.stdout:
            lines.append(line)
            if self._log:
                console.print("  " + line.rstrip(), markup=False, highlight=False)
            if found := re.search(r"serving on (\S+)", line):
                return found[1]
            if time.monotonic() > deadline:
                break
        self.kill()
        raise SystemExit(f"demo: the server did not come up: {''.join(lines[-5:])}")

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(timeout=60)

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self._process.wait(timeout=60)
