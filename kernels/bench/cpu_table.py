"""Tables of the CPU benchmark's points: share of the ceiling that applies, ratio to the fastest peer, geometric means.

    python kernels/bench/cpu_table.py OUT.md POINTS.csv...     of several runs, cut by shape, scheme or threads

A point is (shape, scheme, threads, M).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from expertd_kernels.bench.cpu import OURS, READ, RUNS
from expertd_kernels.bench.points import read_points

__all__ = ["EIGHT_BIT", "FOUR_BIT_PEERS", "main", "markdown", "summary"]

FOUR_BIT_PEERS = ("torch_int4pack", "onnxruntime_qmoe", "onnxruntime_int8", "ggml")
EIGHT_BIT = ("cpu_w4a8", "onnxruntime_int8", "ggml")
"""Round activations to 8 bits: an error of 1 to 1.6 %."""

Record = Mapping[str, Any]
Point = tuple[str, str, int, int]


def _point(row: Record) -> Point:
    return row["shape"], row["scheme"], row["threads"], row["M"]


def points(rows: Iterable[Record]) -> dict[Point, dict[str, Record]]:
    """Point -> backend -> row."""
    found: dict[Point, dict[str, Record]] = {}
    for row in rows:
        found.setdefault(_point(row), {})[row["backend"]] = row
    return found


def ratio(point: Mapping[str, Record], ours: str) -> tuple[float, str] | None:
    """(times as fast as the fastest peer, its name): of the 4-bit peers; for `cpu_w4a8` those that round as it does."""
    if ours not in point:
        return None
    names = [n for n in FOUR_BIT_PEERS if n in point and (ours != "cpu_w4a8" or n in EIGHT_BIT)]
    if not names:
        return None
    best = min(names, key=lambda name: float(point[name]["us"]))
    return point[best]["us"] / point[ours]["us"], best


def _mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def summary(rows: Iterable[Record]) -> list[dict[str, Any]]:
    """For each shape, scheme, number of threads and backend of ours: geometric mean and least of the ratios to the
    fastest peer of each M.  A layer without a peer has no line."""
    groups: dict[tuple[str, str, int, str], list[float]] = {}
    for (shape, scheme, threads, _), point in points(rows).items():
        for ours in OURS:
            found = ratio(point, ours)
            if found is not None:
                groups.setdefault((shape, scheme, threads, ours), []).append(found[0])
    return [
        {"shape": s, "scheme": q, "threads": t, "backend": b, "geometric_mean": _mean(r), "least": min(r)}
        for (s, q, t, b), r in groups.items()
    ]


def _cell(row: Record, point: Mapping[str, Record]) -> str:
    text = f"{row['us'] / 1e3:.2f}"
    if row["backend"] not in (READ, RUNS):
        text += f" ({row['roofline_fraction'] * 100:.0f} % {row['bound'][0]}"
        text += f", {row['runs_fraction'] * 100:.0f} % s)" if row.get("runs_fraction") else ")"
    found = ratio(point, row["backend"]) if row["backend"] in OURS else None
    return text if found is None else f"{text} **{found[0]:.2f}x**"


def markdown(rows: Sequence[Record]) -> str:
    """Rows of the bench as tables: one a layer and number of threads."""
    found = points(rows)
    out = []
    for layer in dict.fromkeys((s, q, t) for s, q, t, _ in found):
        shape, scheme, threads = layer
        mine = {M: point for (*head, M), point in found.items() if tuple(head) == layer}
        names = dict.fromkeys(name for point in mine.values() for name in point)
        out.append(f"\n## {shape}, {scheme}, {threads} thread{'s' if threads > 1 else ''}\n")
        out.append("| implementation | rel. error | " + " | ".join(f"M={M}" for M in mine) + " |")
        out.append("|---|---|" + "---|" * len(mine))
        for name in names:
            error = max((p[name]["relative_error"] for p in mine.values() if name in p), default=0.0)
            cells = [_cell(p[name], p) if name in p else "" for p in mine.values()]
            shown = "" if name in (READ, RUNS) else f"{error * 100:.2g} %"
            out.append(f"| {name} | {shown} | " + " | ".join(cells) + " |")
    compared = summary(rows)
    if compared:
        out.append("\n## Times as fast as the fastest peer of each point\n")
        out.append("| shape | scheme | threads | backend | geometric mean | least |")
        out.append("|---|---|---|---|---|---|")
    line = "| {shape} | {scheme} | {threads} | {backend} | {geometric_mean:.2f} | {least:.2f} |"
    out += [line.format(**r) for r in compared]
    return "\n".join(out) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    p.add_argument("out", type=Path, metavar="OUT.md")
    p.add_argument("points", type=Path, nargs="+", metavar="POINTS.csv")
    args = p.parse_args(argv)
    args.out.write_text(markdown([row for file in args.points for row in read_points(file)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
