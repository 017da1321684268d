"""Calls while servers are given new weights: latency and throughput beside a control of the same run, and a soak.

    python tests/load/weight_updates.py [--updates 20] [--turns 3] [--callers 2]       the table
    python tests/load/weight_updates.py --soak 1000 [--kill-share 0.05]            one update after another, with kills

Two `expertd serve` of one half of the experts each, bf16 tensors in, int4_g128 out; callers in a closed loop, each call
of one layer through ExpertCluster.  The table takes turns: as many seconds with updates as without ("control"), so both
see the same machine.  Every answer is computed anew afterwards, in float32, from the weights of the version that it
names: a sum of two versions is found out.  The soak kills servers between two random steps of an update, starts them
again with --held, and looks at memory, at lost versions and at answers.  Exit code 1 = a call that failed, an answer
that is not of its version, a version that was lost, or memory that grew by more than --most-growth MiB.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "kit"))

import trained  # noqa: E402

from expertd.errors import ExpertdError  # noqa: E402
from expertd_client import ExpertCluster  # noqa: E402
from expertd_client.weights import UpdateFailedError, Updater  # noqa: E402
from expertd_kernels import reference  # noqa: E402
from expertd_kernels.checkpoint import open_checkpoint  # noqa: E402
from expertd_kernels.sources.quantized import QuantizedSource  # noqa: E402
from expertd_kernels.weights.quantize import scheme_named  # noqa: E402

SCHEME = "int4_g128"
M, KINDS = 8, 16
TOLERANCE = 0.02
"""Relative error of an answer: bf16 in and out.  Two versions' answers differ by more than 1."""
CALL_S = 120.0


