"""Peak, normal times, and then more than the peak: of each way in turn, on one server.

busy       answers a second in a closed loop that always has enough under way
normal     open loops at half of that, without deadlines; the median of their p99 times `slack` is the deadline of what
           follows
peak       the largest rate of an open loop that is answered in time (expertctl.bench.overload.peak): a closed loop of
           few requests is no bound, because batches grow with what waits
load       open loops at multiples of the peak, each request with that deadline
"""

from __future__ import annotations

import asyncio
import os
import shlex
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from expertctl.bench.faults.processes import ServerProcess
from expertctl.bench.overload import bare as bare_server
from expertctl.bench.overload.clients import OverloadClients
from expertctl.bench.overload.loop import LoopClock
from expertctl.bench.overload.peak import Trial, largest
from expertctl.bench.overload.tally import OverloadMeasurement, OverloadTally
from expertctl.common.workload import layer_shapes, requests
from expertctl.load.selector import run_precisely
from expertd.errors import ExpertdError
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.clients.async_client import AsyncExpertClient
from expertd_client.requests.request import Request

__all__ = ["BARE_WAYS", "MODEL", "PACED", "NotMeasured", "OverloadPlan", "measure", "normal_p99_s"]

MODEL = ("--synthetic", "qwen1.5-moe-a2.7b:int4_g128", "--layers", "0", "--device", "cpu", "--threads", "1")
"""The server that is started where no address is given: its kernel has one thread, so that two cores are enough, and
takes so long for few bytes that it is what limits."""
PACED = ("--batch-us", "4000", "--row-us", "1200", "--hidden-size", "2048")
"""Of `expertd-echo`: a kernel that is a clock, whose capacity is the same whatever else the machine does."""
BARE_WAYS = ("streams", "one-stream", "synthetic")
"""Those that a bare server is compared in."""
_TCP = ("--tcp-listen", "127.0.0.1:0")
_DESCRIBE_S = 30.0
_NORMAL, _NORMALS = 0.5, 3
"""The load that is normal, of the busy rate, and how often it is measured: every row hangs on its p99, and one pause of
the machine makes that of one measurement any size."""
_LEAST = 100
"""Requests of a trial for the peak, where the time allows."""


@dataclass(frozen=True, slots=True)
class OverloadPlan:
    """address: None = a server of its own, or one that keeps time (`paced`); server: its options, None = MODEL or
    PACED.  cores: of the servers that it starts, and its own; None = whatever the system gives.  in_flight: of the
    closed loop; tokens: M of a request; slack: deadline over the normal p99; seconds: of each measurement.
    bare: each load once more on a bare server, where the way is gRPC's."""

    address: str | None = None
    server: Sequence[str] | None = None
    paced: bool = False
    ways: Sequence[str] = ("streams", "one-stream", "synthetic", "shm", "tcp")
    loads: Sequence[float] = (2.0, 10.0)
    callers: int = 4
    in_flight: int = 32
    tokens: int = 8
    slack: float = 4.0
    seconds: float = 5.0
    bare: bool = False
    cores: tuple[int, int] | None = None

    def command(self) -> list[str]:
        """Options of the server that is started where there is no address."""
        options = list((PACED if self.paced else MODEL) if self.server is None else self.server)
        if "tcp" in self.ways and not self.paced and "--tcp-listen" not in options:  # echo has TCP always
            options += _TCP
        return options

    def named(self) -> str:
        """What is measured: an address, or the command of the server that is started."""
        return self.address or f"{'expertd-echo' if self.paced else 'expertd serve'} {shlex.join(self.command())}"


@dataclass(frozen=True, slots=True)
class NotMeasured:
    """A way of which nothing could be measured."""

    way: str
    why: str


def measure(plan: OverloadPlan) -> Iterator[OverloadMeasurement | NotMeasured]:
    """A row for each way and load; a way that is not to be had does not keep others from being measured."""
    with ExitStack() as stack:
        started, bare = [], ""
        if plan.address is None:
            command, module = ("", "expertd_echo") if plan.paced else ("serve", "expertd_server.commands.cli")
            started.append(stack.enter_context(ServerProcess(plan.command(), command=command, module=module)))
            plan = replace(plan, address=started[0].ready())
        watched = Watched(started[0].pid if started else 0)
        if plan.bare:
            started.append(stack.enter_context(ServerProcess([], command="refuse", module=bare_server.__name__)))
            bare = started[-1].ready()
        if plan.cores is not None:
            for pid, core in (*((s.pid, plan.cores[0]) for s in started), (os.getpid(), plan.cores[1])):
                _pin(pid, core)
        for way in plan.ways:
            clock = LoopClock()
            try:
                rows = run_precisely(_way(plan, way, clock, watched, bare), clock)
            except (ExpertdError, ValueError) as error:  # ValueError: no rate is answered in time
                yield NotMeasured(way, str(error))
            else:
                yield from rows


