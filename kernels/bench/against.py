"""`python kernels/bench/against.py OLD --layer SHAPE:SCHEME ...`: is a kernel of this tree slower than in tree OLD?

OLD is a folder that holds a checkout, or its kernels/ and proto/ alone.  Each tree computes in a process of its own
(side.py), on the same weights, tokens and routes; at each point both are checked against the float32 reference with
poisoned outputs, then timed in turns: a round is a few calls of the one and a few of the other, and the next round
begins with the other.  A point's ratio is the median over the rounds of new / old, so that a clock that drifts or a
neighbour that computes hits both.  Points above --slower are measured again with three times the rounds.

    git worktree add /tmp/old COMMIT      (for --device cpu build its library there: python -m ...csrc.build)
    python kernels/bench/against.py /tmp/old --device cpu --layer qwen3-30b-a3b/16:int4_g128 --m 1,4,16,64
    python kernels/bench/against.py /tmp/old --device cuda --layer qwen3-30b-a3b:e4m3_block128:e4m3_group128@gluon_w8a8
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from expertd_kernels.bench.points import write_points
from trees import Process, tree

__all__ = ["Layer", "Point", "main", "markdown", "parse_layer", "ratios"]

HERE = Path(__file__).resolve()
AGAIN = 3
"""A point above the limit is measured once more, with so many times the rounds."""


@dataclass(frozen=True)
class Layer:
    """shape and scheme as the bench takes them; activations: how they are rounded; backend: "" = the oracle's."""

    shape: str
    scheme: str
    activations: str = "none"
    backend: str = ""


@dataclass(frozen=True)
class Point:
    """us: medians of all calls; ratio: median over the rounds of new / old; low, high: its quartiles."""

    shape: str
    scheme: str
    activations: str
    backend: str
    threads: int
    M: int
    old_us: float
    new_us: float
    ratio: float
    low: float
    high: float
    rounds: int
    old_error: float
    new_error: float
    tolerance: float

    @property
    def right(self) -> bool:
        return self.old_error <= self.tolerance and self.new_error <= self.tolerance


def parse_layer(text: str) -> Layer:
    """ "SHAPE:SCHEME[:ACTIVATIONS][@ROW]".  ValueError."""
    rest, _, row = text.partition("@")
    parts = rest.split(":")
    if len(parts) not in (2, 3) or not all(parts):
        raise ValueError(f"--layer {text!r}: want SHAPE:SCHEME[:ACTIVATIONS][@ROW], as qwen3-30b-a3b:int4_g128")
    return Layer(parts[0], parts[1], parts[2] if len(parts) == 3 else "none", row)


