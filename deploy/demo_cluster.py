"""The second part of the demo: one layer over three servers, and what a killed one does to the calls: nothing."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Sequence

from demo_kit import IN_FLIGHT, Call, Server, console
from rich.table import Table

from expertd.errors import ExpertdError
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.cluster import AsyncExpertCluster, ClusterResult
from expertd_kernels import relative_error, tolerance

ROUNDS = 2
"""How often the batches are sent."""


class Watched:
    """What came of the calls.  parts: by whether the replica was killed already, then by server, how many it answered;
    again: parts that a second server was asked for."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.errors: list[float] = []
        self.longest_s = 0.0
        self.parts: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}
        self.again = 0
        self.killed = False

    def answered(self, call: Call, answer: ClusterResult, seconds: float) -> None:
        self.errors.append(relative_error(answer.output, call.expected))
        self.longest_s = max(self.longest_s, seconds)
        for part in answer.parts:
            self.parts[self.killed][part.server] += 1
            self.again += part.asked > 1
        if answer.routes_computed != call.topk_ids.numel():
            self.failed.append(f"{answer.routes_computed} of {call.topk_ids.numel()} routes were computed")


async def stream(addresses: Sequence[str], calls: Sequence[Call], victim: Server) -> Watched:
    """All calls, IN_FLIGHT at a time; `victim` is killed when half of them are answered."""
    seen, slots = Watched(), asyncio.Semaphore(IN_FLIGHT)
    async with AsyncExpertCluster(addresses, timeout_s=30.0) as cluster:

        async def one(call: Call) -> None:
            async with slots:
                start = time.perf_counter()
                try:
                    answer = await cluster.forward(call.layer, call.hidden_states, call.topk_ids, call.topk_weights)
                except ExpertdError as error:
                    seen.failed.append(f"{error.reason}: {error.message}")
                    return
                seen.answered(call, answer, time.perf_counter() - start)
                if len(seen.errors) == len(calls) // 2:
                    seen.killed = True
                    victim.kill()

        await asyncio.gather(*(one(c) for c in calls))
    return seen


def run(args: argparse.Namespace, layers: Sequence[int], calls: list[Call], described: pb.DescribeResponse) -> bool:
    """Whether every answer was right.  described: what a server of the whole said of itself."""
    layer = described.layers[0]
    chosen, others = layer.backend, [v.backend for v in layer.verdicts if v.eligible and v.backend != layer.backend]
    half = layer.num_experts // 2
    lower, upper = f"0-{half - 1}", f"{half}-{layer.num_experts - 1}"
    plan = [(lower, chosen), (lower, others[0] if others else chosen), (upper, chosen)]
    console.print("\n[bold]three servers[/]: two replicas of one half of the experts, one of the other; one is killed")
    servers = [
        Server(args, layers, ["--experts", experts, "--backend", backend], log=False) for experts, backend in plan
    ]
    try:
        addresses = [server.address() for server in servers]
        seen = asyncio.run(stream(addresses, calls * ROUNDS, servers[0]))
    finally:
        codes = [server.stop() for server in servers[1:]]
        servers[0].kill()
    table = Table(title=f"{len(calls) * ROUNDS} batches over three servers, {IN_FLIGHT} in flight: who answered what")
    for name, justify in (("server", "left"), ("experts", "left"), ("backend", "left")):
        table.add_column(name, justify=justify)
    table.add_column("parts before the kill", justify="right")
    table.add_column("and after it", justify="right")
    for n, (address, (experts, backend)) in enumerate(zip(addresses, plan, strict=True)):
        before, after = (f"{seen.parts[killed][address]:,}" for killed in (False, True))
        table.add_row(address + (" (killed)" if n == 0 else ""), experts, backend, before, after)
    console.print(table)
    bound = tolerance("bf16")
    ok = not seen.failed and len(seen.errors) == len(calls) * ROUNDS and max(seen.errors) <= bound and not any(codes)
    console.print(
        f"{len(seen.failed)} failed calls; {seen.again} parts were asked of a second server; longest call"
        f" {seen.longest_s * 1e3:.0f} ms; largest relative error {max(seen.errors):.2e} (tolerance {bound:.0e});"
        f" every answer checked: {'right' if ok else 'WRONG'}"
    )
    for why in dict.fromkeys(seen.failed):
        console.print(why, markup=False)
    return ok