async def _way(plan: OverloadPlan, way: str, clock: LoopClock, server: Watched, bare: str) -> list[OverloadMeasurement]:
    """bare: address of a bare server, "" = none."""
    assert plan.address is not None
    described = await _describe(plan.address)
    shape = layer_shapes(described, None, None)[:1]
    synthetic = way == "synthetic"

    def fresh() -> Iterator[Request]:
        return requests(shape, plan.tokens, 0.0, not synthetic, 0, digest=synthetic)

    async def beside(rate: float, deadline_s: float) -> OverloadTally | None:
        if not bare or way not in BARE_WAYS:
            return None
        others = OverloadClients(bare, way, plan.callers, clock)
        try:
            await others.open()
            return (await others.open_loop(fresh(), rate, plan.seconds, deadline_s))[0]
        finally:
            await others.close()

    callers = OverloadClients(plan.address, way, plan.callers, clock)
    try:
        await callers.open()
        await callers.closed_loop(fresh(), plan.in_flight, plan.seconds / 4)
        busy, _ = await callers.closed_loop(fresh(), plan.in_flight, plan.seconds)
        if not busy:
            raise ValueError(f"--seconds: got {plan.seconds:g} s without an answer, want more")

        async def normal() -> OverloadTally:
            return (await callers.open_loop(fresh(), _NORMAL * busy, plan.seconds, None))[0]

        deadline_s = plan.slack * await normal_p99_s(normal)

        async def tried(rate: float) -> Trial:
            seconds = min(2 * plan.seconds, max(plan.seconds / 2, _LEAST / rate))
            tally, _ = await callers.open_loop(fresh(), rate, seconds, deadline_s)
            await asyncio.sleep(deadline_s)
            behind = tally.lateness.summary().p99_s > deadline_s / 2
            return Trial(rate, len(tally.answers) / max(1, tally.sent), behind)

        peak = await largest(tried, busy)
        rows = []
        for load in plan.loads:
            server.begin()
            tally, wall_s = await callers.open_loop(fresh(), load * peak.per_s, plan.seconds, deadline_s)
            cpu, rss_mb = server.end()
            bare_tally = await beside(load * peak.per_s, deadline_s)
            rows.append(tally.row(way, load, deadline_s, peak, wall_s, cpu, rss_mb, bare_tally))
            await asyncio.sleep(0.2)
        return rows
    finally:
        await callers.close()


async def normal_p99_s(measured: Callable[[], Awaitable[OverloadTally]]) -> float:
    """Of the answers at the normal load: the median of several measurements of it."""
    return median([(await measured()).answers.summary().p99_s for _ in range(_NORMALS)])


def _pin(pid: int, core: int) -> None:
    """Every thread of a process, and those that they start."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), {core})


async def _describe(address: str) -> pb.DescribeResponse:
    client = AsyncExpertClient(address)
    try:
        return await client.describe(timeout_s=_DESCRIBE_S)
    finally:
        await client.close()


class Watched:
    """CPU time and memory of this process and of the server's.  pid: 0 = it is not ours to look at."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def begin(self) -> None:
        self._at = self._now()
        self._rss_mb = self._memory_mb()

    def end(self) -> tuple[tuple[float, float], tuple[float, float] | None]:
        """(parts of a core since begin(): here, there), (memory then, and now)."""
        wall_s, here_s, there_s = (b - a for a, b in zip(self._at, self._now(), strict=True))
        rss_mb = (self._rss_mb, self._memory_mb()) if self._pid else None
        return (here_s / wall_s, there_s / wall_s), rss_mb

    def _now(self) -> tuple[float, float, float]:
        there_s = 0.0
        if self._pid:
            fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
            there_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), time.process_time(), there_s

    def _memory_mb(self) -> float:
        if not self._pid:
            return 0.0
        pages = int(Path(f"/proc/{self._pid}/statm").read_text().split()[1])
        return round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)
