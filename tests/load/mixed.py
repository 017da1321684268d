"""Three CPU servers of different speed, each in a network namespace: planned, called, one killed, one slowed.

    python tests/load/mixed.py [--seconds 8] [--callers 32]        needs root, for the namespaces

    even       a third of the experts each, and copies of them at the next one
    planned    as `expertctl plan` says by their counted speed, with two copies of each expert, moved under load
    killed     the slowest one is ended by SIGKILL and comes back
    slowed     the quickest one is stopped two thirds of the time; nothing is moved yet
    replanned  by the speed that was counted meanwhile, moved under load

For each: calls, those that failed, routes a second, and what the plan says of it.  0.2 ms and 10 Gbit/s are added to
the cables where the kernel has netem, and the first line says whether.  The exit code is 1 where a call failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

from expertctl.bench.faults.netns import Namespace
from expertctl.bench.faults.processes import ServerProcess
from expertctl.bench.faults.unequal import _Load
from expertctl.planner import observe
from expertctl.planner.plan import PlacementPlan, plan
from expertctl.planner.problem import Problem, held_of, placement_of
from expertctl.rebalancing.rebalance import Options, Progress, Rebalancer
from expertd.placement import Placement
from expertd_client.cluster import ExpertCluster

LAYERS, EXPERTS = 4, 64
MODEL = ("--synthetic", "tiny-many:int4_g128", "--device", "cpu", "--threads", "1", "--max-tokens", "256")
ROUTE_US = (1000, 2000, 4000)
ROOM = 44
"""Experts of a layer at a server: two copies of each expert, and a few more."""
DELAY = ("delay", "100us", "rate", "10gbit")


def delayed(namespace: Namespace) -> bool:
    """Whether packets to and from it take 0.2 ms together."""
    inside = [*namespace.command, "tc", "qdisc", "add", "dev", "wire", "root", "netem", *DELAY]
    cable = ["tc", "qdisc", "add", "dev", namespace._cable, "root", "netem", *DELAY]
    return all(subprocess.run(c, capture_output=True).returncode == 0 for c in (inside, cable))


@contextmanager
def slowed(server: ServerProcess, period_s: float = 0.03) -> Iterator[None]:
    """It runs a third of the time."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(period_s / 3):
            server.stop()
            over.wait(2 * period_s / 3)
            server.go_on()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        server.go_on()


class Pool:
    """The servers, their load, and a row for each thing that happens."""

    def __init__(self, args: argparse.Namespace, stack: ExitStack) -> None:
        self.args, self.folder = args, stack.enter_context(tempfile.TemporaryDirectory())
        spaces = [stack.enter_context(Namespace()) for _ in ROUTE_US]
        netem = [delayed(space) for space in spaces].count(False) == 0
        print("network: 0.2 ms there and back, 10 Gbit/s" if netem else "network: cables as they are, without netem")
        self.servers = [
            stack.enter_context(ServerProcess([*MODEL, *self.options(n, space)], space))
            for n, space in enumerate(spaces)
        ]
        self.addresses = [s.ready() for s in self.servers]
        self.metrics = {s.address: s.said(r"metrics on http://(\S+)/metrics") for s in self.servers}
        cluster = stack.enter_context(ExpertCluster(self.addresses))
        self.load = _Load(cluster, args.callers, 4, 0.5)
        stack.callback(self.load.close)
        time.sleep(1.0)

    def options(self, n: int, space: Namespace) -> list[str]:
        third = EXPERTS // 3 + 1
        mine = sorted({e % EXPERTS for e in range(n * third, n * third + ROOM)})
        experts = ",".join(map(str, mine))
        where = [f"--metrics-listen={space.address}:0", f"--admin-listen=unix:{self.folder}/{n}.sock"]
        return [
            "--experts",
            experts,
            "--test-route-us",
            str(ROUTE_US[n]),
            "--expert-metrics",
            "yes",
            "--insecure",
            *where,
        ]

    def measured(self, name: str, forecast: float) -> dict[str, observe.Counters]:
        """A row; what servers counted meanwhile."""
        failed = len(self.load.failures)
        before = observe.scrape(self.metrics)
        calls, rate = self.load.rate(self.args.seconds)
        counted = {a: c.since(before[a]) for a, c in observe.scrape(self.metrics).items()}
        self.row(name, calls, len(self.load.failures) - failed, rate, forecast)
        return counted

    def row(self, name: str, calls: int, failed: int, rate: float, forecast: float = 0.0) -> None:
        said = f"{forecast:14,.0f} {rate / forecast:8.2f}" if forecast else f"{'-':>14} {'-':>8}"
        print(f"{name:10} {calls:7} {failed:7} {rate:12,.0f} {said}", flush=True)

    def planned(self, counted: dict[str, observe.Counters]) -> tuple[Problem, PlacementPlan, Placement]:
        """As expertctl plan --copies 2 does."""
        described = observe.ask(self.addresses)
        now = Placement.from_describe(described)
        machines = {a: observe.Machine(experts=ROOM) for a in self.addresses}
        loads = observe.loads_of(counted.values(), now.num_experts)
        problem = observe.problem_of(loads, observe.places_of(machines, described, counted, LAYERS))
        return problem, plan(problem, held_of(problem, now), least=2), now

    def move(self, problem: Problem, found: PlacementPlan, now: Placement) -> None:
        target = placement_of(problem, found.held, now.epoch + 1, now.fingerprint)
        with closing(Rebalancer(target, options=Options())) as mover:
            mover.run(Progress())

    def killed(self) -> None:
        """The slowest one, under load."""
        failed, calls, routes, begin = len(self.load.failures), self.load.calls, self.load.routes, time.monotonic()
        self.servers[-1].kill()
        time.sleep(self.args.seconds)
        calls, took = self.load.calls - calls, time.monotonic() - begin
        self.row("killed", calls, len(self.load.failures) - failed, (self.load.routes - routes) / took)
        self.servers[-1].restart()
        self.metrics[self.servers[-1].address] = self.servers[-1].said(r"metrics on http://(\S+)/metrics")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--callers", type=int, default=32)
    args = parser.parse_args(argv)
    with ExitStack() as stack:
        pool = Pool(args, stack)
        print(f"{'':10} {'calls':>7} {'failed':>7} {'routes/s':>12} {'plan says':>14} {'of it':>8}")
        counted = pool.measured("even", 0.0)
        problem, found, now = pool.planned(counted)
        pool.move(problem, found, now)
        pool.measured("planned", found.after.rate)
        pool.killed()
        with slowed(pool.servers[0]):
            counted = pool.measured("slowed", 0.0)
            problem, found, now = pool.planned(counted)
            print(
                f"{'':10} the plan says {found.before.rate if found.before else 0:,.0f} routes/s of what is there now"
            )
            pool.move(problem, found, now)
            pool.measured("replanned", found.after.rate)
        for one in pool.load.failures.first:
            print(f"FAULT: {one}")
        return 1 if len(pool.load.failures) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
