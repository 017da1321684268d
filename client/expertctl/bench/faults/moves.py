"""A tenth of the experts moves between servers under load, there and back: what the callers notice.

Two servers hold a half of every layer each, a third one nothing.  `expertctl apply` moves a tenth of the experts of
each layer to the third one, and back, while callers send at a fixed pace; before each move they are left alone for as
long, so that whatever else this machine does is in both.  The start of the command itself, which would run elsewhere,
is in neither.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from expertctl.bench.faults.failures import Failures
from expertctl.bench.faults.processes import ServerProcess
from expertctl.common.brief import fewer
from expertctl.common.columns import Column, table_of
from expertctl.common.counts import at_least, positive
from expertctl.common.percentiles import Durations
from expertctl.common.workload import LayerShape, drawn
from expertd.common.tables import console, print_sentence, print_table
from expertd.errors import UnavailableError
from expertd.placement import Placement, Server
from expertd_client.cluster import ExpertCluster

__all__ = ["COLUMNS", "MORE", "MoveMeasurement", "add_arguments", "run", "run_command"]

_LAYERS, _EXPERTS, _TOP_K, _HIDDEN = 4, 64, 4, 256
MODEL = ("--synthetic", "tiny-many:int4_g128", "--device", "cpu", "--threads", "1", "--max-tokens", "256")
HOLD = (("--experts", "0-31"), ("--experts", "32-63"), ("--layers", "none"))
MOVED = (0, 9, 19, 32, 41, 51)
"""Of 64: from both halves."""
PHASES = {"quiet": "before each move, as long as the last one took", "moving": "while expertctl apply moves experts"}
COLUMNS = (
    Column("phase", "of all rounds together", values=PHASES),
    Column("calls", "that ended in it"),
    Column("failed", "calls without an answer, or with a wrong one"),
    Column("p50 ms", "median time of a call", "p50_ms"),
    Column("p99 ms", "99th percentile of these times", "p99_ms"),
    Column("longest ms", "the longest of them", "longest_ms"),
)
MORE = (
    "The sentence below the table, in --json in the row `moving`:",
    "  moved: experts, over all layers and rounds",
    "  seconds: of all moves together",
    "  p99_ratio: p99 of a move over that of the quiet time before it, the median of the rounds",
    "  follow_s: the longest time from when the third server held its experts until it answered a call",
)
_BOUND = 2e-2
_REST_S, _QUIET_S, _NEVER_S = 1.0, 4.0, 99.0
_FOLLOW_S = 30.0
"""So long a new replica has to answer its first call."""


@dataclass
class MoveMeasurement:
    """One phase over all rounds: "quiet" or "moving".  p99_ratio: of rounds, the median of the moving p99 over that of
    the quiet time before; follow_s: the longest time from a server's commit until it answered a call."""

    phase: str
    calls: int
    failed: int
    p50_ms: float
    p99_ms: float
    longest_ms: float
    moved: int = 0
    seconds: float = 0.0
    p99_ratio: float = 0.0
    follow_s: float = 0.0


@dataclass
class _Seen:
    """What callers saw: seconds by phase and round; calls that failed, with their phase; when the third server
    answered."""

    times: dict[tuple[str, int], Durations] = field(default_factory=dict)
    failures: Failures = field(default_factory=Failures)
    answered_s: list[float] = field(default_factory=list)