def ratios(old: Sequence[Sequence[float]], new: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """(median, lower quartile, upper quartile) over the rounds of new / old, each round by its medians."""
    each = [statistics.median(b) / statistics.median(a) for a, b in zip(old, new, strict=True)]
    if len(each) < 2:
        return each[0], each[0], each[0]
    low, _, high = statistics.quantiles(each, n=4, method="inclusive")
    return statistics.median(each), low, high


def _rounds(sides: Sequence[Process], rounds: int, seconds: float) -> list[list[list[float]]]:
    """[side][round] -> microseconds of its calls; who begins changes from round to round."""
    taken: list[list[list[float]]] = [[], []]
    for n in range(rounds):
        for which in (0, 1) if n % 2 == 0 else (1, 0):
            taken[which].append(sides[which].ask("time", seconds=seconds)["us"])
    return taken


def _both(sides: Sequence[Process], do: str, **more: Any) -> list[dict[str, Any]]:
    """Both at once: nothing is timed here."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda side: side.ask(do, **more), sides))


def measure(
    sides: Sequence[Process], layer: Layer, tokens: Sequence[int], args: argparse.Namespace, say: Callable[[str], None]
) -> list[Point]:
    """The points of one layer.  sides: old, new."""
    made = _both(sides, "layer", device=args.device, threads=args.threads, **asdict(layer))
    names = list(dict.fromkeys(m["backend"] for m in made))
    tolerance = min(m["tolerance"] for m in made)
    _both(sides, "warm", tokens=list(tokens))
    points = []
    for M in tokens:
        errors = [p["error"] for p in _both(sides, "point", M=M)]

        def timed(rounds: int, M: int = M, errors: Sequence[float] = errors) -> Point:
            old, new = _rounds(sides, rounds, args.seconds)
            ratio, low, high = ratios(old, new)
            us = [statistics.median(u for turn in side for u in turn) for side in (old, new)]
            return Point(layer.shape, layer.scheme, layer.activations, " -> ".join(names), args.threads, M, us[0],
                         us[1], ratio, low, high, rounds, errors[0], errors[1], tolerance)  # fmt: skip

        point = timed(args.rounds)
        if point.ratio > args.slower:
            point = timed(AGAIN * args.rounds)
        points.append(point)
        say(_line(point))
    return points


def _line(p: Point) -> str:
    wrong = "" if p.right else f"  WRONG: errors {p.old_error:.1e}, {p.new_error:.1e}, tolerance {p.tolerance:.0e}"
    how = "" if p.activations == "none" else f" {p.activations}"
    return (
        f"{p.shape} {p.scheme}{how} {p.backend} M={p.M}: {p.old_us:.1f} -> {p.new_us:.1f} us, {p.ratio:.3f}"
        f" ({p.low:.3f} to {p.high:.3f} in {p.rounds} rounds){wrong}"
    )


def markdown(points: Sequence[Point], machines: Sequence[dict[str, str]], slower: float) -> str:
    """A table with a line for each layer: at each M the new time and the ratio."""
    tokens = sorted({p.M for p in points})
    lines = [f"old: {json.dumps(machines[0])}", "", f"new: {json.dumps(machines[1])}", ""]
    lines += ["| layer | row | " + " | ".join(f"M={M}" for M in tokens) + " | mean |"]
    lines += ["|---" * (len(tokens) + 3) + "|"]
    groups: dict[tuple[str, str], dict[int, Point]] = {}
    for p in points:
        how = "" if p.activations == "none" else f", {p.activations}"
        groups.setdefault((f"{p.shape} {p.scheme}{how}", p.backend), {})[p.M] = p
    for (name, row), found in groups.items():
        cells = [f"{found[M].new_us:.1f} ({found[M].ratio:.3f})" if M in found else "" for M in tokens]
        mean = statistics.geometric_mean([p.ratio for p in found.values()])
        lines.append(f"| {name} | `{row}` | {' | '.join(cells)} | {mean:.3f} |")
    above = [p for p in points if p.ratio > slower]
    errors = max(max(p.old_error, p.new_error) for p in points)
    lines += [
        "",
        f"Microseconds of the new tree, in brackets new / old.  {len(points)} points, {len(above)} above {slower};"
        f" geometric mean {statistics.geometric_mean([p.ratio for p in points]):.3f};"
        f" largest relative error {errors:.1e}.",
    ]
    return "\n".join([*lines, *(f"Above: {_line(p)}." for p in above)]) + "\n"


def _compile(
    trees: Sequence[Callable[[], Process]], layers: Sequence[Layer], tokens: Sequence[int], args: argparse.Namespace
) -> None:
    """Fills the compilers' caches on disk by --jobs processes, as many of each tree, that take layers in turn."""
    half = (len(tokens) + 1) // 2
    parts = [part for part in (tokens[:half], tokens[half:]) if part]

    def work(start: Callable[[], Process], tasks: deque[tuple[Layer, Sequence[int]]]) -> None:
        process = start()
        try:
            while tasks:
                layer, sizes = tasks.popleft()
                process.ask("layer", device=args.device, threads=args.threads, **asdict(layer))
                process.ask("warm", tokens=list(sizes))
        except (RuntimeError, IndexError) as e:  # a fault is seen again, with its layer, when it is timed
            print(e, file=sys.stderr)
        finally:
            process.close()

    each = max(1, args.jobs // len(trees))
    with ThreadPoolExecutor(each * len(trees)) as pool:
        for start in trees:
            tasks = deque((layer, part) for layer in layers for part in parts)
            for _ in range(each):
                pool.submit(work, start, tasks)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    p.add_argument("old", type=Path, metavar="OLD", help="the tree that stands for before")
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    p.add_argument("--layer", action="append", required=True, metavar="SHAPE:SCHEME[:ACTIVATIONS][@ROW]")
    p.add_argument("--m", default="1,8,64,512", metavar="LIST", help="numbers of tokens (1,8,64,512)")
    p.add_argument("--threads", type=int, default=1, help="cpu (default 1)")
    p.add_argument("--rounds", type=int, default=10, help="turns of each tree at a point (default 10)")
    p.add_argument("--seconds", type=float, default=0.02, help="of one turn (default 0.02)")
    p.add_argument("--slower", type=float, default=1.02, metavar="X", help="a ratio above which a point fails (1.02)")
    p.add_argument("--jobs", type=int, default=0, metavar="N", help="N processes compile all kernels first")
    p.add_argument("--budget", type=float, default=float("inf"), metavar="S", help="begin no layer after so many s")
    p.add_argument("--commits", default=",", metavar="OLD,NEW", help="where the trees are no checkouts")
    p.add_argument("--csv", type=Path, metavar="FILE")
    p.add_argument("--out", type=Path, metavar="FILE", help="the table as Markdown")
    return p


def _write(points: Sequence[Point], machines: Sequence[dict[str, str]], args: argparse.Namespace) -> None:
    if args.csv:
        facts = {f"{who}_{k}": v for who, m in zip(("old", "new"), machines, strict=True) for k, v in m.items()}
        write_points(args.csv, [{**asdict(p), **facts} for p in points])
    if args.out:
        args.out.write_text(markdown(points, machines, args.slower))


def main(argv: Sequence[str] | None = None, new: Path = HERE.parents[2]) -> int:
    """Exit code 1 where a point is slower than --slower or wrong, a layer could not be measured, or none was."""
    args = parser().parse_args(argv)
    begin = time.monotonic()
    say = partial(print, file=sys.stderr, flush=True)
    try:
        layers = [parse_layer(text) for text in args.layer]
        commits = args.commits.split(",")
        trees = [tree("old", args.old.resolve(), commits[0]), tree("new", new, commits[-1])]
    except ValueError as e:
        say(str(e))
        return 1
    tokens = [int(m) for m in args.m.split(",")]
    if args.jobs:
        _compile(trees, layers, tokens, args)
        say(f"compiled after {time.monotonic() - begin:.0f} s")
    points, failed = [], []
    sides = [start() for start in trees]
    try:
        machines = _both(sides, "machine", device=args.device)
        for layer in layers:
            if time.monotonic() - begin > args.budget:
                failed.append(f"{layer}: not measured, the budget was spent")
                continue
            try:
                points += measure(sides, layer, tokens, args, say)
                _write(points, machines, args)  # after each layer: a run that is cut keeps what it had
            except RuntimeError as e:
                failed.append(str(e))
                for side in sides:
                    side.close()
                sides = [start() for start in trees]
    finally:
        for side in sides:
            side.close()
    if points:
        print(markdown(points, machines, args.slower))
    for text in failed:
        say(text)
    return 0 if points and not failed and all(p.right and p.ratio <= args.slower for p in points) else 1


if __name__ == "__main__":
    sys.exit(main())
