"""`python kernels/bench/runs.py OLD,... NEW,...`: two commits, or two machines, point by point.

A run is a file that the bench wrote, --csv or --json.  Each side may be several, best taken in turns (old, new, old,
new), so that a warm or busy machine hits both; a point's time is the least of its runs.  Points that only one side has
are named, not counted.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from expertd_kernels.bench.points import read_points

__all__ = ["compare", "main", "read"]

KEYS = ("shape", "scheme", "activations", "backend", "routing", "threads", "M")
"""What makes a point; a bench that has no such column leaves it out."""

Point = tuple[tuple[str, Any], ...]


def read(files: Sequence[Path]) -> dict[Point, float]:
    """Least microseconds of each point that has a time.  ValueError for a file that is no result of the bench."""
    found: dict[Point, float] = {}
    for file in files:
        try:
            rows = json.loads(file.read_text())["rows"] if file.suffix == ".json" else read_points(file)
            for r in rows:
                if r["us"] is not None:
                    point = tuple((k, r[k]) for k in KEYS if k in r)
                    found[point] = min(found.get(point, math.inf), float(r["us"]))
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise ValueError(
                f"{file}: want a result of the bench (--csv or --json FILE): {type(e).__name__}: {e}"
            ) from None
    return found


def compare(old: Mapping[Point, float], new: Mapping[Point, float]) -> list[tuple[Point, float, float]]:
    """(point, old, new) of the points that both have, in the old order."""
    return [(p, us, new[p]) for p, us in old.items() if p in new]


def _mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _name(p: Point, skip: str = "") -> str:
    return " ".join(f"M={v}" if k == "M" else str(v) for k, v in p if k != skip and v not in ("none", None))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 where a group of points is slower than --slower, or nothing can be compared."""
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    for side in ("old", "new"):
        p.add_argument(side, type=lambda text: [Path(f) for f in text.split(",")], metavar=f"{side.upper()},...")
    p.add_argument("--slower", type=float, default=1.05, metavar="X", help="new / old of a group that fails (1.05)")
    args = p.parse_args(argv)
    try:
        old, new = read(args.old), read(args.new)
    except ValueError as e:
        print(e, file=sys.stderr)
        return 1
    groups: dict[str, list[float]] = {}
    for point, before, after in compare(old, new):
        print(f"{_name(point):70s} {before:10.1f} -> {after:10.1f} us  {after / before:6.3f}")
        groups.setdefault(_name(point, "M"), []).append(after / before)
    for side, points in (("old", old.keys() - new.keys()), ("new", new.keys() - old.keys())):
        for name in sorted(map(_name, points)):
            print(f"only in {side}: {name}")
    for name, ratios in groups.items():
        print(f"{name}: {_mean(ratios):.3f} of the old time over {len(ratios)} points, worst {max(ratios):.3f}")
    slower = [name for name, ratios in groups.items() if _mean(ratios) > args.slower]
    for name in slower:
        print(f"slower: {name}", file=sys.stderr)
    return 1 if slower or not groups else 0


if __name__ == "__main__":
    sys.exit(main())
