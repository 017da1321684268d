"""`expertctl simulate`: what a cluster larger than the machines at hand would make of a load."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import asdict
from typing import Any

from rich.table import Table

from expertctl.common.brief import fewer
from expertctl.common.counts import at_least, at_least_0, positive, share
from expertctl.simulation.outcome import Outcome
from expertctl.simulation.real import run_real
from expertctl.simulation.service import H200_INT4, Service, measured
from expertctl.simulation.simulate import simulate
from expertctl.simulation.trace import busiest_s, placed, shape_of, traced
from expertd.tables import console, print_table
from expertd_client.cluster.policy import Policy

__all__ = ["add_parser", "run"]

_DETAILS = """The client's own code (split, choice of replicas, hedges, retries, watching) runs on a virtual clock.
Servers take the times that --service names, one batch at a time, and all that waits in the next; the planner places for
the load.  --check runs the same calls and failures for real first: ExpertCluster with its threads on real time, and
servers that sleep.  What those took is what simulated ones take."""

CHECKED = Service(((1, 4e-3), (32, 12e-3)), (1e-3,), 32)
"""Of the servers of --check: milliseconds, beside which what the client does is little."""
AGREE = 0.15


def add_parser(subparsers: Any, text: str) -> None:
    parser = subparsers.add_parser("simulate", help=text, description=f"Shows {text}.", epilog=_DETAILS)
    add = parser.add_argument
    add("--servers", type=at_least(1), metavar="N", help="default: 256; with --check 3")
    add("--calls", type=at_least(1), metavar="N", help="default: 100,000; with --check 4,000")
    add("--rate", type=positive, metavar="R", help="calls a second, at random times (20,000; with --check 60)")
    add("--tokens", type=at_least(1), default=1, metavar="M", help="of a call (1)")
    add("--experts", type=at_least(1), metavar="E", help="of the layer (256; with --check 8)")
    add("--top-k", type=at_least(1), metavar="K", help="routes of a token (8; with --check 2)")
    add("--zipf", type=at_least_0, default=0.8, metavar="Z", help="expert e is drawn with the weight 1/(e+1)^Z (0.8)")
    add("--copies", type=at_least(1), default=2, metavar="N", help="of each expert, at least (2)")
    add("--room", type=at_least(1), metavar="N", help="experts of a server (4; with --check 6)")
    add("--failures", type=at_least_0, metavar="R", help="servers that fail in a second (4; with --check 0.1)")
    add("--down", type=positive, default=1.0, metavar="S", help="that they are away, on average (1)")
    add("--hangs", type=share, default=0.25, metavar="P", help="share that hangs and does not die (0.25)")
    add("--timeout", type=positive, default=1.0, metavar="S", help="of a call (1)")
    add("--service", metavar="ADDRESS", help="measure a server's times; default: int4 of Qwen3-30B on an H200")
    add("--seed", type=at_least(0), default=0, metavar="N", help="another one draws other calls and failures (0)")
    add("--check", action="store_true", help="the same for real, too: 1 where they differ by more than 15 %%")
    add("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    usual: tuple[Any, ...] = (256, fewer(100_000, 1000), 20_000.0, 256, 8, 4, 4.0)
    if args.check:
        usual = (3, fewer(4000, 100), 60.0, 8, 2, 6, 0.1)
    for name, value in zip(("servers", "calls", "rate", "experts", "top_k", "room", "failures"), usual, strict=True):
        if getattr(args, name) is None:
            setattr(args, name, value)
    service = measured(args.service) if args.service else CHECKED if args.check else H200_INT4
    shape = shape_of(args.experts, args.top_k)
    placement = placed(args.servers, shape, args.zipf, args.copies, args.room)
    trace = traced(
        args.calls,
        args.rate,
        args.tokens,
        shape,
        args.zipf,
        args.servers,
        args.failures,
        args.down,
        args.hangs,
        args.seed,
    )
    rows: dict[str, Outcome] = {}
    policy = Policy()
    if args.check:
        rows["real"], why, service = run_real(placement, service, trace, args.timeout, policy)
    rows["simulated"], why = simulate(placement, service, trace, args.timeout, policy, args.seed)
    busy = busiest_s(placement, args.tokens, shape, args.zipf, service) * args.rate
    apart = _apart(rows) if args.check else 0.0
    if args.json:
        facts = {"servers": args.servers, "outages": len(trace.outages), "busiest": round(busy, 3)}
        print(json.dumps({**facts, **{name: asdict(row) for name, row in rows.items()}, "apart": round(apart, 3)}))
    else:
        _show(args, rows, len(trace.outages), busy, why.why)
        if args.check:
            print(f"apart: got {apart:.1%} at most, of goodput, p50, p99 and failed calls; want {AGREE:.0%} at most")
    return 1 if apart > AGREE else 0


def _apart(rows: dict[str, Outcome]) -> float:
    """Relative, the largest difference; of failed calls, where they are less than a hundredth, to that."""
    real, simulated = rows["real"], rows["simulated"]
    pairs = (
        (simulated.goodput, real.goodput),
        (simulated.p50_ms, real.p50_ms),
        (simulated.p99_ms, real.p99_ms),
    )
    failed = abs(simulated.failed - real.failed) / max(real.failed, 0.01 * real.calls)
    return max(failed, *(abs(one / max(1e-9, other) - 1.0) for one, other in pairs))


def _show(args: argparse.Namespace, rows: dict[str, Outcome], outages: int, busy: float, why: Counter[str]) -> None:
    title = (
        f"{args.servers} servers, the busiest {busy:.0%} busy, {outages} failures of {args.down:g} s; calls of"
        f" {args.tokens} tokens, top-{args.top_k} of {args.experts}, Zipf {args.zipf:g}"
    )
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("")
    for name in ("calls", "failed", "goodput /s", "p50 ms", "p99 ms", "extra work", "took s"):
        table.add_column(name, justify="right")
    for name, r in rows.items():
        numbers = (f"{r.calls:,}", f"{r.failed:,}", f"{r.goodput:,.0f}", f"{r.p50_ms:.3f}", f"{r.p99_ms:.3f}")
        table.add_row(name, *numbers, f"{r.extra:.2%}", f"{r.seconds:.1f}")
    out = console()
    print_table(out, table)
    for text, times in why.most_common(5):
        out.print(f"{times} calls: {text}", markup=False)