class _Paced:
    """Callers with so many calls a second each; each answer is checked."""

    def __init__(self, cluster: ExpertCluster, third: str, callers: int, pace: float, tokens: int) -> None:
        self.seen, self.phase = _Seen(), ("warm", 0)
        self._cluster, self._third, self._pace = cluster, third, pace
        self._stop = threading.Event()
        rng = np.random.default_rng(0)
        shapes = [LayerShape(n, _HIDDEN, _EXPERTS, _TOP_K) for n in range(_LAYERS)]
        self._requests = [drawn(rng, tokens, shapes[n % _LAYERS], 0.0) for n in range(16)]
        self._expected = [np.asarray(cluster.forward_request(r).output, np.float32) for r in self._requests]
        self._threads = [threading.Thread(target=self._run, args=(n,), name="expertd-caller") for n in range(callers)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def followed_s(self, committed_s: float) -> float:
        """How long after it held its experts the third server answered; _NEVER_S = it has not."""
        while time.monotonic() < committed_s + _FOLLOW_S:
            if after := [s for s in list(self.seen.answered_s) if s >= committed_s]:
                return after[0] - committed_s
            time.sleep(0.01)
        return _NEVER_S

    def _run(self, first: int) -> None:
        n, next_s = first, time.monotonic() + first / self._pace / len(self._threads)
        while not self._stop.wait(max(0.0, next_s - time.monotonic())):
            phase, begin_s = self.phase, time.monotonic()
            why = self._call(n % len(self._requests))
            if why:
                self.seen.failures.failed(begin_s, why, phase[0])
            else:
                self.seen.times.setdefault(phase, Durations()).add(time.monotonic() - begin_s)
            n, next_s = n + 1, max(next_s + 1 / self._pace, time.monotonic() - 1.0)

    def _call(self, n: int) -> str | Exception:
        try:
            answer = self._cluster.forward_request(self._requests[n])
        except Exception as error:
            return error
        if any(part.server == self._third for part in answer.parts):
            self.seen.answered_s.append(time.monotonic())
        want = self._expected[n]
        off = float(np.linalg.norm(np.asarray(answer.output, np.float32) - want) / np.linalg.norm(want))
        return "" if off <= _BOUND else f"wrong: {off:.1e} away from what was expected"


def run(rounds: int, callers: int = 4, pace: float = 20.0, tokens: int = 8) -> tuple[list[MoveMeasurement], Failures]:
    """The two rows, and the calls that failed."""
    with ExitStack() as stack:
        options = ("--admin-listen", "127.0.0.1:0")
        servers = [stack.enter_context(ServerProcess([*MODEL, *hold, *options])) for hold in HOLD]
        addresses = [server.ready() for server in servers]
        cluster = stack.enter_context(ExpertCluster(addresses))
        paced = _Paced(cluster, addresses[2], callers, pace, tokens)
        stack.callback(paced.close)
        time.sleep(_REST_S)
        file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "placement.json"
        spent_s, follow = _QUIET_S, list[float]()
        total_s = 0.0
        for n in range(rounds):
            file.write_text(_placement(addresses, n % 2 == 0, 2 * n + 2).to_json(), encoding="utf-8")
            paced.phase = ("quiet", n)
            time.sleep(spent_s)
            paced.seen.failures.happened(f"move {n} begins")
            begin_s, committed_s = _apply(file, paced, n)
            paced.seen.failures.happened(f"move {n} is over")
            spent_s = time.monotonic() - begin_s
            total_s += spent_s
            if n % 2 == 0:
                follow.append(paced.followed_s(committed_s))
            paced.phase = ("after", n)
            time.sleep(_REST_S)
        paced.close()
        moved = rounds * _LAYERS * len(MOVED)
        return _rows(paced.seen, rounds, moved, total_s, follow), paced.seen.failures


def _apply(file: Path, paced: _Paced, n: int) -> tuple[float, float]:
    """expertctl apply, as behind everybody else of this machine as it can be: when its first step began, and when the
    new replicas were committed."""
    command = [sys.executable, "-m", "expertctl.cli", "apply", str(file)]
    paced.phase = ("start", n)
    begin_s = committed_s = time.monotonic()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    ) as process:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, 19)
        assert process.stdout is not None
        before = ""
        for line in process.stdout:
            if "loading" in line:
                paced.phase = ("moving", n)
                begin_s = time.monotonic()
            if "more replicas" in before:
                committed_s = time.monotonic()
            before = line
    if process.returncode:
        raise UnavailableError(f"expertctl apply ended with {process.returncode}: {before}")
    return begin_s, committed_s


def _placement(addresses: Sequence[str], away: bool, epoch: int) -> Placement:
    """A tenth of the experts at the third server, or at home."""
    halves = [set(range(32)), set(range(32, 64)), set[int]()]
    if away:
        halves = [halves[0] - set(MOVED), halves[1] - set(MOVED), set(MOVED)]
    held = [{n: tuple(sorted(e)) for n in range(_LAYERS) if e} for e in halves]
    servers = tuple(Server(a, layers) for a, layers in zip(addresses, held, strict=True))
    return Placement(servers, dict.fromkeys(range(_LAYERS), _EXPERTS), epoch)


def _rows(seen: _Seen, rounds: int, moved: int, spent_s: float, follow: Sequence[float]) -> list[MoveMeasurement]:
    rows = []
    for phase in PHASES:
        every = Durations()
        for (name, _), times in seen.times.items():
            if name == phase:
                for value in times.values():
                    every.add(value)
        s, failed = every.summary(), seen.failures.about.count(phase)
        p50_ms, p99_ms, longest_ms = (round(1e3 * x, 2) for x in (s.p50_s, s.p99_s, s.max_s))
        rows.append(MoveMeasurement(phase, s.count + failed, failed, p50_ms, p99_ms, longest_ms))
    ratios = []
    for n in range(rounds):
        quiet, moving = (seen.times.get((phase, n), Durations()).summary().p99_s for phase in ("quiet", "moving"))
        ratios.append(moving / quiet if quiet else 0.0)
    last = rows[-1]
    last.moved, last.seconds, last.follow_s = moved, round(spent_s, 1), round(max(follow, default=0.0), 2)
    last.p99_ratio = round(statistics.median(ratios), 2)
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rounds", type=at_least(1), default=fewer(6), metavar="N", help="moves, there and back in turn (default: 6)"
    )
    parser.add_argument("--callers", type=at_least(1), default=4, metavar="N", help="client threads (default: 4)")
    parser.add_argument(
        "--pace", type=positive, default=20.0, metavar="N", help="calls per second of each thread (default: 20)"
    )
    parser.add_argument("--tokens", type=at_least(1), default=8, metavar="M", help="tokens of each call (default: 8)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run_command(args: argparse.Namespace) -> int:
    """Measures and prints; 1 where a call failed."""
    rows, why = run(args.rounds, args.callers, args.pace, args.tokens)
    if args.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "failures": [asdict(one) for one in why.first]}))
        return 1 if why else 0
    table = table_of(COLUMNS, "a tenth of the experts moves, there and back")
    for r in rows:
        numbers = (f"{r.calls:,}", f"{r.failed:,}", f"{r.p50_ms:.2f}", f"{r.p99_ms:.2f}", f"{r.longest_ms:.1f}")
        table.add_row(r.phase, *numbers)
    out, last = console(), rows[-1]
    print_table(out, table)
    print_sentence(
        out,
        f"{last.moved} experts moved in {last.seconds} s; p99 of a move over the quiet time before it, median:"
        f" {last.p99_ratio:.2f}; the new replica answered {last.follow_s:.2f} s after it held them, or sooner",
    )
    why.show(out)
    return 1 if why else 0
