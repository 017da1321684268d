"""What the CPU benchmark's rows say: fraction of the ceiling that applies, ratio to the fastest peer, geometric means.

A point is (shape, scheme, threads, M).  Its shortest possible time is the larger of bytes over the read rate measured
in turns with it, and operations over the arithmetic peak of what the implementation multiplies with.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["EIGHT_BIT", "FOUR_BIT_PEERS", "OURS", "READ", "fraction", "main", "markdown", "merged", "summary"]

READ = "plain_read"
"""The row that holds the interleaved read: its gb_s is the ceiling of its point."""
OURS: tuple[str, ...] = ("cpu", "cpu_w4a8")
FOUR_BIT_PEERS = ("torch_int4pack", "onnxruntime_qmoe", "onnxruntime_int8", "ggml")
EIGHT_BIT = ("cpu_w4a8", "onnxruntime_int8", "ggml")
"""Round activations to 8 bits: an error of 1 to 1.6 %."""

INTEGERS = ("int4", "int8", "mxfp4", "nvfp4")
"""Schemes whose codes are multiplied as integers; the others as bf16 or f32."""

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


def fraction(row: Record, read_gb_s: float, peaks: Mapping[str, float]) -> tuple[float, str]:
    """(shortest possible time over the measured one, "read" or "arithmetic": which of them bounds)."""
    integers = peaks["int8_gop_s"] if row["backend"] in EIGHT_BIT else peaks.get("int16_gop_s", 0.0)
    peak = max(integers if row["scheme"].startswith(INTEGERS) else 0.0, peaks["bf16_gflop_s"])
    shares = (row["gb_s"] / read_gb_s, "read"), (row["gflop_s"] / peak, "arithmetic")
    return max(shares)


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


def _cell(row: Record, point: Mapping[str, Record], peaks: Mapping[str, float]) -> str:
    text = f"{row['us'] / 1e3:.2f}"
    if READ in point and row["backend"] != READ:
        share, bound = fraction(row, point[READ]["gb_s"], peaks)
        text += f" ({share * 100:.0f} % {bound[0]})"
    found = ratio(point, row["backend"]) if row["backend"] in OURS else None
    return text if found is None else f"{text} **{found[0]:.2f}x**"


def markdown(result: Mapping[str, Any]) -> str:
    """The result of bench.cpu.run as tables: one a layer and number of threads."""
    found = points(result["rows"])
    out = []
    for layer in dict.fromkeys((s, q, t) for s, q, t, _ in found):
        shape, scheme, threads = layer
        mine = {M: point for (*head, M), point in found.items() if tuple(head) == layer}
        peaks = result["peaks"][f"{threads}"]
        names = dict.fromkeys(name for point in mine.values() for name in point)
        out.append(f"\n## {shape}, {scheme}, {threads} thread{'s' if threads > 1 else ''}\n")
        out.append("| implementation | rel. error | " + " | ".join(f"M={M}" for M in mine) + " |")
        out.append("|---|---|" + "---|" * len(mine))
        for name in names:
            error = max((p[name]["relative_error"] for p in mine.values() if name in p), default=0.0)
            cells = [_cell(p[name], p, peaks) if name in p else "" for p in mine.values()]
            shown = "" if name == READ else f"{error * 100:.2g} %"
            out.append(f"| {name} | {shown} | " + " | ".join(cells) + " |")
    if result["summary"]:
        out.append("\n## Times as fast as the fastest peer of each point\n")
        out.append("| shape | scheme | threads | backend | geometric mean | least |")
        out.append("|---|---|---|---|---|---|")
    line = "| {shape} | {scheme} | {threads} | {backend} | {geometric_mean:.2f} | {least:.2f} |"
    out += [line.format(**r) for r in result["summary"]]
    return "\n".join(out) + "\n"


def merged(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Results of several runs on one machine as one: rows of all, peaks of the first run that has them."""
    rows = [row for result in results for row in result["rows"]]
    peaks: dict[str, Any] = {}
    for result in results:
        peaks = {**result["peaks"], **peaks}
    return {"peaks": peaks, "rows": rows, "summary": summary(rows)}


def main(argv: Sequence[str]) -> int:
    """OUT.md RESULT.json...: the tables of several runs, which may have been cut by shape, scheme or threads."""
    out, *files = argv
    Path(out).write_text(markdown(merged([json.loads(Path(file).read_text()) for file in files])))
    return 0
