"""The main job end to end: serve a checkpoint, call it from a client, compare every answer with the float32 reference.

Starts `expertd serve` as a process of its own on a free loopback port, streams batches of 1 to 32 tokens through the
client, checks each answer, prints latency, throughput and error, and stops the server with SIGTERM.
Exit code 0 = every answer was right and the server stopped cleanly.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from expertd_client import AsyncExpertClient
from expertd_kernels import Weights, reference, relative_error, tolerance
from expertd_kernels.checkpoint import open_checkpoint
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


def start_server(args: argparse.Namespace, layers: list[int]) -> tuple[subprocess.Popen[str], str]:
    """The server process and its address, once it serves.  Its boot log goes to this terminal."""
    command = [sys.executable, "-m", "expertd_server.cli", "serve", "--checkpoint", str(args.checkpoint)]
    command += ["--listen", "127.0.0.1:0", "--layers", ",".join(map(str, layers)), "--device", args.device]
    if args.backend:
        command += ["--backend", args.backend]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    deadline = time.monotonic() + BOOT_TIMEOUT_S
    for line in process.stdout:
        console.print("  " + line.rstrip(), markup=False, highlight=False)
        if found := re.search(r"serving on (\S+)", line):
            return process, found[1]
        if time.monotonic() > deadline:
            break
    process.kill()
    raise SystemExit(f"demo: the server did not come up (exit code {process.wait()})")


async def stream(address: str, calls: list[Call]) -> tuple[list[float], list[float], float]:
    """Latencies in seconds, relative errors, and the wall time of all calls, IN_FLIGHT at a time on one stream."""
    latencies: list[float] = []
    answers: list[tuple[Call, torch.Tensor]] = []
    slots = asyncio.Semaphore(IN_FLIGHT)
    async with AsyncExpertClient(address) as client:

        async def one(call: Call) -> None:
            async with slots:
                start = time.perf_counter()
                answer = await client.forward(call.layer, call.hidden_states, call.topk_ids, call.topk_weights)
                latencies.append(time.perf_counter() - start)
            if answer.routes_computed != call.topk_ids.numel():
                raise SystemExit(f"demo: {answer.routes_computed} of {call.topk_ids.numel()} routes were computed")
            answers.append((call, answer.output))

        begin = time.perf_counter()
        await asyncio.gather(*(one(c) for c in calls))
        wall_s = time.perf_counter() - begin
    return latencies, [relative_error(out, call.expected) for call, out in answers], wall_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder with config.json and safetensors")
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--max-layers", type=int, default=2, help="serve and check only the first layers with experts")
    parser.add_argument("--backend", default="", help="a backend's name; default: the oracle's choice")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()

    source = open_checkpoint(args.checkpoint)
    layers = {n: (source.info(n), source.load(n)) for n in source.layers[: args.max_layers]}
    calls = make_calls(layers, args.batches)
    console.print(f"[bold]{args.checkpoint.name}[/]: {source.family}, layers {sorted(layers)}, starting the server")
    process, address = start_server(args, sorted(layers))
    try:
        latencies, errors, wall_s = asyncio.run(stream(address, calls))
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=60)

    bound = tolerance("bf16")
    ms = np.percentile(np.array(latencies) * 1e3, [50, 95, 99])
    tokens = sum(len(c.hidden_states) for c in calls)
    table = Table(title=f"{len(calls)} batches, {tokens} tokens, {IN_FLIGHT} in flight on one stream")
    for name in ("latency p50", "p95", "p99", "tokens/s", "batches/s", "largest relative error", "tolerance"):
        table.add_column(name, justify="right")
    table.add_row(
        *(f"{v:.2f} ms" for v in ms),
        f"{tokens / wall_s:,.0f}",
        f"{len(calls) / wall_s:,.0f}",
        f"{max(errors):.2e}",
        f"{bound:.0e}",
    )
    console.print(table)
    ok = max(errors) <= bound and len(errors) == len(calls) and code == 0
    console.print(
        f"every answer checked against the float32 reference: {'right' if ok else 'WRONG'}; server exit {code}"
    )
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
