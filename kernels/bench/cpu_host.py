"""The CPU kernel on a host that others use: `python kernels/bench/cpu_host.py [OLD] [--threads 1,2] [--busy 0,1,2]`.

For each number of tokens and each number of busy processes beside it (each computes without end), one layer is called
again and again with each number of threads, by this tree and by tree OLD, in turns of a part of a second.  So one run
has all columns, and what else the machine does hits all alike.  Printed: microseconds of a call, p50 and p99 over all
turns, as times of the same column's quiet run, and how many threads took part at the end of a turn, where the tree
says so.  --gap: milliseconds of rest between two calls: a server whose callers compute meanwhile.

OLD is a folder that holds a checkout whose library is built (python -m expertd_kernels.native.csrc.build).  Every
answer's relative error is checked first.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trees import Process

__all__ = ["Row", "main", "percentile", "table"]

HERE = Path(__file__).resolve()
TOLERANCE = 1e-2
SETTLE_S = 0.3
"""After the number of busy processes changed: the system moves them to their cores."""


@dataclass(frozen=True)
class Row:
    """us: of a call.  quiet50, quiet99: times of the same tree, threads, tokens and gap with no busy process; 0 = it
    was not measured.  used: threads at the end of the last turn, 0 = the tree does not say."""

    tree: str
    threads: int
    tokens: int
    gap_ms: float
    busy: int
    calls: int
    p50_us: float
    p99_us: float
    quiet50: float
    quiet99: float
    used: int


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of all are not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


class Side:
    """A layer of one tree: calls it as it is told."""

    def layer(self, shape: Sequence[int], scheme: str, tokens: Sequence[int], threads: Sequence[int]) -> dict[str, Any]:
        from expertd_kernels import detect_device, problem_of, reference, relative_error
        from expertd_kernels.backends import cpu
        from expertd_kernels.native import library as native
        from expertd_kernels.sources.synthetic import random_inputs, random_weights

        E, H, I, k = shape
        weights = random_weights(scheme, E, H, I)
        problem = problem_of(weights, detect_device("cpu"), top_k=k)
        packed = cpu.pack(weights, problem)
        self.experts = {n: cpu.CpuExperts(packed, problem, native.Context(threads=n)) for n in threads}
        self.inputs = {m: [random_inputs(m, H, E, k, seed=s) for s in range(4)] for m in tokens}
        worst = 0.0
        for sets in self.inputs.values():
            x, ids, w = sets[0]
            want = reference(weights, x[:4], ids[:4], w[:4])
            for experts in self.experts.values():
                out = x.new_full(x.shape, float("nan"))
                worst = max(worst, relative_error(experts(*sets[0], out=out)[:4], want))
        return {"error": worst, "level": native.context().level}

    def time(self, threads: int, tokens: int, seconds: float, gap_ms: float) -> dict[str, Any]:
        experts, sets = self.experts[threads], self.inputs[tokens]
        out = sets[0][0].new_empty(sets[0][0].shape)
        taken: list[float] = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            experts(*sets[len(taken) % len(sets)], out=out)
            taken.append((time.perf_counter() - start) * 1e6)
            if gap_ms:
                time.sleep(gap_ms / 1e3)
        used = getattr(experts.context, "threads_in_use", lambda: 0)()
        return {"us": taken, "used": used}


def side() -> None:
    made = Side()
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = getattr(made, asked.pop("do"))(**asked)
        except Exception as e:  # whatever it is, the parent reports it
            answer = {"fault": f"{type(e).__name__}: {e}"}
        print(json.dumps(answer), flush=True)


@contextmanager
def neighbours(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that compute without end; they are stopped until resumed."""
    made = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        for p in made:
            p.send_signal(signal.SIGSTOP)
        yield made
    finally:
        for p in made:
            p.kill()
            p.wait()


