"""New weights for a CPU server under half of its load: calls beside a control of the same run, and the update's rate.

    python tests/load/update_cpu.py [--threads 2] [--turns 4] [--layers 4] [--against OLD_TREE]

One `expertd serve` of a bf16 checkpoint, quantized to int4_g128.  A process calls it at equal gaps, at half of the rate
that it gets in a closed loop; a call's latency counts from when it was due.  Each turn has three parts of one length,
so all see the same machine: the calls alone ("control"), the same calls while the server reads another folder
("updates"), and, without calls, the same layers read, quantized and packed by a process of as many threads ("offline").
Printed are p50, p99 and the longest, calls answered of those that were due, the longest call that was under way at a
switch, and bytes a second of updates and offline.  With --against a server of another tree takes turns with this one.
Exit code 1 = a call that failed, or no update.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from update_gpu import SMALL, Clock, Load, Sizes, layer_of, ms, saved, within, worst_around

from expertd_client.weights import Updater
from expertd_kernels import decide, detect_device
from expertd_kernels.checkpoint import open_checkpoint
from expertd_kernels.native.library import use_threads
from expertd_kernels.packed.builder import pack, problem_of
from expertd_kernels.sources.quantized import QuantizedSource

ROOT = Path(__file__).resolve().parents[2]
SCHEME = "int4_g128"
AFTER_S = 0.1
"""After a switch: calls that fall into it may wait for what it left to be done."""


def served(folder: Path, threads: int, address: str, tree: Path) -> subprocess.Popen[str]:
    path = os.pathsep.join(str(tree / part) for part in ("proto", "kernels", "server", "client"))
    command = [sys.executable, "-m", "expertd_server.commands.cli", "serve", "--checkpoint", str(folder)]
    command += ["--quantize", SCHEME, "--device", "cpu", "--threads", str(threads)]
    command += ["--listen", address, "--admin-listen", "127.0.0.1:0"]
    env = os.environ | {"PYTHONPATH": path}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if "serving on " in line:
            threading.Thread(target=process.stdout.read, daemon=True).start()
            return process
    raise SystemExit("update_cpu: the server did not come up: " + "".join(said[-5:]))


def _offline(folder: str, layers: int, threads: int, top_k: int) -> float:
    """Seconds in which these layers are read, quantized and packed."""
    torch.set_num_threads(threads)
    use_threads(threads)
    begin = time.monotonic()
    source = QuantizedSource(open_checkpoint(Path(folder)), SCHEME)
    for n in range(layers):
        weights = source.load(n)
        problem = problem_of(weights, detect_device("cpu"), top_k=top_k)
        pack(decide(problem).require(), weights, problem)
    return time.monotonic() - begin


class Bench:
    """The server's load, its updates, and the same work without them."""

    def __init__(self, args: argparse.Namespace, address: str, folder: Path, load: Load, alone: ProcessPoolExecutor):
        self._args, self._folder, self.load, self._alone = args, str(folder), load, alone
        self.rate = 0.0
        self._updater = Updater([address], timeout_s=120)
        self.updates: list[tuple[float, float, float]] = []  # begin, ready, end of each
        self.control: list[tuple[float, float]] = []
        self.windows: list[tuple[float, float]] = []
        self.offline_s: list[float] = []

    def capacity(self) -> float:
        """Calls a second of a closed loop; turns have half of them."""
        self.load.at(0)
        while not self.load.answered:
            time.sleep(0.1)
        before, begin = self.load.answered, time.monotonic()
        time.sleep(self._args.seconds)
        found = (self.load.answered - before) / (time.monotonic() - begin)
        self.pause()
        self.rate = found / 2
        return found

    def pause(self) -> None:
        """Next to no calls."""
        self.load.at(2.0)
        time.sleep(0.5)

    def update(self) -> None:
        begin = time.monotonic()
        update = self._updater.begin(checkpoint=self._folder)
        update.prepare()
        ready = time.monotonic()
        update.commit()
        self.updates.append((begin, ready, time.monotonic()))

    def turn(self) -> None:
        self.load.at(self.rate)
        time.sleep(1)
        begin = time.monotonic()
        time.sleep(self._args.seconds)
        self.control.append((begin, time.monotonic()))
        begin = time.monotonic()
        while time.monotonic() - begin < self._args.seconds:
            self.update()
            time.sleep(AFTER_S)
        self.windows.append((begin, time.monotonic()))
        self.pause()
        begin = time.monotonic()
        while time.monotonic() - begin < self._args.seconds / 2:
            work = (self._folder, self._args.layers, self._args.threads, self._args.sizes.top_k)
            self.offline_s.append(self._alone.submit(_offline, *work).result())


