"""The options of `expertctl bench faults`, and how its rows are shown."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import asdict

from rich.table import Table

from expertd.tables import console, print_table
from expertd_client.counts import at_least, positive
from expertd_client.faults.run import AWAY_S, FAULTS, Row, run

__all__ = ["add_arguments", "run_command"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    usual = tuple(name for name in FAULTS if name != "partition")
    parser.add_argument(
        "--fault",
        type=_faults,
        default=usual,
        metavar="F,F",
        help=f"of {', '.join(FAULTS)} (all but partition, which needs root)",
    )
    parser.add_argument("--events", type=at_least(1), default=20, metavar="N", help="of each fault (default: 20)")
    parser.add_argument("--callers", type=at_least(1), default=4, metavar="N", help="threads that call (default: 4)")
    parser.add_argument("--tokens", type=at_least(1), default=8, metavar="M", help="of a call (default: 8)")
    parser.add_argument("--away", type=positive, default=AWAY_S, metavar="S", help=f"length of an event ({AWAY_S})")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run_command(args: argparse.Namespace) -> int:
    """Measures and prints; 1 where a call failed."""
    rows: list[Row] = []
    why: Counter[str] = Counter()
    for row, failures in run(args.fault, args.events, args.callers, args.tokens, args.away):
        rows.append(row)
        why.update(failures)
    if args.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))
    else:
        _show(rows, why)
    return 1 if why else 0


def _show(rows: list[Row], why: Counter[str]) -> None:
    out = console()
    table = Table(title="two replicas of one half, one of them in trouble", title_justify="left", show_edge=False)
    table.add_column("fault")
    for name in ("events", "calls", "failed", "longest ms", "recovered s", "p99 ms before", "p99 ms"):
        table.add_column(name, justify="right")
    for r in rows:
        numbers = (f"{r.events:,}", f"{r.calls:,}", f"{r.failed:,}", f"{r.longest_ms:,.0f}", f"{r.recovered_s:.2f}")
        table.add_row(r.fault, *numbers, f"{r.quiet_p99_ms:,.1f}", f"{r.p99_ms:,.1f}")
    print_table(out, table)
    for text, times in why.most_common(5):
        out.print(f"{times} calls: {text}", markup=False)


def _faults(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    if unknown := [n for n in names if n not in FAULTS]:
        raise argparse.ArgumentTypeError(f"got {', '.join(unknown)!r}, want some of {', '.join(FAULTS)}")
    return names
