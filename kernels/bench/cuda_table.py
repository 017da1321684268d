"""What the GPU benchmark's points say, as Markdown: each beside its floor and beside other implementations.

    python kernels/bench/cuda_table.py OUT.md POINTS.csv... [--against kernels/bench/results/peers_h200.csv]

Other implementations come from a file of points that were timed earlier on the same kind of GPU by the same method:
shape, scheme, implementation, M, us, relative_error, wrong (1: not compared, its answer was
not usable).
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from expertd_kernels.bench.cuda import CudaMeasurement
from expertd_kernels.bench.points import read_points

__all__ = ["WEIGHT_ONLY", "Peer", "best_peer", "main", "markdown", "read_peers", "summary"]

WEIGHT_ONLY = 1e-2
"""Relative error up to which an implementation counts as one that rounds no activations (bf16 arithmetic stays below
8e-3, activations rounded to e4m3 cost 4e-2)."""
ROUNDED = 6e-2
"""The same for activations rounded to e4m3 in groups; 4-bit weights on e4m3 activations are above it."""

_POINT = frozenset(f.name for f in fields(CudaMeasurement))
Record = Mapping[str, Any]
Layer = tuple[str, str, str, str]


@dataclass(frozen=True)
class Peer:
    """One point of another implementation: `us` for the whole layer."""

    implementation: str
    us: float
    relative_error: float


def read_peers(path: Path) -> dict[tuple[str, str, int], list[Peer]]:
    """(shape, scheme, M) -> those whose answers were right.  KeyError or ValueError for a file of another form."""
    found: dict[tuple[str, str, int], list[Peer]] = {}
    with path.open(newline="") as f:
        for row in csv.DictReader(f):
            if int(row["wrong"]):
                continue
            peer = Peer(row["implementation"], float(row["us"]), float(row["relative_error"]))
            found.setdefault((row["shape"], row["scheme"], int(row["M"])), []).append(peer)
    return found


def best_peer(row: Record, peers: Mapping[tuple[str, str, int], Sequence[Peer]]) -> Peer | None:
    """The fastest other implementation in the accuracy class of `row`: of a weight-only row those that round no
    activations, of a row that rounds them all."""
    if row["routing"] != "uniform":
        return None
    limit = WEIGHT_ONLY if row["activations"] == "none" else ROUNDED
    able = [p for p in peers.get((row["shape"], row["scheme"], row["M"]), ()) if p.relative_error <= limit]
    return min(able, key=lambda p: p.us, default=None)


def _layer(row: Record) -> Layer:
    return row["shape"], row["scheme"], row["activations"], row["routing"]


def _cell(row: Record, peers: Mapping[tuple[str, str, int], Sequence[Peer]]) -> str:
    if row["us"] is None:
        return "no time"
    text = f"{row['us']:.{0 if row['us'] >= 100 else 1}f} {row['roofline_fraction'] * 100:.0f} %"
    best = best_peer(row, peers)
    return text if best is None else f"{text} **{best.us / row['us']:.2f}**"


def _mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def summary(
    rows: Iterable[Record], peers: Mapping[tuple[str, str, int], Sequence[Peer]]
) -> list[tuple[str, str, str, str, float, float, int]]:
    """(backend, shape, scheme, activations, geometric mean of peer / ours, least, points) of each layer that has peers,
    and one line of shape "all" over a backend's layers of a scheme where they are more than one."""
    groups: dict[tuple[str, str, str, str], list[float]] = {}
    for row in rows:
        best = best_peer(row, peers)
        if best is None or row["us"] is None:
            continue
        for shape in (row["shape"], "all"):
            key = row["backend"], shape, row["scheme"], row["activations"]
            groups.setdefault(key, []).append(best.us / float(row["us"]))
    lines = [(*key, _mean(v), min(v), len(v)) for key, v in groups.items()]
    single = {
        (b, q, a) for b, _, q, a in groups if sum((b2, q2, a2) == (b, q, a) for b2, _, q2, a2 in groups) == 2
    }  # a layer and "all", which says the same
    return [line for line in lines if line[1] != "all" or (line[0], line[2], line[3]) not in single]


def markdown(rows: Sequence[Record], peers: Mapping[tuple[str, str, int], Sequence[Peer]]) -> str:
    """Points of the bench as tables, above them the machine and the ceilings of each run that they come from; peers: as
    read_peers gives them, or empty."""
    told = [name for name in rows[0] if name not in _POINT]
    runs = dict.fromkeys(tuple(_fact(r[name]) for name in told) for r in rows)
    out = [
        "| " + " | ".join(told) + " |",
        "|" + "---|" * len(told),
        *("| " + " | ".join(run) + " |" for run in runs),
        "\nA cell: microseconds of the whole layer, % of the roofline"
        + (", **best other implementation / ours**." if peers else "."),
    ]
    for backend in dict.fromkeys(r["backend"] for r in rows):
        mine = [r for r in rows if r["backend"] == backend]
        tokens = sorted({r["M"] for r in mine})
        out.append(f"\n## {backend}\n")
        out.append("| layer | worst error | " + " | ".join(f"M={M}" for M in tokens) + " |")
        out.append("|---|---|" + "---|" * len(tokens))
        for layer in dict.fromkeys(map(_layer, mine)):
            points = {r["M"]: r for r in mine if _layer(r) == layer}
            errors = [r["relative_error"] for r in points.values()]
            worst = "not finite" if None in errors else f"{max(errors):.1e}"
            cells = [_cell(points[M], peers) if M in points else "-" for M in tokens]
            name = " ".join(part for part in layer if part not in ("none", "uniform"))
            out.append(f"| {name} | {worst} | " + " | ".join(cells) + " |")
    lines = summary(rows, peers)
    if lines:
        out.append("\n## Times as fast as the best other implementation of each point\n")
        out.append("| backend | layer | geometric mean | least | points |")
        out.append("|---|---|---|---|---|")
        for backend, shape, scheme, activations, mean, least, points_ in lines:
            name = " ".join(part for part in (shape, scheme, activations) if part != "none")
            out.append(f"| {backend} | {name} | {mean:.2f} | {least:.2f} | {points_} |")
    return "\n".join(out) + "\n"


def _fact(value: Any) -> str:
    return f"{value:.0f}" if isinstance(value, float) else str(value)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 for a file of another form."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    p.add_argument("out", type=Path, metavar="OUT.md")
    p.add_argument("points", type=Path, nargs="+", metavar="POINTS.csv")
    p.add_argument("--against", type=Path, metavar="CSV", help="points of other implementations")
    args = p.parse_args(argv)
    try:
        peers = read_peers(args.against) if args.against else {}
        args.out.write_text(markdown([row for file in args.points for row in read_points(file)], peers))
    except (OSError, ValueError, KeyError) as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
