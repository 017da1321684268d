"""`expertctl load`: sends many requests and reports latency, throughput, errors, and where the server's time went."""

from __future__ import annotations

import argparse
import json
from collections.abc import Awaitable
from dataclasses import asdict
from typing import Any

from rich.table import Table

from expertd.ranges import format_ranges
from expertd_client.async_client import AsyncExpertClient
from expertd_client.commands import generation
from expertd_client.commands.options import (
    add_common,
    add_routing,
    at_least,
    checked_wire_dtype,
    console,
    credentials,
    duration,
    numbers,
    positive,
)
from expertd_client.load import LoadPlan, LoadReport, run_load
from expertd_client.percentiles import Summary
from expertd_client.request import Request, RequestOptions
from expertd_client.result import ForwardResult
from expertd_client.selector import run_precisely
from expertd_client.tables import print_table
from expertd_client.workload import POOL, layer_shapes, requests

__all__ = ["add_parser", "run"]

_DEFAULT_SECONDS = 10.0


def add_parser(subparsers: Any, text: str) -> None:
    parser = subparsers.add_parser(
        "load",
        help=text,
        description="Sends many requests.  Closed loop: --concurrency callers, each waits for its answer before it"
        " sends again.  Open loop: --rate requests a second leave on time, answered or not, and latency counts from the"
        " time at which a request was meant to leave.",
        epilog="Exit code 1 where no request was answered; those that failed beside answered ones are a result, shown"
        " by reason.",
    )
    add_common(parser)
    add_routing(parser)
    parser.add_argument("--layers", type=numbers, metavar="0-3,7", help="in turn; default: all that the server holds")
    loop = parser.add_argument_group("the loop")
    loop.add_argument("--concurrency", type=at_least(1), default=8, metavar="N", help="callers (default: 8)")
    loop.add_argument("--rate", type=positive, metavar="R", help="open loop: requests a second")
    loop.add_argument(
        "--arrivals", choices=("poisson", "fixed"), default="poisson", help="open loop: gaps (default: poisson)"
    )
    loop.add_argument(
        "--requests", type=at_least(1), metavar="N", help="most requests; default: no limit but --duration"
    )
    loop.add_argument(
        "--duration", type=positive, metavar="S", help="seconds; default: 10, or no limit where --requests is given"
    )
    loop.add_argument("--warmup", type=at_least(0), default=POOL, metavar="N", help=f"not counted (default: {POOL})")
    loop.add_argument("--streams", type=at_least(1), default=1, metavar="N", help="connections (default: 1)")
    turn = parser.add_argument_group("like a model that generates")
    turn.add_argument(
        "--generate",
        type=at_least(1),
        metavar="STEPS",
        help="one caller, the layers in turn, each behind the answer of the one before it: time of a layer and of a"
        " step, over the transport that the server gives and inline",
    )
    turn.add_argument("--depth", type=at_least(1), metavar="N", help="layers of a step; those of --layers over again")
    wire = parser.add_argument_group("the messages")
    wire.add_argument("--synthetic", action="store_true", help="the server draws the tensors: about 60 bytes each")
    wire.add_argument("--digest", action="store_true", help="answered by a digest instead of the output")
    wire.add_argument("--output-dtype", choices=("bf16", "f16", "f32"), default="bf16", help="default: bf16")


def run(args: argparse.Namespace) -> int:
    if args.generate:
        return generation.run(args)
    if args.depth:
        raise ValueError(f"--depth {args.depth}: got no --generate with it, want one: other loads have no steps")
    duration_s = args.duration or (None if args.requests else _DEFAULT_SECONDS)
    plan = LoadPlan(
        tokens=args.m,
        concurrency=args.concurrency,
        rate=args.rate,
        poisson=args.arrivals == "poisson",
        requests=args.requests,
        duration_s=duration_s,
        warmup=args.warmup,
        seed=args.seed,
    )
    layers, report = run_precisely(_run(args, plan))
    if args.json:
        print(json.dumps({"wire_dtype": args.wire_dtype, **as_json(args.address, plan, layers, report)}, indent=2))
    else:
        _show(args, plan, layers, report)
    return 0 if report.answered else 1