def report(bench: Bench, nbytes: int) -> list[str]:
    """Prints what was found; what failed."""
    rate, (calls, failed) = bench.rate, bench.load.end()
    print(f"{'':10} {'answered':>9} {'p50 ms':>8} {'p99 ms':>8} {'max ms':>8}   of {rate:.0f} calls a second")
    tails, shares = {}, {}
    for name, windows in (("control", bench.control), ("updates", bench.windows)):
        each = [within(calls, [w]) for w in windows]
        shares[name] = statistics.median(len(found) / s / rate for found, s in each)
        tails[name] = statistics.median(ms(found, 0.99) for found, _ in each)
        every = np.concatenate([found for found, _ in each])
        print(f"{name:10} {shares[name]:9.3f} {ms(every, 0.5):8.2f} {tails[name]:8.2f} {ms(every, 1.0):8.1f}")
    usual = statistics.median(worst_around(calls, begin, begin + 0.005) for begin, _ in bench.control)
    worst = [1e3 * worst_around(calls, ready, end) for _, ready, end in bench.updates]
    took = statistics.median(ready - begin for begin, ready, _ in bench.updates)
    alone = statistics.median(bench.offline_s)
    print(
        f"throughput {shares['updates'] / shares['control']:.2f} of the control, p99"
        f" {tails['updates'] / tails['control']:.2f} times; longest call at a switch: median"
        f" {statistics.median(worst):.2f}, worst {max(worst):.2f} ms (usually {1e3 * usual:.2f})"
    )
    print(
        f"{len(bench.updates)} updates of {took:.2f} s: {nbytes / took / 1e9:.3f} GB/s; offline {alone:.2f} s:"
        f" {nbytes / alone / 1e9:.3f} GB/s; the update has {alone / took:.2f} of offline's rate"
    )
    print(f"{len(calls)} calls answered, {len(failed)} failed")
    return failed if bench.updates else ["no update was made"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--threads", type=int, default=max(1, len(os.sched_getaffinity(0))), help="of the server")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each part of a turn (5)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--callers", type=int, default=3, help="threads that call (3)")
    parser.add_argument("--against", type=Path, action="append", default=[], metavar="TREE", help="of older sources")
    parser.add_argument("--small", action="store_true", help="a tiny model: a test of this script")
    args = parser.parse_args()
    args.sizes = SMALL if args.small else Sizes(16, 1024, 512, 4, 8)
    if args.small:
        args.layers, args.turns, args.seconds = 2, 1, 1.0
    clock = Clock(0.0)
    spawn: Any = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folders = [Path(name) / "old", Path(name) / "new"]
        for seed, folder in enumerate(folders):
            folder.mkdir()
            saved(folder, args.sizes, args.layers, layer_of(args.sizes, seed))
        alone = stack.enter_context(ProcessPoolExecutor(1, spawn))
        alone.submit(_offline, str(folders[1]), args.layers, args.threads, args.sizes.top_k).result()
        benches = {}
        for tree in [*(tree.resolve() for tree in args.against), ROOT]:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                address = f"127.0.0.1:{free.getsockname()[1]}"
            stack.callback(served(folders[0], args.threads, address, tree).kill)
            load = Load(address, args.layers, args.sizes, processes=1, threads=args.callers)
            benches[tree] = Bench(args, address, folders[1], load, alone)
            clock.say(f"closed loop: {benches[tree].capacity():.0f} calls a second")
        for _ in range(args.turns):
            for bench in benches.values():
                bench.turn()
        failed = []
        for tree, bench in benches.items():
            print(f"--- {tree}" if args.against else "")
            failed += report(bench, args.layers * args.sizes.bytes)
    for why in failed[:5]:
        print(f"FAULT: {why}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
