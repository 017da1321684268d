"""The kernel benchmark on a CPU: whole expert layers, correctness first, then microseconds.

At each point (shape, scheme, threads, M) everything is timed in turns: the backends, the peers, and two plain reads,
of as many contiguous bytes as the point's weights have and of what `cpu` itself reads, in its order.  So a neighbour's
load hits all alike, and a fraction of the read is a fraction of what the memory gave in that minute.  Processes are
several and new ones each time (cpu_turns.py): figures are medians over them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from expertd_kernels.bench.cpu_layer import OURS, READ, RUNS, Maker, shape_of
from expertd_kernels.bench.cpu_turns import Key, Sample, TurnsPlan, generation
from expertd_kernels.bench.points import write_points
from expertd_kernels.native import library as native
from expertd_kernels.oracle.probe import cpu_name
from expertd_kernels.weights.scheme import Element, Scheme

__all__ = ["OURS", "READ", "RUNS", "CpuMeasurement", "fraction", "machine", "run", "shape_of", "table"]

SHAPES = ("qwen3-30b-a3b",)
SCHEME = "int4_g128"
TOKENS, QUICK_TOKENS = (1, 4, 16, 64, 256), (1, 16, 256)
SECONDS, QUICK_SECONDS = 0.3, 0.1
PROCESSES = 3
BUDGET_S = 150.0
"""For each layer, where none is said."""
INTEGERS = ("int4", "int8", "mxfp4", "nvfp4")
"""Schemes whose codes are multiplied as integers; the others as bf16 or f32."""


@dataclass(frozen=True)
class CpuMeasurement:
    """One point of one backend: medians over the processes.  us: of a call; fastest_us, slowest_us: of the processes'
    medians.  gb_s: bytes of the distinct experts' weights, as formats store them, over the time.  gflop_s: 2 x
    multiply-adds of the routes over the time.  read_fraction, runs_fraction: time of a plain read in the same process,
    of as many contiguous bytes, and of the same runs, over the time.  roofline_fraction: shortest possible time over
    the measured one; bound: "read" or "arithmetic", whichever sets it."""

    shape: str
    scheme: str
    backend: str
    threads: int
    M: int
    us: float
    gb_s: float
    gflop_s: float
    roofline_fraction: float
    bound: str
    relative_error: float
    read_fraction: float
    runs_fraction: float
    fastest_us: float
    slowest_us: float
    processes: int


def machine() -> dict[str, str]:
    """Processor, instruction-set level, versions, commit."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    return {
        "cpu": cpu_name() or "unknown",
        "cores": str(len(native.physical_cpus())),
        "level": native.context().level,
        "torch": str(torch.__version__),
        "commit": commit,
    }


def fraction(scheme: str, gb_s: float, gflop_s: float, top: Mapping[str, float], eight_bits: bool) -> tuple[float, str]:
    """(shortest possible time over the measured one, which of "read" and "arithmetic" bounds).  top: the peaks, and the
    read_gb_s that was measured in turns with the point; eight_bits: activations are rounded to 8 bits."""
    integers = top["int8_gop_s"] if eight_bits else top.get("int16_gop_s", 0.0)
    peak = max(integers if scheme.startswith(INTEGERS) else 0.0, top["bf16_gflop_s"])
    return max((gb_s / top["read_gb_s"], "read"), (gflop_s / peak, "arithmetic"))


def row_of(key: Key, backend: str, found: Sequence[Sample], peaks: Mapping[str, float]) -> CpuMeasurement:
    """found: of one process each."""
    shape, scheme, threads, M = key

    def median(field: str) -> float:
        return float(statistics.median(getattr(s, field) for s in found))

    gb_s, gflop_s, read = median("gb_s"), median("gflop_s"), median("read_fraction")
    share, bound = fraction(scheme, gb_s, gflop_s, {**peaks, "read_gb_s": gb_s / read}, found[0].eight_bits)
    us, error = [s.us for s in found], max(s.relative_error for s in found)
    return CpuMeasurement(shape, scheme, backend, threads, M, median("us"), gb_s, gflop_s, share, bound, error, read,
               median("runs_fraction"), min(us), max(us), len(found))  # fmt: skip


HEAD = "row                  M       ms  (of processes)   GB/s of read of runs    error"


def table(rows: Sequence[CpuMeasurement]) -> str:
    """Lines of at most 80 characters."""
    out: list[str] = []
    for shape, scheme, threads in dict.fromkeys((r.shape, r.scheme, r.threads) for r in rows):
        mine = [r for r in rows if (r.shape, r.scheme, r.threads) == (shape, scheme, threads)]
        many = f"{threads} thread{'s' if threads > 1 else ''}"
        processes = max(r.processes for r in mine)
        out += ["", f"{shape} {scheme}, {many}, {processes} process{'es' if processes > 1 else ''}", HEAD]
        for name in dict.fromkeys(r.backend for r in mine):
            out += [_line(r) for r in mine if r.backend == name]
    return "\n".join(out[1:])


