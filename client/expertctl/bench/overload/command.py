"""The options of `expertctl bench overload`, and how its rows are shown."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from expertctl.bench.overload.clients import WAYS
from expertctl.bench.overload.cost import PARTS, Cost, measure_cost
from expertctl.bench.overload.run import BARE_WAYS, NotMeasured, OverloadPlan, measure
from expertctl.bench.overload.tally import OverloadMeasurement
from expertctl.common.brief import briefly
from expertctl.common.counts import at_least, counted, positive
from expertctl.common.progress import told
from expertd.common.tables import console, print_table

__all__ = ["add_arguments", "run_command"]


INTERRUPTED = 130
"""Exit code after Ctrl-C."""
_TRANSPORTS = {name: text if name in ("shm", "tcp") else f"gRPC, {text}" for name, text in WAYS.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    plan = OverloadPlan()
    parser.add_argument("address", nargs="?", metavar="ADDRESS", help="server (default: one that it starts)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--transport",
        "--way",
        dest="way",
        type=_ways,
        default=plan.ways,
        metavar="T,T",
        help=f"transports: {'; '.join(f'{name}: {text}' for name, text in _TRANSPORTS.items())} (default: all but"
        " unary)",
    )
    parser.add_argument(
        "--load", type=_numbers, default=plan.loads, metavar="X,X", help="multiples of the peak rate (default: 2,10)"
    )
    parser.add_argument(
        "--callers", type=at_least(1), default=plan.callers, metavar="N", help="connections (default: 4)"
    )
    parser.add_argument(
        "--tokens",
        type=at_least(1),
        default=plan.tokens,
        metavar="M",
        help=f"tokens of each request (default: {plan.tokens})",
    )
    parser.add_argument(
        "--in-flight",
        type=at_least(1),
        default=plan.in_flight,
        metavar="N",
        help=f"requests in flight to find the peak (default: {plan.in_flight})",
    )
    parser.add_argument(
        "--slack",
        type=positive,
        default=plan.slack,
        metavar="X",
        help="deadline as a multiple of the normal p99 (default: 4)",
    )
    parser.add_argument(
        "--seconds",
        type=positive,
        default=briefly(plan.seconds, 0.5),
        metavar="S",
        help="seconds of each measurement (default: 5)",
    )
    parser.add_argument(
        "--paced",
        action="store_true",
        help="start a server that sleeps instead of computing, for a busy machine",
    )
    parser.add_argument(
        "--bare",
        action="store_true",
        help=f"send each load to a plain grpc.aio server that refuses everything, too: only {', '.join(BARE_WAYS)}",
    )
    parser.add_argument(
        "--cost",
        type=_parts,
        nargs="?",
        const=("forecast",),
        metavar="PART,PART",
        help=f"measure the cost of these parts of the server without overload instead: {', '.join(PARTS)} (default:"
        " forecast)",
    )
    parser.add_argument(
        "--certificates",
        type=Path,
        metavar="DIR",
        help="folder for tls and mtls: ca.pem, server.pem, server.key, client.pem, client.key",
    )
    parser.add_argument(
        "--server",
        type=shlex.split,
        metavar="OPTIONS",
        help="options for the server that it starts: of expertd serve, with --paced of expertd-echo",
    )
    parser.add_argument(
        "--cores", type=_cores, metavar="S,G", help="CPU core of its servers, and CPU core of the load generator"
    )


def run_command(args: argparse.Namespace) -> int:
    """Measures and prints, after Ctrl-C what is finished; 1 where a way could not be measured."""
    if args.cost:
        return _cost(args)
    plan = OverloadPlan(
        args.address,
        args.server,
        args.paced,
        args.way,
        args.load,
        args.callers,
        args.in_flight,
        args.tokens,
        args.slack,
        args.seconds,
        args.bare,
        args.cores,
    )
    if plan.bare and not set(plan.ways) & set(BARE_WAYS):
        raise ValueError(f"--bare: got --transport {','.join(plan.ways)}, want one of {', '.join(BARE_WAYS)}")
    asked = f"{counted(len(plan.ways), 'transport')}, {counted(len(plan.loads), 'load')} of each"
    first = f"{asked}: most of the time goes to the search for the peak of each transport"
    rows, missing, interrupted = list[OverloadMeasurement](), list[NotMeasured](), False
    try:
        for one in told(measure(plan), first, lambda row: row.way):
            if isinstance(one, OverloadMeasurement):
                rows.append(one)
            else:
                missing.append(one)
    except KeyboardInterrupt:
        interrupted = True
    if args.json:
        print(json.dumps(_as_json(rows, missing, plan, interrupted)))
    else:
        _show(rows, plan.named())
        for m in missing:
            print(f"{m.way}: not measured: {m.why}")
        if interrupted:
            print("interrupted: the table has the transports that were finished")
    return INTERRUPTED if interrupted else 1 if missing or not rows else 0


def _as_json(
    rows: list[OverloadMeasurement], missing: list[NotMeasured], plan: OverloadPlan, interrupted: bool
) -> dict[str, Any]:
    return {
        "server": plan.named(),
        "peak_per_s": max((row.peak_per_s for row in rows), default=0.0),
        "rows": [asdict(row) for row in rows],
        "not_measured": {m.way: m.why for m in missing},
        "interrupted": interrupted,
    }


def _cost(args: argparse.Namespace) -> int:
    costs = list(measure_cost(args.way, args.tokens, args.seconds, args.cost, args.certificates))
    if args.json:
        print(json.dumps({"cost": [asdict(cost) for cost in costs]}))
        return 0
    table = Table(
        title="cost of parts of the server, without overload", title_justify="left", show_edge=False, pad_edge=False
    )
    table.add_column("part", no_wrap=True)
    table.add_column("transport", no_wrap=True)
    for name in ("requests/s", "without", "ratio", "p50 us", "without", "ratio"):
        table.add_column(name, justify="right")
    for c in costs:
        table.add_row(c.part, c.way, *_cost_cells(c))
    print_table(console(), table)
    return 0


def _cost_cells(c: Cost) -> tuple[str, ...]:
    (rate, rate_without), (p50, p50_without) = c.requests_per_s, c.p50_us
    throughput = (f"{rate:,.0f}", f"{rate_without:,.0f}", f"{c.of_throughput:.3f}")
    return (*throughput, f"{p50:,.0f}", f"{p50_without:,.0f}", f"{c.of_p50:.3f}")


_COLUMNS = (
    "load", "deadline ms", "peak/s", "sent/s", "goodput of peak", "admitted", "late", "late in client", "refused",
    "refusal p99 ms", "of a plain server", "answer p99 ms", "sent late p99 ms", "client CPU", "server CPU", "server MB",
)  # fmt: skip


_SHOWN = 5
"""Failures of a row."""


def _show(rows: list[OverloadMeasurement], server: str) -> None:
    out = console(200)
    table = Table(
        title=f"overload of {server}: multiples of the peak rate, with deadlines",
        title_justify="left",
        show_edge=False,
        pad_edge=False,
    )
    table.add_column("transport", no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for r in rows:
        table.add_row(r.way, *_cells(r))
    print_table(out, table)
    for r in rows:
        if r.peak_refuted:
            out.print(
                f"{r.way} {r.load:g}x: its goodput shows that the peak is too low: measure again, with a larger"
                " --seconds or with nothing else on the machine",
                markup=False,
            )
    for r in rows:
        reasons = ", ".join(f"{reason} {n:,}" for reason, n in r.refused.items()) or "nothing"
        out.print(f"{r.way} {r.load:g}x: refused {reasons}; failed {r.not_retryable:,}", markup=False)
        for failure in r.failures[:_SHOWN]:
            out.print(f"  {failure.text()}", markup=False)


def _cells(r: OverloadMeasurement) -> tuple[str, ...]:
    return (
        f"{r.load:g}x",
        f"{r.deadline_ms:,.1f}",
        f"{'>' if r.peak_limited else ''}{r.peak_per_s:,.0f}",
        f"{r.offered_per_s:,.0f}",
        f"{r.goodput_of_peak:.1%}",
        f"{r.admitted:,}",
        f"{r.late_admitted:.2%}",
        f"{r.late_generator:.2%}",
        f"{sum(r.refused.values()):,}",
        f"{r.refusal_p99_ms:.2f}" if r.refused else "-",
        "-" if r.bare_refusal_p99_ms is None else f"{r.bare_refusal_p99_ms:.2f}",
        f"{r.answer_p99_ms:.1f}" if r.goodput_of_peak else "-",
        f"{r.lateness_p99_ms:.2f}",
        f"{r.generator_cpu:.2f}",
        "-" if r.rss_mb is None else f"{r.server_cpu:.2f}",
        "-" if r.rss_mb is None else f"{r.rss_mb[0]:.0f} > {r.rss_mb[1]:.0f}",
    )


def _parts(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    if unknown := [n for n in names if n not in PARTS]:
        raise argparse.ArgumentTypeError(f"got {', '.join(unknown)!r}, want some of {', '.join(PARTS)}")
    return names


def _ways(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    if unknown := [n for n in names if n not in WAYS]:
        raise argparse.ArgumentTypeError(f"got {', '.join(unknown)!r}, want some of {', '.join(WAYS)}")
    return names


def _numbers(text: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) <= 0:
        raise argparse.ArgumentTypeError(f"got {text!r}, want numbers > 0")
    return numbers


def _cores(text: str) -> tuple[int, int]:
    parts = text.split(",")
    if len(parts) != 2 or not all(p.isdecimal() for p in parts):
        raise argparse.ArgumentTypeError(f"got {text!r}, want two cores' numbers: 0,1")
    return int(parts[0]), int(parts[1])