async def _run(args: argparse.Namespace, plan: LoadPlan) -> tuple[list[int], LoadReport]:
    # In an open loop nothing may hold a request back: the number in flight is bounded by its timeout alone.
    in_flight = max(args.concurrency, 1) if plan.rate is None else 1 << 20
    clients = [
        AsyncExpertClient(
            args.address,
            timeout_s=args.timeout,
            max_in_flight=in_flight,
            unary=args.unary,
            credentials=credentials(args),
            wire_dtype=args.wire_dtype,
        )
        for _ in range(args.streams)
    ]

    def send(request: Request, connection: int) -> Awaitable[ForwardResult]:
        return clients[connection % len(clients)].forward_request(request)

    try:
        described = await clients[0].describe(timeout_s=args.timeout)
        checked_wire_dtype(args, described)
        shapes = layer_shapes(described, args.layers, args.top_k)
        drawn_here = not args.synthetic
        wanted: RequestOptions = {"output_dtype": args.output_dtype, "digest": args.digest}
        endless = requests(shapes, plan.tokens, args.zipf, drawn_here, args.seed, **wanted)
        return [s.layer for s in shapes], await run_load(plan, endless, send)
    finally:
        for client in clients:
            await client.close()


def as_json(address: str, plan: LoadPlan, layers: list[int], report: LoadReport) -> dict[str, Any]:
    """The report for programs; durations in microseconds, the server's in nanoseconds."""
    return {
        "address": address,
        "plan": {**asdict(plan), "loop": "closed" if plan.rate is None else "open", "layers": layers},
        "wall_s": report.wall_s,
        "answered": report.answered,
        "failed": report.failed,
        "errors": report.errors,
        "requests_per_s": report.requests_per_s,
        "tokens_per_s": report.tokens_per_s,
        "routes_computed": report.routes_computed,
        "latency_us": _us(report.latency),
        "lateness_us": None if plan.rate is None else _us(report.lateness),
        "server": asdict(report.server),
        "backends": report.backends,
    }


def _us(s: Summary) -> dict[str, float]:
    values = asdict(s)
    count = values.pop("count")
    return {"count": count, **{name.removesuffix("_s"): round(v * 1e6, 1) for name, v in values.items()}}


def _show(args: argparse.Namespace, plan: LoadPlan, layers: list[int], r: LoadReport) -> None:
    out = console()
    loop = f"closed loop, {plan.concurrency} callers"
    if plan.rate is not None:
        loop = f"open loop, {plan.rate:g} requests/s, {'poisson' if plan.poisson else 'fixed'} gaps"
    streams = "calls" if args.unary else f"stream{'s' if args.streams > 1 else ''}"
    title = f"{loop}; {plan.tokens} tokens a request, layers {format_ranges(layers)}, {args.streams} {streams}"
    title += f", hidden states as {args.wire_dtype}" if args.wire_dtype else ""
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for name in ("", "mean", "p50", "p90", "p95", "p99", "p99.9", "max"):
        table.add_column(name, justify="right" if name else "left")
    for name, s in (("latency", r.latency), *((("lateness", r.lateness),) if plan.rate is not None else ())):
        cells = (s.mean_s, s.p50_s, s.p90_s, s.p95_s, s.p99_s, s.p999_s, s.max_s)
        table.add_row(name, *(duration(v) for v in cells))
    print_table(out, table)
    rows = {
        "answered": f"{r.answered:,} in {r.wall_s:.2f} s: {r.requests_per_s:,.1f} requests/s,"
        f" {r.tokens_per_s:,.1f} tokens/s",
        "failed": f"{r.failed:,}" + "".join(f", {reason} {n:,}" for reason, n in r.errors.items()),
        "routes": f"{r.routes_computed:,} computed",
        "server": ", ".join(
            f"{name[:-3]} {duration(ns * 1e-9)}" for name, ns in asdict(r.server).items() if name.endswith("_ns")
        ),
        "batch": f"{r.server.batch_tokens:.1f} tokens of {r.server.batch_requests:.1f} requests on average; backend "
        + ", ".join(r.backends),
    }
    grid = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        grid.add_row(name, value)
    out.print(grid, markup=False)
