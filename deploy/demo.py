"""The main job end to end: serve a checkpoint, call it from a client, compare every answer with the float32 reference.

First one server: `expertd serve` as a process of its own on a free loopback port, batches of 1 to 32 tokens through
the client, latency, throughput and error; SIGTERM.  Then three of them: two replicas of one half of the experts on
different backends, one of the other half, and a cluster client; one replica is killed in the middle.
Exit code 0 = every answer was right, no call failed, and the servers stopped cleanly.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import demo_cluster
import numpy as np
from demo_kit import IN_FLIGHT, Call, Server, console, make_calls
from rich.table import Table

from expertd.v1 import expert_service_pb2 as pb
from expertd_client import AsyncExpertClient
from expertd_kernels import relative_error, tolerance
from expertd_kernels.checkpoint import open_checkpoint


@dataclass(frozen=True)
class Streamed:
    """latencies in seconds, relative errors, the wall time of all calls, and what the server says of itself."""

    latencies: list[float]
    errors: list[float]
    wall_s: float
    described: pb.DescribeResponse


async def stream(address: str, calls: list[Call]) -> Streamed:
    """All calls, IN_FLIGHT at a time on one stream."""
    latencies: list[float] = []
    errors: list[float] = []
    slots = asyncio.Semaphore(IN_FLIGHT)
    async with AsyncExpertClient(address) as client:
        described = await client.describe(include_decisions=True)

        async def one(call: Call) -> None:
            async with slots:
                start = time.perf_counter()
                answer = await client.forward(call.layer, call.hidden_states, call.topk_ids, call.topk_weights)
                latencies.append(time.perf_counter() - start)
            if answer.routes_computed != call.topk_ids.numel():
                raise SystemExit(f"demo: {answer.routes_computed} of {call.topk_ids.numel()} routes were computed")
            errors.append(relative_error(answer.output, call.expected))

        begin = time.perf_counter()
        await asyncio.gather(*(one(c) for c in calls))
        return Streamed(latencies, errors, time.perf_counter() - begin, described)


def one_server(args: argparse.Namespace, layers: list[int], calls: list[Call]) -> tuple[bool, pb.DescribeResponse]:
    """Whether all was right, and what the server said of itself."""
    server = Server(args, layers, ["--backend", args.backend] if args.backend else [])
    done, code = None, -1
    try:
        done = asyncio.run(stream(server.address(), calls))
    finally:
        code = server.stop()
    bound = tolerance("bf16")
    ms = np.percentile(np.array(done.latencies) * 1e3, [50, 95, 99])
    tokens = sum(len(c.hidden_states) for c in calls)
    table = Table(title=f"{len(calls)} batches, {tokens} tokens, {IN_FLIGHT} in flight on one stream")
    for name in ("latency p50", "p95", "p99", "tokens/s", "batches/s", "largest relative error", "tolerance"):
        table.add_column(name, justify="right")
    table.add_row(
        *(f"{v:.2f} ms" for v in ms),
        f"{tokens / done.wall_s:,.0f}",
        f"{len(calls) / done.wall_s:,.0f}",
        f"{max(done.errors):.2e}",
        f"{bound:.0e}",
    )
    console.print(table)
    ok = max(done.errors) <= bound and len(done.errors) == len(calls) and code == 0
    console.print(
        f"every answer checked against the float32 reference: {'right' if ok else 'WRONG'}; server exit {code}"
    )
    return ok, done.described


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
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
    right, described = one_server(args, sorted(layers), calls)
    right &= demo_cluster.run(args, sorted(layers), calls, described)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
