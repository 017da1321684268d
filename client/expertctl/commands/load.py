"""`expertctl load`: sends many requests and reports latency, throughput, errors, and where the server's time went."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import re
from typing import Any

from expertctl.commands import generation
from expertctl.commands.callers import Callers
from expertctl.commands.connect import for_one_server
from expertctl.commands.options import OUTPUT_DTYPES, add_common, add_routing, new_file, numbers
from expertctl.common.brief import briefly
from expertctl.common.counts import at_least, positive
from expertctl.common.echo import echo_server, no_echo
from expertctl.common.workload import POOL
from expertctl.load.departures import LoadPlan
from expertctl.load.page import NO_PLOTLY, page
from expertctl.load.selector import run_precisely
from expertctl.load.series import NO_HDR, hdr_text
from expertctl.load.show import Outcome, as_json, show
from expertctl.load.slo import parse_promise
from expertd.tables import console

__all__ = ["add_parser", "add_reports", "check_reports", "finish", "run"]

_DEFAULT_SECONDS, _TRIAL_SECONDS = 10.0, 3.0
INTERRUPTED = 130


def add_parser(subparsers: Any, text: str) -> None:
    parser = subparsers.add_parser(
        "load",
        help=text,
        description="Sends many requests.  Closed loop: --concurrency callers, each waits for its answer before it"
        " sends again.  Open loop: --rate requests a second leave on time, answered or not, and latency counts from the"
        " time at which a request was meant to leave.  Several values are a sweep.",
        epilog="Exit code 1 where no request was answered; those that failed beside answered ones are a result, shown"
        " by reason.  Ctrl-C: a report of what came until then, exit code 130.",
    )
    add_common(parser, "*")
    parser.add_argument("--echo", action="store_true", help="load an echo server that is started here: no kernels")
    parser.add_argument("--hidden-size", type=at_least(1), default=4096, metavar="H", help="of the echo (4096)")
    add_routing(parser)
    parser.add_argument("--layers", type=numbers, metavar="0-3,7", help="in turn; default: all that the server holds")
    loop = parser.add_argument_group("the loop")
    loop.add_argument("--concurrency", type=_callers, default=[8], metavar="N,N", help="callers (default: 8)")
    loop.add_argument("--rate", type=_rates, metavar="R,R", help="open loop: requests a second; a ramp: 100..1000")
    loop.add_argument(
        "--arrivals", choices=("poisson", "fixed"), default="poisson", help="open loop: gaps (default: poisson)"
    )
    loop.add_argument("--slo", type=parse_promise, metavar="p99<20ms", help="search the largest rate that keeps it")
    loop.add_argument("--repeats", type=at_least(1), default=3, metavar="N", help="of --slo's last trial (3)")
    loop.add_argument(
        "--requests", type=at_least(1), metavar="N", help="most requests; default: no limit but --duration"
    )
    loop.add_argument(
        "--duration",
        type=positive,
        metavar="S",
        help="seconds; default: 10, or 3 for each trial of --slo, or no limit where --requests is given",
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
    wire.add_argument("--output-dtype", choices=OUTPUT_DTYPES, default="bf16", help="default: bf16")
    add_reports(parser)


def add_reports(parser: argparse.ArgumentParser) -> None:
    """What finish() writes."""
    reports = parser.add_argument_group("reports")
    reports.add_argument("--html", type=new_file, metavar="FILE", help="write a page with plots (extra `load`)")
    reports.add_argument("--hdr", type=new_file, metavar="FILE", help="write latencies as .hgrm (extra `load`)")


def run(args: argparse.Namespace) -> int:
    _check(args)
    with contextlib.ExitStack() as stack:
        if args.echo:
            if missing := no_echo():
                raise ValueError(f"--echo: {missing}")
            args.address = [stack.enter_context(echo_server(args.hidden_size, max(4096, args.m)))]
        if args.generate:
            return generation.run(args)
        return finish(args, run_precisely(_run(args)))


def finish(args: argparse.Namespace, o: Outcome) -> int:
    """Prints and writes what was found; the exit code."""
    if args.json:
        print(json.dumps(as_json(o), indent=2))
    else:
        show(console(), o)
    if args.html is not None:
        args.html.write_text(page(o), encoding="utf-8")
    if args.hdr is not None and o.runs:
        args.hdr.write_text(hdr_text(o.runs[-1].report.raw.latencies_s), encoding="ascii")
    if o.interrupted:
        return INTERRUPTED
    return 0 if any(run.report.answered for run in o.runs) else 1


def _check(args: argparse.Namespace) -> None:
    """Raises ValueError for options that exclude each other."""
    if args.echo == bool(args.address):
        got = "both" if args.echo else "neither"
        raise ValueError(f"ADDRESS and --echo: got {got}, want one of them")
    _check_cluster(args)
    if args.depth and not args.generate:
        raise ValueError(f"--depth {args.depth}: got no --generate with it, want one: other loads have no steps")
    several = len(args.concurrency) * len(args.rate or [0]) > 1
    if several and (args.slo or args.generate):
        other = "--slo" if args.slo else "--generate"
        raise ValueError(f"{other}: got a sweep with it, want one value of --concurrency and no --rate")
    if args.slo and args.rate:
        raise ValueError("--slo: got --rate with it, want one of them: the rate is what is searched")
    if args.rate and len(args.concurrency) > 1:
        raise ValueError("--concurrency: got several with --rate, want one of them to have several")
    if args.hdr is not None and several:
        raise ValueError("--hdr: got a sweep with it, want one run: a file has one histogram")
    if (ramp := next((r for r in args.rate or () if r[1]), None)) and args.requests and not args.duration:
        raise ValueError(f"--rate {ramp[0]:g}..{ramp[1]:g}: got --requests, want --duration: its end")
    check_reports(args)


def _check_cluster(args: argparse.Namespace) -> None:
    """Raises ValueError for what one server alone can be asked."""
    if len(args.address) < 2:
        return
    for flag, given, why in (
        ("--synthetic", args.synthetic, "each server would draw its own routes"),
        ("--digest", args.digest, "a digest of a part is none of the sum"),
        ("--generate", args.generate, f"expertctl trace {' '.join(args.address)} shows where a cluster's step goes"),
        ("--output-dtype e4m3", args.output_dtype == "e4m3", "parts have to be added"),
    ):
        if given:
            raise for_one_server(flag, args.address, why)


def check_reports(args: argparse.Namespace) -> None:
    """Before anything is sent.  Raises ValueError for a report that nobody here can make."""
    for flag, path, module, why in (("--html", args.html, "plotly", NO_PLOTLY), ("--hdr", args.hdr, "hdrh", NO_HDR)):
        if path is not None and importlib.util.find_spec(module) is None:
            raise ValueError(f"{flag}: {why}")


def _plans(args: argparse.Namespace) -> list[LoadPlan]:
    usual = _TRIAL_SECONDS if args.slo else _DEFAULT_SECONDS
    seconds = args.duration or (None if args.requests else briefly(usual))
    return [
        LoadPlan(
            tokens=args.m,
            concurrency=callers,
            rate=rate[0],
            rate_to=rate[1],
            poisson=args.arrivals == "poisson",
            requests=args.requests,
            duration_s=seconds,
            warmup=args.warmup,
            seed=args.seed,
        )
        for callers in args.concurrency
        for rate in args.rate or [(None, None)]
    ]


async def _run(args: argparse.Namespace) -> Outcome:
    plans = _plans(args)
    closed = not args.slo and not args.rate
    found = None
    async with Callers(args, args.address, max(args.concurrency) if closed else None) as callers:
        if args.slo:
            found = await callers.largest_rate(args.slo, plans[0], args.repeats)
        else:
            await callers.each(plans)
        return Outcome(
            " ".join(args.address), callers.layers, _settings(args), callers.runs, found, callers.interrupted
        )


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    streams = f"{args.streams} {'calls' if args.unary else 'stream' + 's' * (args.streams > 1)}"
    drawn = ", drawn by the server" if args.synthetic else ""
    quantized = f", hidden states as {args.wire_dtype}" if args.wire_dtype else ""
    servers = len(args.address)
    return {
        "wire_dtype": args.wire_dtype,
        **({"servers": f"a cluster of {servers} servers"} if servers > 1 else {}),
        "routing": args.routing.text,
        "messages": f"{streams}{drawn}{quantized}",
        "echo": args.echo,
    }


def _callers(text: str) -> list[int]:
    return [at_least(1)(part) for part in text.split(",")]


def _rates(text: str) -> list[tuple[float, float | None]]:
    """ "100,200" or "100..1000" -> (rate, rate_to or None) of each run."""
    out: list[tuple[float, float | None]] = []
    for part in text.split(","):
        m = re.fullmatch(r"(.+?)\.\.(.+)", part)
        out.append((positive(m[1]), positive(m[2])) if m else (positive(part), None))
    return out
