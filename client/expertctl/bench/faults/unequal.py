"""A model that no server can hold alone, on three servers of different speeds: split evenly, then as planned.

    a server that is to hold everything      refused by its memory limit
    three servers with a third each          measured under load; their counters make a plan, with a forecast
    the same three, moved under that load    measured again: as many times as fast as the forecast says?

The speeds are played (--test-route-us), the memory is a limit (--memory-limit), all else is real.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass

import numpy as np

from expertctl.bench.faults.failures import Failures
from expertctl.bench.faults.processes import ServerProcess
from expertctl.common.brief import briefly
from expertctl.common.columns import Column, table_of
from expertctl.common.counts import at_least, at_least_0, positive
from expertctl.common.workload import LayerShape, drawn
from expertctl.planner import observe, picture
from expertctl.planner.picture import Bar
from expertctl.planner.plan import PlacementPlan, plan
from expertctl.planner.problem import Problem, held_of, placement_of
from expertctl.rebalancing.rebalance import Options, Progress, Rebalancer
from expertd.common.tables import console, print_sentence, print_table
from expertd.placement import Placement
from expertd_client.cluster import ExpertCluster

__all__ = ["COLUMNS", "MORE", "BalanceMeasurement", "add_arguments", "run", "run_command"]

_LAYERS, _EXPERTS, _TOP_K, _HIDDEN = 4, 64, 4, 256
MODEL = ("--synthetic", "tiny-many:int4_g128", "--device", "cpu", "--threads", "1", "--max-tokens", "256")
ROUTE_US = (1000, 2000, 4000)
"""How much longer each of the servers takes for a token of an expert."""
COLUMNS = (
    Column(
        "placement",
        "which server has which experts",
        values={"even": "a third each", "planned": "as planned by the counters of the even one, moved under load"},
    ),
    Column("experts held", "of each server, over all layers", "held"),
    Column("calls", "that were answered"),
    Column("failed", "calls without an answer"),
    Column("routes/s", "routes a second, measured", "rate"),
    Column("times", "routes/s over those of the even placement, measured"),
    Column("forecast", "what the plan expected for `times`"),
)
MORE = (
    "The second table: experts of each server, and its time for the same load, before and after; 100% is the longest.",
    "The line above the table, in --json `alone`: why one server with this memory cannot hold the model, as intended.",
)
_SHARE = 0.85
"""Of the model's weights, what a server's memory has room for beside all else."""
_WARM_S = 1.0


@dataclass(frozen=True)
class BalanceMeasurement:
    """One placement.  held: experts of each server, over all layers; rate: routes a second, measured; times: as many as
    with the even split, measured; forecast: what the plan said; failed: calls."""

    placement: str
    held: tuple[int, ...]
    calls: int
    failed: int
    rate: float
    times: float
    forecast: float


class _Load:
    """Callers at full speed; counts routes."""

    def __init__(self, cluster: ExpertCluster, callers: int, tokens: int, zipf: float) -> None:
        rng = np.random.default_rng(0)
        shapes = [LayerShape(n, _HIDDEN, _EXPERTS, _TOP_K) for n in range(_LAYERS)]
        self._requests = [drawn(rng, tokens, shapes[n % _LAYERS], zipf) for n in range(64)]
        self._cluster, self._stop = cluster, threading.Event()
        self.calls, self.routes, self.failures = 0, 0, Failures()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(n,), name="expertd-caller") for n in range(callers)]
        for thread in self._threads:
            thread.start()

    def _run(self, n: int) -> None:
        while not self._stop.is_set():
            n = (n + 1) % len(self._requests)
            begin_s = time.monotonic()
            try:
                routes = self._cluster.forward_request(self._requests[n]).routes_computed
            except Exception as error:
                self.failures.failed(begin_s, error)
                time.sleep(0.01)
                continue
            with self._lock:
                self.calls, self.routes = self.calls + 1, self.routes + routes

    def rate(self, seconds: float) -> tuple[int, float]:
        """Calls, and routes a second, from now on for so long."""
        calls, routes, begin_s = self.calls, self.routes, time.monotonic()
        time.sleep(seconds)
        return self.calls - calls, (self.routes - routes) / (time.monotonic() - begin_s)

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def run(
    seconds: float, callers: int = 32, tokens: int = 4, zipf: float = 0.5
) -> tuple[list[BalanceMeasurement], str, list[Bar], Failures]:
    """The two rows, why one server cannot hold everything, the plan's picture, and the calls that failed."""
    with ExitStack() as stack:
        whole = stack.enter_context(ServerProcess(MODEL))
        limit = _limit(whole.ready())
        whole.end()
        alone = stack.enter_context(ServerProcess([*MODEL, "--memory-limit", str(limit)])).complaint()
        servers = [stack.enter_context(ServerProcess([*MODEL, *_options(n, limit)])) for n in range(len(ROUTE_US))]
        addresses = [server.ready() for server in servers]
        metrics = {server.address: server.said(r"metrics on http://(\S+)/metrics") for server in servers}
        cluster = stack.enter_context(ExpertCluster(addresses))
        load = _Load(cluster, callers, tokens, zipf)
        stack.callback(load.close)
        time.sleep(_WARM_S)
        before = observe.scrape(metrics)
        even_calls, even_rate = load.rate(seconds)
        counted = {a: c.since(before[a]) for a, c in observe.scrape(metrics).items()}
        problem, found = _plan(addresses, counted)
        even_failed = len(load.failures)
        now = Placement.from_describe(observe.ask(addresses))
        with closing(Rebalancer(placement_of(problem, found.held, 1, now.fingerprint), options=Options())) as mover:
            load.failures.happened("the move to the plan begins")
            mover.run(Progress())
            load.failures.happened("the move to the plan is over")
        time.sleep(_WARM_S)
        calls, rate = load.rate(seconds)
        assert found.before is not None
        held = [tuple(int(n) for n in h.sum(axis=(0, 2))) for h in (held_of(problem, now), found.held)]
        forecast = found.after.rate / found.before.rate
        rows = [
            BalanceMeasurement("even", held[0], even_calls, even_failed, round(even_rate), 1.0, 1.0),
            BalanceMeasurement(
                "planned",
                held[1],
                calls,
                len(load.failures) - even_failed,
                round(rate),
                round(rate / even_rate, 3),
                round(forecast, 3),
            ),
        ]
        return rows, alone, picture.bars(problem, held_of(problem, now), found), load.failures


