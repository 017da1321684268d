"""A server under mixed load for long: what it holds of memory, and whether it becomes slower.

    python tests/load/soak.py [--minutes 15] [--callers 6] [--json]

Callers come and go: each opens a connection (stream, shared memory, TCP, unary calls in turn), sends requests of 1 to
200 tokens with small pauses, some with deadlines that pass and some that it cancels, and leaves in order, or with
requests under way; now and then one is killed.  Every answer is compared with the first of its kind.  "control" is the
same caller's round trip to a bare server beside it, which does nothing but refuse (expertctl.bench.overload.bare): what
the machine and the callers' own process do to times, they do to both.  Drift is how p99 over the control's p99 of the
same third has changed from the first third to the last.  Exit code 1 = an error that was not asked for, a wrong answer,
memory that grew by more than --most-growth between the second tenth and the last, or a drift above --most-drift.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from hostile import Server

from expertd.errors import DeadlineExceededError, OverloadedError
from expertd_client.clients.client import ExpertClient
from expertd_client.transports.grpc.sync import GrpcTransport
from expertd_client.transports.shm.connection import ShmTransport
from expertd_client.transports.tcp.connection import TcpTransport

__all__ = ["soak"]

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = ["--synthetic", "tiny:int4_g128", "--device", "cpu", "--threads", "1", "--tcp", "on"]
WAYS = ("stream", "shm", "tcp", "unary")
SIZES = (1, 1, 1, 3, 8, 33, 200)
H, K, EXPERTS = 256, 2, 8
SAMPLE_S = 1.0
KILL_EVERY_S = 30.0


@dataclass
class Seen:
    """times: (end, seconds) of answers; rss: (time, bytes); control: (end, seconds) of refusals by the bare server."""

    times: list[tuple[float, float]] = field(default_factory=list)
    rss: list[tuple[float, int]] = field(default_factory=list)
    control: list[tuple[float, float]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def tensors(M: int) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(M)
    ids = np.stack([rng.permutation(EXPERTS)[:K] for _ in range(M)]).astype(np.int32)
    return rng.standard_normal((M, H), np.float32), ids, np.full((M, K), 0.5, np.float32)


REQUESTS = {M: tensors(M) for M in set(SIZES)}


def client_of(address: str, way: str) -> ExpertClient:
    if way == "unary":
        return ExpertClient(address, unary=True)
    offers = {"shm": [ShmTransport()], "tcp": [TcpTransport(address)], "stream": []}[way]
    return ExpertClient(GrpcTransport(address, offers=offers))


class Caller(threading.Thread):
    """Comes and goes until `end_s`."""

    def __init__(self, address: str, number: int, end_s: float, seen: Seen, first: dict[int, Any]) -> None:
        super().__init__(daemon=True)
        self._address, self._end_s, self._seen, self._first = address, end_s, seen, first
        self._rng = random.Random(number)
        self._number = number

    def run(self) -> None:
        while time.monotonic() < self._end_s:
            way = WAYS[self._number % len(WAYS)]
            self._number += 1
            try:
                self._visit(way)
            except Exception as e:
                self._seen.wrong.append(f"{way}: {type(e).__name__}: {e}")

    def _visit(self, way: str) -> None:
        client = client_of(self._address, way)
        try:
            for _ in range(self._rng.randrange(5, 200)):
                if time.monotonic() > self._end_s:
                    return
                self._ask(client, way)
                time.sleep(self._rng.random() * 0.02)
            if self._rng.random() < 0.5:  # and leave with these under way
                for M in (200, 200, 1):
                    client.submit(0, *REQUESTS[M])
                self._seen.counts["left with requests under way"] += 1
        finally:
            client.close()

    def _ask(self, client: ExpertClient, way: str) -> None:
        M, kind = self._rng.choice(SIZES), self._rng.random()
        if kind < 0.02:
            client.submit(1, *REQUESTS[M]).cancel()
            self._seen.counts["cancelled"] += 1
            return
        begin = time.monotonic()
        try:
            answer = client.forward(0, *REQUESTS[M], timeout_s=1e-5 if kind < 0.04 else 60.0)
        except (DeadlineExceededError, OverloadedError):
            if kind >= 0.04:
                raise
            self._seen.counts["no time"] += 1
            return
        end = time.monotonic()
        self._seen.times.append((end, end - begin))
        self._seen.counts[way] += 1
        output = np.array(answer.output)
        first = self._first.setdefault(M, output)
        if not np.allclose(output, first, rtol=0.02, atol=0.02 * float(np.abs(first).max())):
            self._seen.wrong.append(f"{way}, {M} tokens: another answer")
        answer.release()


class Control(threading.Thread):
    """Asks the bare server at `address` as often as a caller asks, until `end_s`."""

    def __init__(self, address: str, end_s: float, seen: Seen) -> None:
        super().__init__(daemon=True)
        self._address, self._end_s, self._seen = address, end_s, seen

    def run(self) -> None:
        rng = random.Random(0)
        with ExpertClient(self._address) as client:
            while time.monotonic() < self._end_s:
                x, ids, w = REQUESTS[rng.choice(SIZES)]
                begin = time.monotonic()
                with contextlib.suppress(OverloadedError):
                    client.forward(0, x, ids, w, timeout_s=60.0)
                end = time.monotonic()
                self._seen.control.append((end, end - begin))
                time.sleep(rng.random() * 0.02)


@contextlib.contextmanager
def bare_server() -> Iterator[str]:
    """Its address."""
    command = [sys.executable, "-m", "expertctl.bench.overload.bare", "refuse"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


def soak(server: Server, seconds: float, callers: int, control: str) -> Seen:
    """Every caller's life, and the server's memory once a second.  control: address of a bare server."""
    seen, first, begin = Seen(), dict[int, Any](), time.monotonic()
    threads: list[threading.Thread] = [Caller(server.address, n, begin + seconds, seen, first) for n in range(callers)]
    threads.append(Control(control, begin + seconds, seen))
    for thread in threads:
        thread.start()
    victim: subprocess.Popen[bytes] | None = None
    kill_at = begin + KILL_EVERY_S / 2
    while (now := time.monotonic()) < begin + seconds and server.process.poll() is None:
        seen.rss.append((now - begin, server.memory()))
        if now > kill_at:
            kill_at += KILL_EVERY_S / 2
            if victim is None:
                load = ["load", server.address, "--m", "32", "--concurrency", "4", "--requests", "1000000"]
                victim = subprocess.Popen(
                    [sys.executable, "-m", "expertctl.cli", *load],
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            else:
                victim.kill()
                victim.wait()
                victim = None
                seen.counts["killed"] += 1
        time.sleep(SAMPLE_S)
    if victim is not None:
        victim.kill()
        victim.wait()
    for thread in threads:
        thread.join(90)
        if thread.is_alive():
            seen.wrong.append("a caller hangs")
    seen.times = [(at - begin, took) for at, took in seen.times]
    seen.control = [(at - begin, took) for at, took in seen.control]
    return seen


def report(seen: Seen, seconds: float) -> dict[str, Any]:
    """Medians of memory over tenths of the time, and p99s over thirds of it."""

    def rss(low: float, high: float) -> float:
        return float(np.median([b for t, b in seen.rss if low * seconds <= t < high * seconds])) / 1e6

    def p99_ms(values: list[tuple[float, float]], third: int) -> float:
        took = [s for t, s in values if third * seconds / 3 <= t < (third + 1) * seconds / 3]
        return round(1e3 * float(np.quantile(took, 0.99)), 2)

    then, now = rss(0.1, 0.2), rss(0.9, 1.0)
    answers, control = ([p99_ms(values, n) for n in range(3)] for values in (seen.times, seen.control))
    return {
        "seconds": round(seconds), "answers": len(seen.times), "counts": dict(seen.counts), "wrong": len(seen.wrong),
        "examples": seen.wrong[:5], "rss_mb": [round(then, 1), round(now, 1)], "growth": round(now / then - 1, 4),
        "p99_ms": answers, "control_p99_ms": control,
        "drift": round(answers[2] / answers[0] / (control[2] / control[0]), 3),
        "longest_s": round(max(s for _, s in seen.times), 3),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--callers", type=int, default=6)
    parser.add_argument("--most-growth", type=float, default=0.02, metavar="PART")
    parser.add_argument("--most-drift", type=float, default=1.5, metavar="X")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(ROOT, Path(folder) / "log", OPTIONS)
        with bare_server() as control:
            seen = soak(server, 60 * args.minutes, args.callers, control)
        alive = server.process.poll() is None
        server.stop()
        traces = ["Traceback" + t[:2000] for t in (Path(folder) / "log").read_text().split("Traceback")[1:]]
    out = report(seen, 60 * args.minutes) | {"alive": alive, "tracebacks": len(traces), "first": traces[:3]}
    print(json.dumps(out) if args.json else "\n".join(f"{k}: {v}" for k, v in out.items()))
    bad = out["wrong"] or traces or not alive
    return int(bool(bad or out["growth"] > args.most_growth or out["drift"] > args.most_drift))


if __name__ == "__main__":
    raise SystemExit(main())
