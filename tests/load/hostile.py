"""What one caller can do to the others: attacks on a live server, and an honest caller beside each.

    python tests/load/hostile.py [ATTACK ...] [--before ROOT] [--seconds 6] [--priority 20] [--json]

For each attack a server of its own (`expertd serve`, one layer of Qwen3-30B-A3B, 8 of its experts, on the CPU), an
attacker as a process of its own, and a caller with 4 tokens every 5 ms on a connection of its own.  Prints what became
of the attack, how much memory the server took at most beside what it had, the honest caller's longest wait and his
failures, and how long SIGTERM took.  --before: the same against the tree of another commit at ROOT.  --priority: server
and honest caller run before the attacker and whatever else the machine does (real time, as `chrt -f`): where it is busy
with other things, waits are its own.  Exit code 1 = a wait beyond --most-wait seconds, a failure of the honest caller,
or --most-memory exceeded (a session holds 512 MiB of answers that nobody reads, all connections together 683 MiB of
half-sent messages and what comes between two looks, and what was freed stays with the allocator).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import grpc
import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))

import attacks

from expertd.v1 import expert_service_pb2 as pb

ROOT = Path(__file__).resolve().parents[2]
SERVE = ["--synthetic", "qwen3-30b-a3b:int4_g128", "--layers", "0", "--experts", "0-7", "--device", "cpu"]
SERVE += ["--threads", "1", "--grace-s", "15"]
H, TOP_K = 2048, 8
ENDS = ("long_shape", "offers", "burst")  # by themselves; they are waited for


class Server:
    """`expertd serve` of the tree at `root`, with what it holds of memory."""

    def __init__(self, root: Path, log: Path, args: Sequence[str] = SERVE, priority: int = 0) -> None:
        env = os.environ | {"PYTHONPATH": ":".join(str(root / p) for p in ("proto", "kernels", "server", "client"))}
        command = [sys.executable, "-m", "expertd_server.commands.cli", "serve", "--listen", "127.0.0.1:0"]
        command += ["--metrics-listen", "127.0.0.1:0", *args]
        if priority:
            command = ["chrt", "-f", str(priority), *command]
        self._log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=env | {"PYTHONUNBUFFERED": "1"}, cwd=root
            )
        self.address = self._until(r"serving on (\S+)")
        self.metrics = self._until(r"metrics on http://([^/]+)/")

    def _until(self, pattern: str) -> str:
        end = time.monotonic() + 120
        while time.monotonic() < end and self.process.poll() is None:
            if found := re.search(pattern, self._log.read_text()):
                return found[1]
            time.sleep(0.05)
        raise SystemExit(f"hostile: the server did not come up:\n{self._log.read_text()[-2000:]}")

    def memory(self) -> int:
        """Bytes that are resident now."""
        try:
            return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):
            return 0

    def stop(self) -> float:
        """Seconds from SIGTERM to its end; killed after 30."""
        begin = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        return time.monotonic() - begin


class Honest:
    """One request at a time, with a pause of 5 ms."""

    def __init__(self, address: str) -> None:
        self.longest_s, self.answers = 0.0, 0
        self.failures: Counter[str] = Counter()
        self._since = 0.0
        self._over = threading.Event()
        self._address = address
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        ids = np.tile(np.arange(TOP_K, dtype=np.int32), (4, 1))
        x = np.ones((4, H), np.float32)
        request = pb.ForwardRequest(
            layer=0,
            hidden_states=pb.Tensor(dtype=pb.DATA_TYPE_F32, shape=x.shape, raw=x.tobytes()),
            topk_ids=pb.Tensor(dtype=pb.DATA_TYPE_I32, shape=ids.shape, raw=ids.tobytes()),
            topk_weights=pb.Tensor(
                dtype=pb.DATA_TYPE_F32, shape=ids.shape, raw=np.full(ids.shape, 0.5, "f4").tobytes()
            ),
        ).SerializeToString()
        with grpc.insecure_channel(self._address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            forward = channel.unary_unary("/expertd.v1.ExpertService/Forward")
            while not self._over.is_set():
                self._since = time.monotonic()
                try:
                    forward(request, timeout=60)
                    self.answers += 1
                except grpc.RpcError as e:
                    reason = dict(e.trailing_metadata() or ()).get("expertd-reason", "")
                    self.failures[f"{e.code().name} {reason}".strip()] += 1
                self.longest_s = max(self.longest_s, time.monotonic() - self._since)
                self._since = 0.0
                self._over.wait(0.005)

    def end(self) -> None:
        """Look back at the last time; a request that still waits counts as far as it has come."""
        since = self._since
        if since:
            self.longest_s = max(self.longest_s, time.monotonic() - since)
        self._over.set()
        self._thread.join(5)


def run(name: str, root: Path, seconds: float, priority: int) -> dict[str, object]:
    """One attack on one tree."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(root, Path(folder) / "log", priority=priority)
        honest = Honest(server.address)
        time.sleep(1.0)
        honest.longest_s = 0.0
        base = most = server.memory()
        command = [sys.executable, str(Path(__file__).parent / "attacks.py"), name, server.address, server.metrics]
        if priority:
            command = ["chrt", "-o", "0", *command]
        begin = time.monotonic()
        attacker = subprocess.Popen([*command, str(seconds)], stdout=subprocess.PIPE, text=True)
        try:
            while attacker.poll() is None and time.monotonic() - begin < seconds + 30:
                most = max(most, server.memory())
                time.sleep(0.02)
                if time.monotonic() - begin > seconds and name not in ENDS:
                    break
            honest.end()  # before the attacker goes: what he holds up, he holds up now
            ended_s = server.stop()
        finally:
            attacker.kill()
            said = attacker.communicate()[0]
        return {
            "attack": name,
            "became": said.strip().splitlines()[-1] if said.strip() else "never answered",
            "memory_mb": round((most - base) / 1e6),
            "longest_wait_s": round(honest.longest_s, 3),
            "answers": honest.answers,
            "failures": dict(honest.failures),
            "sigterm_s": round(ended_s, 1),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=", ".join(attacks.ATTACKS))
    parser.add_argument("--before", type=Path, metavar="ROOT", help="a tree to compare with")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each attack")
    parser.add_argument("--most-wait", type=float, default=1.0, metavar="S")
    parser.add_argument("--most-memory", type=int, default=1200, metavar="MB")
    parser.add_argument("--priority", type=int, default=0, metavar="N", help="of server and honest caller: 1 to 99")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.priority:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(args.priority))
    table = Table(title="one caller against the others", show_lines=True)
    for column in ("attack", "tree", "became", "memory, MB", "honest: longest wait, s", "failures", "SIGTERM, s"):
        table.add_column(column, overflow="fold")
    rows, bad = [], False
    for name in args.attacks or attacks.ATTACKS:
        for tree, root in (("before", args.before), ("after", ROOT)):
            if root is None:
                continue
            row = {"tree": tree, **run(name, root.resolve(), args.seconds, args.priority)}
            rows.append(row)
            columns = ("attack", "tree", "became", "memory_mb", "longest_wait_s", "failures", "sigterm_s")
            table.add_row(*(str(row[c]) for c in columns))
            print(json.dumps(row) if args.json else f"{name}, {tree}: {row}", file=sys.stderr)
            over = row["longest_wait_s"] > args.most_wait or row["memory_mb"] > args.most_memory  # type: ignore[operator]
            bad |= tree == "after" and bool(over or row["failures"])
    if args.json:
        print(json.dumps(rows))
    else:
        Console(width=150).print(table)
    return int(bad)


if __name__ == "__main__":
    raise SystemExit(main())