def _limit(address: str) -> int:
    """Bytes that leave room for a part of the model's weights."""
    memory = observe.ask([address])[address].memory
    base = memory.context_bytes + memory.scratch_bytes + max(memory.buffers_bytes, memory.loading_bytes)
    return int(base + _SHARE * memory.weights_bytes)


def _options(n: int, limit: int) -> list[str]:
    shard = ["--shard", f"{n}/{len(ROUTE_US)}", "--memory-limit", str(limit), "--test-route-us", str(ROUTE_US[n])]
    return [*shard, "--metrics-listen", "127.0.0.1:0", "--expert-metrics", "yes", "--admin-listen", "127.0.0.1:0"]


def _plan(addresses: Sequence[str], counted: dict[str, observe.Counters]) -> tuple[Problem, PlacementPlan]:
    """As expertctl plan does."""
    described = observe.ask(addresses)
    now = Placement.from_describe(described)
    machines = {address: observe.Machine() for address in addresses}
    loads = observe.loads_of(counted.values(), now.num_experts)
    problem = observe.problem_of(loads, observe.places_of(machines, described, counted, _LAYERS))
    return problem, plan(problem, held_of(problem, now))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds",
        type=positive,
        default=briefly(15.0, 1.0),
        metavar="S",
        help="seconds of each measurement (default: 15)",
    )
    parser.add_argument("--callers", type=at_least(1), default=32, metavar="N", help="client threads (default: 32)")
    parser.add_argument("--tokens", type=at_least(1), default=4, metavar="M", help="tokens of each call (default: 4)")
    parser.add_argument(
        "--zipf",
        type=at_least_0,
        default=0.5,
        metavar="S",
        help="popularity: expert e has weight 1/(e+1)^S (default: 0.5)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run_command(args: argparse.Namespace) -> int:
    """Measures and prints; 1 where a call failed."""
    rows, alone, bars, failures = run(args.seconds, args.callers, args.tokens, args.zipf)
    failed = sum(row.failed for row in rows)
    if args.json:
        print(
            json.dumps(
                {
                    "alone": alone,
                    "rows": [asdict(row) for row in rows],
                    "failures": [asdict(one) for one in failures.first],
                }
            )
        )
        return 1 if failed else 0
    out = console()
    print_sentence(
        out, f"one server for everything: {f'refused, as intended: {alone}' if alone else 'has room for it'}"
    )
    delays = ", ".join(f"{us} us" for us in ROUTE_US)
    table = table_of(COLUMNS, f"three servers, {delays} a route")
    for r in rows:
        held = " ".join(map(str, r.held))
        numbers = (f"{r.calls:,}", str(r.failed), f"{r.rate:,.0f}", f"{r.times:.2f}", f"{r.forecast:.2f}")
        table.add_row(r.placement, held, *numbers)
    print_table(out, table)
    out.print(picture.table(bars, out.width))
    failures.show(out)
    return 1 if failed else 0