class Server:
    """One half of the experts, at one address whatever happens to its process."""

    def __init__(self, folder: Path, half: int, held: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self._command = [sys.executable, "-m", "expertd_server.commands.cli", "serve", "--checkpoint", str(folder)]
        self._command += ["--shard", f"{half}/2", "--quantize", SCHEME, "--device", "cpu", "--threads", "1"]
        self._command += ["--listen", self.address, "--admin-listen", "127.0.0.1:0", "--held", str(held)]
        self.restarts = 0
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if "serving on " in line:
                threading.Thread(target=self._process.stdout.read, daemon=True).start()
                return
        raise SystemExit("weight_updates: a server did not come up")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def again(self) -> None:
        self.restarts += 1
        self.start()

    def rss_mib(self) -> float:
        text = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(text.split("VmRSS:")[1].split()[0]) / 1024


@dataclass
class Seen:
    """answers: of (version, input, output) those of each kind that were seen, by their bytes; seconds: of calls."""

    seconds: list[float] = field(default_factory=list)
    answers: dict[tuple[int, int, bytes], int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Callers:
    """Threads that call until stop()."""

    def __init__(self, cluster: ExpertCluster, count: int) -> None:
        self._cluster, self._stop, self.seen = cluster, threading.Event(), Seen()
        g = np.random.default_rng(5)
        self.inputs = [
            (
                torch.from_numpy(g.standard_normal((M, trained.H)).astype(np.float32)).bfloat16(),
                torch.from_numpy(np.argsort(g.random((M, trained.E)), 1)[:, : trained.K].astype(np.int32)),
                torch.from_numpy(g.uniform(0.2, 1.0, (M, trained.K)).astype(np.float32)),
            )
            for _ in range(KINDS)
        ]
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self, seed: int) -> None:
        rng, seen = random.Random(seed), self.seen
        while not self._stop.is_set():
            kind = rng.randrange(KINDS)
            begin = time.perf_counter()
            try:
                answer = self._cluster.forward(0, *self.inputs[kind], timeout_s=CALL_S)
            except ExpertdError as error:
                with seen.lock:
                    seen.failed.append(f"{error.reason}: {error.message}")
                continue
            took = time.perf_counter() - begin
            key = (answer.weights_version, kind, answer.output.view(torch.uint8).numpy().tobytes())
            with seen.lock:
                seen.seconds.append(took)
                seen.answers[key] = seen.answers.get(key, 0) + 1

    def take(self) -> list[float]:
        """Seconds of the calls since the last time."""
        with self.seen.lock:
            out, self.seen.seconds = self.seen.seconds, []
        return out

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def wrong(self, folder: Any) -> list[str]:
        """Answers that are not what the version that they name computes.  folder: of a version; None: there is none."""
        out = []
        named: dict[int, list[tuple[int, bytes, int]]] = {}
        for (version, kind, raw), times in self.seen.answers.items():
            named.setdefault(version, []).append((kind, raw, times))
        inputs = [torch.cat(parts) for parts in zip(*self.inputs, strict=True)]
        for version, answers in sorted(named.items()):
            path = folder(version)
            if path is None:
                out.append(f"{len(answers)} answers of version {version}, which nobody published")
                continue
            layer = QuantizedSource(open_checkpoint(path), scheme_named(SCHEME)).load(0)
            wanted = reference(layer, *inputs).split(M)
            for kind, raw, times in answers:
                got = torch.frombuffer(bytearray(raw), dtype=torch.bfloat16).view(M, -1).float()
                error = float((got - wanted[kind]).norm() / wanted[kind].norm())
                if not error < TOLERANCE:
                    out.append(f"{times} answers of version {version}: relative error {error:.3f}")
        return out


def published(updater: Updater, number: int, between: Any = lambda step: None) -> float:
    """Seconds that a version took.  between: called before each step, may kill."""
    tensors = trained.step(number)
    begin = time.perf_counter()
    update = updater.begin(number)
    try:
        between("put")
        update.put_all(tensors)
        between("prepare")
        update.prepare()
        between("commit")
    except BaseException:
        update.abort()
        raise
    update.commit()
    return time.perf_counter() - begin


_updater: Any = None


def _trainer(addresses: list[str]) -> None:
    """The start of the process that publishes: a trainer shares no interpreter with callers."""
    global _updater
    os.nice(10)
    _updater = Updater(addresses, timeout_s=30)


def _published(number: int) -> float:
    return published(_updater, number)


class Publisher:
    """Publishes versions, and has their checkpoints for the check."""

    def __init__(self, updater: Updater, folder: Path) -> None:
        self.updater, self._folder = updater, folder
        self.number = 1

    def folder(self, number: int) -> Path | None:
        """None: it was never published."""
        if not 1 <= number <= self.number:
            return None
        path = self._folder / str(number)
        return path if path.exists() else trained.saved(path, trained.step(number))

    def publish(self, between: Any = lambda step: None) -> float:
        """The next one, from this process.  One that fails has its number all the same: a server may have served it for
        a moment, and takes no version of it any more."""
        self.number += 1
        return published(self.updater, self.number, between)


def quantile(seconds: list[float], q: float) -> float:
    return 1e3 * float(np.quantile(seconds, q)) if seconds else float("nan")


def table(args: argparse.Namespace, callers: Callers, publisher: Publisher) -> list[str]:
    """Turns with updates and without; what is wrong."""
    rows: dict[str, list[tuple[int, float, list[float]]]] = {"control": [], "updates": []}
    took: list[float] = []
    addresses = [s.address for s in publisher.updater.servers]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _trainer, (addresses,)) as trainer:
        took.append(trainer.submit(_published, 2).result())
        publisher.number = 2
        for _ in range(args.turns):
            callers.take()
            begin = time.perf_counter()
            for _ in range(args.updates):
                took.append(trainer.submit(_published, publisher.number + 1).result())
                publisher.number += 1
            span = time.perf_counter() - begin
            found = callers.take()
            rows["updates"].append((len(found), span, found))
            time.sleep(span)
            found = callers.take()
            rows["control"].append((len(found), time.perf_counter() - begin - span, found))
    print(f"{'':10} {'calls/s':>10} {'p50 ms':>8} {'p99 ms':>8} {'max ms':>8}   (turns of each: {args.turns})")
    rates, tails = {}, {}
    for name, turns in rows.items():
        rate = statistics.median(n / s for n, s, _ in turns)
        tail = statistics.median(quantile(f, 0.99) for _, _, f in turns)
        every = [s for _, _, f in turns for s in f]
        rates[name], tails[name] = rate, tail
        print(f"{name:10} {rate:10.1f} {quantile(every, 0.5):8.2f} {tail:8.2f} {1e3 * max(every):8.1f}")
    rate, tail = rates["updates"] / rates["control"], tails["updates"] / tails["control"]
    each = f"{len(took)} updates, {statistics.median(took):.2f} s each (median)"
    print(f"throughput {rate:.2f} of the control, p99 {tail:.2f} times; {each}")
    return []


