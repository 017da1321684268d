"""`expertctl simulate`: what a cluster larger than the machines at hand would make of a load."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import asdict
from typing import Any

from rich.table import Table

from expertctl.common.brief import fewer
from expertctl.common.counts import at_least, at_least_0, duration_s, positive, share
from expertctl.common.progress import Progress
from expertctl.simulation.outcome import Outcome
from expertctl.simulation.real import run_real
from expertctl.simulation.service import H200_INT4, Service, measured
from expertctl.simulation.simulate import simulate
from expertctl.simulation.trace import busiest_s, placed, shape_of, traced
from expertd.common.tables import console, print_table
from expertd_client.cluster.policy import Policy

__all__ = ["add_parser", "run"]

_DETAILS = """The code of the client (split, choice of replicas, hedges, retries, failure detection) runs on a virtual
clock.  Simulated servers compute one batch at a time, for as long as --service says; the planner places the experts.
--check first runs the same calls and failures with real clients and servers that sleep, and simulates with the times
that these took."""

CHECKED = Service(((1, 4e-3), (32, 12e-3)), (1e-3,), 32)
"""Of the servers of --check: milliseconds, beside which what the client does is little."""
AGREE = 0.15


def add_parser(subparsers: Any, text: str) -> None:
    parser = subparsers.add_parser(
        "simulate",
        help=text,
        description="Simulates a cluster under load, with servers that fail and hang, on a virtual clock with the"
        " code of"
        " the real client.",
        epilog=_DETAILS,
    )
    add = parser.add_argument
    add("--servers", type=at_least(1), metavar="N", help="servers (default: 256; with --check 3)")
    add("--calls", type=at_least(1), metavar="N", help="calls (default: 100,000; with --check 4,000)")
    add(
        "--rate",
        type=positive,
        metavar="R",
        help="calls per second, at random times (default: 20,000; with --check 60)",
    )
    add("--tokens", type=at_least(1), default=1, metavar="M", help="tokens of each call (default: 1)")
    add("--experts", type=at_least(1), metavar="E", help="experts of the layer (default: 256; with --check 8)")
    add("--top-k", type=at_least(1), metavar="K", help="routes of each token (default: 8; with --check 2)")
    add(
        "--zipf",
        type=at_least_0,
        default=0.8,
        metavar="Z",
        help="popularity: expert e has weight 1/(e+1)^Z (default: 0.8)",
    )
    add("--copies", type=at_least(1), default=2, metavar="N", help="least replicas of each expert (default: 2)")
    add("--room", type=at_least(1), metavar="N", help="experts of each server (default: 4; with --check 6)")
    add("--failures", type=at_least_0, metavar="R", help="server failures per second (default: 4; with --check 0.1)")
    add("--down", type=duration_s, default=1.0, metavar="TIME", help="mean length of a failure (default: 1s)")
    add(
        "--hangs",
        type=share,
        default=0.25,
        metavar="P",
        help="share of failures in which the server hangs (default: 0.25)",
    )
    add("--timeout", type=duration_s, default=1.0, metavar="TIME", help="for each call (default: 1s)")
    add(
        "--service",
        metavar="ADDRESS",
        help="measure this server's kernel times (default: Qwen3-30B in int4 on an H200)",
    )
    add("--seed", type=at_least(0), default=0, metavar="N", help="seed of calls and failures (default: 0)")
    add(
        "--check",
        action="store_true",
        help="also run it with real servers; exit code 1 if the results differ by more than 15 %%",
    )
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
        with Progress("with real servers", args.calls) as progress:
            rows["real"], why, service = run_real(placement, service, trace, args.timeout, policy, progress)
    with Progress("simulated", args.calls) as progress:
        rows["simulated"], why = simulate(placement, service, trace, args.timeout, policy, args.seed, progress)
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
