"""`python -m expertd_kernels.bench`: one kernel benchmark for all devices.  What compares, tunes and writes tables
beside it is in the repository's kernels/bench."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from expertd_kernels.bench.faults import WorkerError


def _names(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _numbers(text: str) -> list[int]:
    return [int(part) for part in _names(text)]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m expertd_kernels.bench",
        description="Times whole expert layers beside ceilings measured in the same run; checks every answer first.",
        allow_abbrev=False,
    )
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    p.add_argument("--shape", type=_names, metavar="LIST", help="models, or MODEL/EXPERTS for a slice")
    p.add_argument("--scheme", type=_names, metavar="LIST", help="for instance int4_g128,mxfp4")
    p.add_argument("--backend", type=_names, metavar="LIST", help="rows of the table; cuda: or all, without -NAME")
    p.add_argument("--m", type=_numbers, metavar="LIST", help="numbers of tokens")
    p.add_argument("--threads", type=_numbers, metavar="LIST", help="cpu: numbers of threads (default 1,2)")
    p.add_argument(
        "--clock",
        choices=["wall", "cpu"],
        default="wall",
        help="cpu: cpu = processor time of the calling thread, on a busy machine (one thread only)",
    )
    p.add_argument("--seconds", type=float, help="cpu: time for each row of a point in a process (default 0.3)")
    p.add_argument("--processes", type=int, metavar="N", help="cpu: figures are medians over so many (default 3)")
    p.add_argument("--quick", action="store_true", help="cpu: one process, M 1, 16 and 256, 0.1 s")
    p.add_argument("--routing", type=_names, metavar="LIST", help="cuda: uniform, zipf")
    p.add_argument("--activations", metavar="HOW", help="cuda: how they are rounded, for instance e4m3_group128")
    p.add_argument(
        "--budget", type=float, metavar="S", help="begin no layer (cuda), no point (cpu: 150 a layer) after so many s"
    )
    p.add_argument("--jobs", type=int, metavar="N", help="cuda: N processes compile all layers' kernels first")
    p.add_argument("--csv", metavar="FILE", help="one line a point, with the machine and its ceilings")
    p.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="print the result as JSON, or write it to a file"
    )
    return p


def main(argv: list[str] | None = None) -> int:
    """Exit code 1 where an answer was wrong (relative error above its tolerance, or 5 %), nothing was answered, or a
    name is unknown."""
    return measure(parser().parse_args(argv))


def measure(args: argparse.Namespace, **more: Any) -> int:
    """The exit code of `main`, for arguments of `parser()`.  more: for the device's `run` beside them."""
    target = args.json
    if args.device == "cuda" and target == "-":
        args.json = None  # that bench writes its file after each layer
    if args.device == "cuda":  # and takes comma-separated lists
        args.shape, args.scheme, args.backend, args.routing = (
            value and ",".join(value) for value in (args.shape, args.scheme, args.backend, args.routing)
        )
    try:
        result = importlib.import_module(f"expertd_kernels.bench.{args.device}").run(args, **more)
    except (ValueError, WorkerError) as e:
        print(e, file=sys.stderr)
        return 1
    if target == "-":
        print(json.dumps(result, indent=1))
    elif target:
        Path(target).write_text(json.dumps(result, indent=1) + "\n")
    return 0 if result["rows"] and all(map(_right, result["rows"])) else 1


def _right(row: dict[str, Any]) -> bool:
    error = row["relative_error"]
    return error is not None and bool(error <= row.get("tolerance", 0.05))


if __name__ == "__main__":
    sys.exit(main())