def soak(args: argparse.Namespace, callers: Callers, publisher: Publisher, servers: list[Server]) -> list[str]:
    """One update after another, with kills; what is wrong."""
    rng, faults, rss = random.Random(args.seed), [], []
    kills, refused, why = 0, 0, ""
    begin = time.perf_counter()
    end = begin + 60 * args.minutes

    def between(step: str) -> None:
        nonlocal kills
        if rng.random() < args.kill_share / 3:
            kills += 1
            victim = rng.choice(servers)
            victim.kill()
            victim.again()

    done = 0
    while done < args.soak and time.perf_counter() < end:
        try:
            publisher.publish(between)
        except (UpdateFailedError, ExpertdError) as error:
            refused += 1
            why = str(error)
            continue
        done += 1
        served = {versions[0].number for versions in publisher.updater.versions().values()}
        if served != {publisher.number}:
            faults.append(f"version {publisher.number} was committed, and {served} are served")
        rss.append(max(s.rss_mib() for s in servers))
    if why:
        print(f"the last one that was refused: {why}")
    tenth = max(1, len(rss) // 10)
    growth = statistics.median(rss[-tenth:]) - statistics.median(rss[tenth : 2 * tenth] or rss[:tenth])
    print(
        f"{done} updates in {time.perf_counter() - begin:.0f} s, {kills} servers killed, {refused} updates refused and"
        f" begun again; memory {growth:+.1f} MiB from the second tenth to the last, at {rss[-1]:.0f} MiB"
    )
    if not any(s.restarts for s in servers) and growth > args.most_growth:
        faults.append(f"memory grew by {growth:.1f} MiB")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--updates", type=int, default=20, help="of a turn (20)")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--callers", type=int, default=2)
    parser.add_argument(
        "--soak", type=int, default=0, metavar="N", help="so many updates in a row instead of the table"
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="at most, of the soak (60)")
    parser.add_argument(
        "--kill-share", type=float, default=0.05, help="of the soak's updates that lose a server (0.05)"
    )
    parser.add_argument("--most-growth", type=float, default=64.0, metavar="MIB")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        trained.saved(folder / "1", trained.step(1))
        servers = [Server(folder / "1", half, folder / f"held-{half}.json") for half in range(2)]
        for server in servers:
            stack.callback(server.kill)
        addresses = [server.address for server in servers]
        updater = stack.enter_context(Updater(addresses, timeout_s=30))
        cluster = stack.enter_context(ExpertCluster(addresses, timeout_s=CALL_S))
        callers = Callers(cluster, args.callers)
        publisher = Publisher(updater, folder)
        try:
            time.sleep(1)
            faults = soak(args, callers, publisher, servers) if args.soak else table(args, callers, publisher)
        finally:
            callers.stop()
        faults += callers.seen.failed[:5] + callers.wrong(publisher.folder)
        answers = sum(callers.seen.answers.values())
        versions = len({version for version, _, _ in callers.seen.answers})
        print(f"{answers} answers of {versions} versions checked, {len(callers.seen.failed)} calls failed")
    for fault in faults:
        print(f"FAULT: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
