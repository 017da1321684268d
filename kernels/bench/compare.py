"""`python kernels/bench/compare.py OUT.md --csv OUT.csv [--wheels FOLDER]`: our rows beside other kernels, in one run.

At each point every row that serves the layer computes the same tokens on the same weights: checked against the float32
reference first, then their graphs are replayed in turns, so that one clock and one temperature hit all.  The table says
versions, commit and ceilings.  Nothing that was timed elsewhere is in it.

A row such as `humming` or `deepgemm` is another package's GEMMs between kernels of ours (grouping of routes,
activation, sum): the table names it "wrapped".  `torch` is torch._grouped_mm between plain torch operations.  Packages
come from the environment, or as wheels from --wheels, without their dependencies.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from expertd_kernels.bench import cuda as bench
from expertd_kernels.bench.points import write_points
from expertd_kernels.bench.workers import NoResult, run_tasks
from expertd_kernels.weights.scheme import ActivationQuant, Scheme
from peer_torch import TorchGrouped

__all__ = ["LAYERS", "Layer", "main", "markdown"]

OURS = ("gluon_sm90", "gluon_w8a8", "triton", "triton_w8a8", "triton_w4a8")
"""Rows whose kernels are written here."""
PACKAGES = {
    "humming": "humming-kernels",
    "deepgemm": "sgl-deep-gemm",
    "marlin": "vllm",
    "flashinfer_cutlass": "flashinfer-python",
    "torch": "torch",
}
"""Row -> the distribution whose GEMMs it calls."""
COMPILING_S = 140.0
"""At most, before anything is timed; what is left then compiles when it is first called."""
TOKENS = (1, 8, 32, 128, 512, 2048, 8192)


@dataclass(frozen=True)
class Layer:
    """As the bench takes them."""

    shape: str
    scheme: str
    activations: str = "none"

    @classmethod
    def parse(cls, text: str) -> Layer:
        """ "SHAPE:SCHEME[:ACTIVATIONS]".  ValueError."""
        parts = text.split(":")
        if len(parts) not in (2, 3) or not all(parts):
            raise ValueError(f"--layer {text!r}: want SHAPE:SCHEME[:ACTIVATIONS], as qwen3-30b-a3b:int4_g128")
        return cls(*parts)


LAYERS = (
    *(Layer("qwen3-30b-a3b", s) for s in ("int4_g128", "int4_g128_zp", "mxfp4", "e4m3_block128", "bf16")),
    Layer("qwen3-30b-a3b", "e4m3_block128", "e4m3_group128"),
    *(Layer("mixtral-8x7b", s) for s in ("int4_g128", "e4m3_block128")),
    Layer("deepseek-v3/64", "int4_g128"),
    Layer("gpt-oss-120b", "mxfp4"),
)
"""Unless --layer names others."""

Record = Mapping[str, Any]


def named(row: str) -> str:
    """The row's name in a table, with the version of what it wraps."""
    if row in OURS:
        return row
    package = PACKAGES.get(row)
    if package is None:
        return f"{row} (wrapped)"
    try:
        found = version(package)
    except PackageNotFoundError:
        found = "version unknown"
    return f"{package} {found}" + ("" if row == "torch" else " (wrapped)")


def _time(row: Record | None) -> str:
    if row is None:
        return "-"
    if row["us"] is None:
        return "wrong" if row["relative_error"] is None or row["relative_error"] > row["tolerance"] else "no time"
    return f"{row['us']:.{0 if row['us'] >= 100 else 1}f}"


def _ratio(ours: Sequence[Record | None], others: Sequence[Record | None]) -> float | None:
    """The best other time over the best of ours; None where there is not one of each."""
    best = [
        min((r["us"] for r in rows if r is not None and r["us"] is not None), default=None) for rows in (ours, others)
    ]
    return best[1] / best[0] if best[0] is not None and best[1] is not None else None