def measure(sides: Sequence[Process], args: argparse.Namespace) -> list[Row]:
    """Turns of all columns, one number of busy processes after the other, again and again."""
    taken: dict[tuple[str, int, int, float, int], list[float]] = {}
    used: dict[tuple[str, int, int, float, int], int] = {}
    with neighbours(max(args.busy)) as others:
        for round_ in range(args.rounds):
            for busy in args.busy:
                for i, p in enumerate(others):
                    p.send_signal(signal.SIGCONT if i < busy else signal.SIGSTOP)
                time.sleep(SETTLE_S)
                for tokens in args.tokens:
                    for gap in args.gap:
                        columns = [(s, n) for n in args.threads for s in sides]
                        for s, n in columns if round_ % 2 == 0 else reversed(columns):
                            got = s.ask("time", threads=n, tokens=tokens, seconds=args.seconds, gap_ms=gap)
                            key = (s.name, n, tokens, gap, busy)
                            taken.setdefault(key, []).extend(got["us"])
                            used[key] = got["used"]
    return [_row(key, taken, used[key]) for key in taken]


def _row(key: tuple[str, int, int, float, int], taken: dict[Any, list[float]], used: int) -> Row:
    name, threads, tokens, gap, busy = key
    p50, p99 = statistics.median(taken[key]), percentile(taken[key], 0.99)
    quiet = taken.get((name, threads, tokens, gap, 0))
    shares = (p50 / statistics.median(quiet), p99 / percentile(quiet, 0.99)) if quiet else (0.0, 0.0)
    return Row(name, threads, tokens, gap, busy, len(taken[key]), p50, p99, *shares, used)


def table(rows: Sequence[Row]) -> str:
    out = []
    for tokens, gap in dict.fromkeys((r.tokens, r.gap_ms) for r in rows):
        out += ["", f"{tokens} tokens, {gap:g} ms between calls",
                "tree threads busy   calls   p50 us   p99 us  of quiet p50   p99  in use"]  # fmt: skip
        for r in rows:
            if (r.tokens, r.gap_ms) == (tokens, gap):
                out.append(f"{r.tree:4s} {r.threads:7d} {r.busy:4d} {r.calls:7d} {r.p50_us:8.0f} {r.p99_us:8.0f}"
                           f" {r.quiet50:13.2f} {r.quiet99:5.2f} {r.used or '':>7}")  # fmt: skip
    return "\n".join(out[1:])


def _start(name: str, root: Path) -> Process:
    if not (root / "kernels" / "expertd_kernels").is_dir():
        raise SystemExit(f"{root}: want a tree with kernels/expertd_kernels in it")
    path = os.pathsep.join([*(str(root / part) for part in ("kernels", "proto")), os.environ.get("PYTHONPATH", "")])
    return Process(name, [sys.executable, str(HERE), "--side"], {**os.environ, "PYTHONPATH": path})


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    def floats(text: str) -> list[float]:
        return [float(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("old", nargs="?", type=Path, help="another tree, in turns with this one")
    parser.add_argument("--threads", type=numbers, default=[1, 2])
    parser.add_argument("--busy", type=numbers, default=[0, 1, 2], help="busy processes beside")
    parser.add_argument("--tokens", type=numbers, default=[1, 16])
    parser.add_argument("--gap", type=floats, default=[0.0, 5.0], help="milliseconds between calls")
    parser.add_argument("--scheme", default="int4_g128")
    parser.add_argument(
        "--shape", type=numbers, default=[32, 2048, 768, 8], help="experts, hidden, intermediate, top_k"
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a turn")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        side()
        return
    trees = [("new", HERE.parents[2]), *([("old", args.old.resolve())] if args.old else [])]
    sides = [_start(name, root) for name, root in trees]
    try:
        for s in sides:
            made = s.ask("layer", shape=args.shape, scheme=args.scheme, tokens=args.tokens, threads=args.threads)
            print(f"{s.name}: level {made['level']}, relative error {made['error']:.1e}", flush=True)
            if not made["error"] <= TOLERANCE:
                raise SystemExit(f"{s.name}: a relative error above {TOLERANCE}")
        rows = measure(sides, args)
    finally:
        for s in sides:
            s.close()
    print(table(rows))
    if args.json:
        facts = {"load": os.getloadavg(), "cpus": os.cpu_count(), "scheme": args.scheme, "shape": args.shape}
        args.json.write_text(json.dumps({**facts, "rows": [asdict(r) for r in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
