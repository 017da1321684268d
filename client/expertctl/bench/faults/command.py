"""The options of `expertctl bench faults`, and how its rows are shown."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from expertctl.bench.faults.failures import Failures
from expertctl.bench.faults.run import AWAY_S, FAULTS, QUIET_S, FaultMeasurement, run
from expertctl.common.brief import briefly, fewer
from expertctl.common.columns import Column, table_of
from expertctl.common.counts import at_least, counted, positive
from expertctl.common.progress import told
from expertd.common.tables import console, print_table
from expertd.errors import ExpertdError

__all__ = ["COLUMNS", "add_arguments", "run_command"]


COLUMNS = (
    Column("fault", "what happened", values=FAULTS),
    Column("events", "how often"),
    Column("calls", "during all of it"),
    Column("failed", "calls without an answer, or with a wrong one"),
    Column("longest ms", "the longest call until all was as before", "longest_ms"),
    Column("recovered s", "the longest time until throughput was that of the servers that were left", "recovered_s"),
    Column("p99 ms before", "99th percentile of calls in the seconds before events", "quiet_p99_ms"),
    Column("p99 ms", "the same during events", "p99_ms"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    usual = tuple(name for name in FAULTS if name != "partition")
    parser.add_argument(
        "--fault",
        type=_faults,
        default=usual,
        metavar="F,F",
        help=f"faults, of {', '.join(FAULTS)} (default: all but partition, which needs root)",
    )
    parser.add_argument(
        "--events", type=at_least(1), default=fewer(20), metavar="N", help="events of each fault (default: 20)"
    )
    parser.add_argument("--callers", type=at_least(1), default=4, metavar="N", help="client threads (default: 4)")
    parser.add_argument("--tokens", type=at_least(1), default=8, metavar="M", help="tokens of each call (default: 8)")
    parser.add_argument(
        "--away",
        type=positive,
        default=briefly(AWAY_S, 0.5),
        metavar="S",
        help=f"seconds of an event (default: {AWAY_S})",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run_command(args: argparse.Namespace) -> int:
    """Measures and prints; 1 where a call failed, or where it could not go on: what was measured by then is shown."""
    found: list[tuple[FaultMeasurement, Failures]] = []
    ended = ""
    seconds = args.events * (args.away + min(QUIET_S, args.away))
    first = f"{', '.join(args.fault)}: {counted(args.events, 'event')} of each, {seconds:,.0f} s or more"
    try:
        rows = run(args.fault, args.events, args.callers, args.tokens, args.away)
        for row, failures in told(rows, first, lambda one: one[0].fault):
            found.append((row, failures))
    except ExpertdError as error:
        ended = f"{error.reason}: {error.message}"
    if args.json:
        failed = {row.fault: [asdict(one) for one in failures.first] for row, failures in found if failures}
        early = {"ended_early": ended} if ended else {}
        print(json.dumps({"rows": [asdict(row) for row, _ in found], "failures": failed, **early}))
    else:
        _show(found)
        if ended:
            print(f"ended early: {ended}")
    return 1 if ended or any(failures for _, failures in found) else 0


def _show(found: list[tuple[FaultMeasurement, Failures]]) -> None:
    out = console()
    table = table_of(COLUMNS, "two replicas of one half of the experts, one of them with a fault")
    for r, _ in found:
        numbers = (f"{r.events:,}", f"{r.calls:,}", f"{r.failed:,}", f"{r.longest_ms:,.0f}", f"{r.recovered_s:.2f}")
        table.add_row(r.fault, *numbers, f"{r.quiet_p99_ms:,.1f}", f"{r.p99_ms:,.1f}")
    print_table(out, table)
    for _, failures in found:
        failures.show(out)


def _faults(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    if unknown := [n for n in names if n not in FAULTS]:
        raise argparse.ArgumentTypeError(f"got {', '.join(unknown)!r}, want some of {', '.join(FAULTS)}")
    return names