def _line(r: CpuMeasurement) -> str:
    spread = f"({_ms(r.fastest_us)}-{_ms(r.slowest_us)})"
    error = "" if r.backend in (READ, RUNS) else f"{r.relative_error:.1e}"
    shares = f"{r.read_fraction * 100:5.0f} % {r.runs_fraction * 100:5.0f} %"
    return f"{r.backend:16.16s} {r.M:5d} {_ms(r.us):>8s} {spread:>15s} {r.gb_s:6.1f} {shares} {error:>8s}".rstrip()


def _ms(us: float) -> str:
    """Three digits or more, without the unit."""
    return f"{us / 1e3:.{2 if us < 99_950 else 0}f}"


def _load_average() -> str:
    """Waiting and running processes: how busy others kept the machine."""
    return " ".join(f"{x:.1f}" for x in os.getloadavg()) if hasattr(os, "getloadavg") else "unknown"


def _plan(args: argparse.Namespace, others: Mapping[str, Maker]) -> TurnsPlan:
    """ValueError for a name that is not known."""
    quick = args.quick
    shapes = [shape_of(name).name for name in args.shape or SHAPES]
    schemes = [text for text in args.scheme or [SCHEME] if Scheme.parse(text)]

    def rows(scheme: str) -> Sequence[str]:
        four = Scheme.parse(scheme).element is Element.INT4
        return args.backend or (OURS if four else OURS[:1])

    return TurnsPlan(
        layers=[(shape, scheme) for shape in shapes for scheme in schemes],
        rows=rows,
        others=others,
        threads=args.threads or sorted({1, min(2, len(native.physical_cpus()))}),
        tokens=args.m or (QUICK_TOKENS if quick else TOKENS),
        seconds=args.seconds or (QUICK_SECONDS if quick else SECONDS),
        clock=args.clock,
    )


def _say_missing(
    plan: TurnsPlan, found: Mapping[Key, Mapping[str, Sequence[Sample]]], processes: int, say: Callable[[str], None]
) -> None:
    """Names the points that were not timed at all; the others' numbers of processes are in their rows."""
    every = [(*layer, t, M) for layer in plan.layers for t in plan.threads for M in plan.tokens]
    for shape, scheme, threads, M in [key for key in every if key not in found]:
        say(f"not run, the budget was spent: {shape} {scheme} threads {threads} M {M}")
    if any(len(samples) < processes for point in found.values() for samples in point.values()):
        say(f"some rows are of fewer than {processes} processes: the budget was spent, or a process ended")


def run(
    args: argparse.Namespace,
    others: Mapping[str, Maker] | None = None,
    more: Callable[[Sequence[Mapping[str, Any]]], str] = lambda rows: "",
) -> dict[str, Any]:
    """The bench's --device cpu.  args: as its parser gives them.  others: implementations beside the backends; more:
    what is printed below the tables.

    The ceilings of the result are those of the largest number of threads, `peaks` those of each; a point's own reads
    are its plain_read and same_runs rows.
    """
    begin = time.monotonic()
    facts = {**machine(), "clock": args.clock, "load_before": _load_average()}
    if args.clock == "cpu" and args.threads != [1]:
        raise ValueError("--clock cpu sees one thread only: want --threads 1")
    plan = _plan(args, others or {})
    processes = args.processes or (1 if args.quick else PROCESSES)
    budget = args.budget or BUDGET_S * len(plan.layers)
    peaks: dict[str, dict[str, float]] = {}
    found: dict[Key, dict[str, list[Sample]]] = {}
    said: set[str] = set()

    def say(text: str) -> None:
        if text not in said:
            print(text, file=sys.stderr, flush=True)
        said.add(text)

    try:
        for number in range(1, processes + 1):
            for key, point in generation(plan, lambda: time.monotonic() - begin > budget, peaks, say):
                times = ", ".join(f"{name} {_ms(s.us)}" for name, s in point.items())
                say(f"{number}/{processes} {' '.join(key[:2])} threads {key[2]} M {key[3]}: {times} ms")
                for name, sample in point.items():
                    found.setdefault(key, {}).setdefault(name, []).append(sample)
    except KeyboardInterrupt:
        say("interrupted: the result has what was timed so far")
    _say_missing(plan, found, processes, say)
    rows = [row_of(k, name, s, peaks[f"{k[2]}"]) for k, point in found.items() for name, s in point.items()]
    records = [asdict(r) for r in rows]
    facts["load_after"] = _load_average()
    if args.csv:
        write_points(Path(args.csv), [{**r, **facts, **peaks[f"{r['threads']}"]} for r in records])
    print(f"{facts}\n\n{table(rows)}{more(records)}", file=sys.stderr if args.json == "-" else sys.stdout)
    return {"machine": facts, "ceilings": peaks.get(f"{max(plan.threads)}", {}), "peaks": peaks, "rows": records}