def markdown(rows: Sequence[Record], facts: Mapping[str, str]) -> str:
    """rows: points of the bench, of one run; facts: what is said above the tables."""
    out = ["| " + " | ".join(facts) + " |", "|" + "---|" * len(facts), "| " + " | ".join(facts.values()) + " |"]
    out.append(
        "\nMicroseconds of the whole layer.  Last line: the fastest other row over our fastest (below 1 we lose)."
    )
    layers = dict.fromkeys((r["shape"], r["scheme"], r["activations"]) for r in rows)
    means = []
    for layer in layers:
        mine = {(r["backend"], r["M"]): r for r in rows if (r["shape"], r["scheme"], r["activations"]) == layer}
        tokens = sorted({M for _, M in mine})
        names = sorted(dict.fromkeys(b for b, _ in mine), key=lambda b: (b not in OURS, b))
        title = " ".join(p for p in layer if p != "none")
        out += [f"\n## {title}\n", "| row | worst error | " + " | ".join(f"M={M}" for M in tokens) + " |"]
        out.append("|---|---|" + "---|" * len(tokens))
        for name in names:
            errors = [mine[name, M]["relative_error"] for M in tokens if (name, M) in mine]
            worst = "not finite" if None in errors else f"{max(errors):.1e}"
            out.append(f"| {named(name)} | {worst} | " + " | ".join(_time(mine.get((name, M))) for M in tokens) + " |")
        ratios = [
            _ratio([mine.get((b, M)) for b in names if b in OURS], [mine.get((b, M)) for b in names if b not in OURS])
            for M in tokens
        ]
        known = [r for r in ratios if r is not None]
        if known:
            out.append("| **ratio** | | " + " | ".join("-" if r is None else f"**{r:.2f}**" for r in ratios) + " |")
            mean = math.exp(sum(map(math.log, known)) / len(known))
            means.append(f"| {title} | {mean:.2f} | {min(known):.2f} | {len(known)} |")
    if means:
        out += ["\n## Times as fast as the fastest other row\n", "| layer | geometric mean | least | points |"]
        out += ["|---|---|---|---|", *means]
    return "\n".join(out) + "\n"


def _compile(point: tuple[tuple[Any, Any, Any], int], rows: tuple[str, ...]) -> float:
    """Calls the rows once, in a process of its own: what they compile stays on disk."""
    (shape, scheme, how), M = point
    return bench._compile((shape, scheme), [M], rows, how)


def _measure(layers: Sequence[Layer], tokens: Sequence[int], rows: Sequence[str], jobs: int, csv: Path) -> str:
    """Times all points and writes them; returns the tables.  Needs a GPU."""
    found: list[dict[str, Any]] = []
    asked = [(bench.shape_of(a.shape), Scheme.parse(a.scheme), ActivationQuant(a.activations)) for a in layers]
    points = [(layer, M) for layer in asked for M in tokens] if jobs > 1 else []
    for (layer, M), got in run_tasks(
        partial(_compile, rows=tuple(rows)), points, jobs=jobs, budget_s=COMPILING_S, limit_s=COMPILING_S
    ):
        if isinstance(got, NoResult):
            print(f"compiling {layer[0].name} {layer[1].name}, {M} tokens: {got.reason}", file=sys.stderr)
    top, machine = bench.ceilings(), bench.machine()
    facts = machine | {k: f"{v:.0f}" for k, v in asdict(top).items()}
    for shape, scheme, how in asked:
        more = {"torch": TorchGrouped} if scheme.name == "bf16" and how is ActivationQuant.NONE else {}
        timed = bench.points(shape, scheme, tokens, list(rows), "uniform", top, how, more)
        found += [asdict(p) | facts for p in timed]
        write_points(csv, found)
        torch.cuda.empty_cache()
    return markdown(found, facts)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 where a layer has no such name."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    p.add_argument("out", type=Path, metavar="OUT.md")
    p.add_argument("--csv", type=Path, required=True, metavar="OUT.csv")
    p.add_argument("--layer", action="append", metavar="SHAPE:SCHEME[:ACTIVATIONS]", help="may be given several times")
    p.add_argument("--m", default=",".join(map(str, TOKENS)), metavar="LIST", help="numbers of tokens")
    p.add_argument("--rows", default="all", metavar="LIST", help="as the bench's --backend (default: all that serve)")
    p.add_argument("--wheels", type=Path, metavar="FOLDER", help="of packages that are not installed")
    p.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="processes that compile first")
    args = p.parse_args(argv)
    try:
        layers = [Layer.parse(t) for t in args.layer] if args.layer else list(LAYERS)
        with tempfile.TemporaryDirectory() as target:
            if args.wheels:
                _install(args.wheels, target)
            tokens = [int(m) for m in args.m.split(",")]
            args.out.write_text(_measure(layers, tokens, args.rows.split(","), args.jobs, args.csv))
    except ValueError as e:
        print(e, file=sys.stderr)
        return 1
    return 0


def _install(wheels: Path, target: str) -> None:
    files = sorted(map(str, wheels.glob("*.whl")))
    if not files:
        raise ValueError(f"--wheels {wheels}: there are no wheels")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--target", target]
    subprocess.run([*pip, *files], check=True)
    sys.path.append(target)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (target, os.environ.get("PYTHONPATH"))))


if __name__ == "__main__":
    sys.exit(main())
