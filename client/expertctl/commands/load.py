"""`expertctl load`: sends many requests and reports latency, throughput, errors, and where the server's time went."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import re
import sys
from collections.abc import Mapping
from typing import Any

from expertctl.commands import generation
from expertctl.commands.clients import CommandClients
from expertctl.commands.connect import for_one_server
from expertctl.commands.options import (
    ADDRESS,
    OUTPUT_DTYPES,
    SEVERAL,
    add_credentials,
    add_routing,
    add_tokens,
    add_transport,
    new_file,
    numbers,
)
from expertctl.common.brief import briefly
from expertctl.common.counts import at_least, counted, duration_s, positive
from expertctl.common.echo import echo_server, no_echo
from expertctl.common.workload import POOL
from expertctl.load.departures import LoadPlan
from expertctl.load.page import NO_PLOTLY, page
from expertctl.load.selector import run_precisely
from expertctl.load.series import NO_HDR, hdr_text
from expertctl.load.show import Outcome, as_json, show
from expertctl.load.slo import parse_slo
from expertd.common.tables import console

__all__ = ["add_parser", "add_reports", "check_reports", "finish", "run"]

_DEFAULT_SECONDS, _TRIAL_SECONDS = 10.0, 3.0
_CLIENTS = 8
INTERRUPTED = 130
_NOT_WITH_GENERATE = (
    "--slo", "--rate", "--concurrency", "--requests", "--duration", "--warmup", "--streams", "--html", "--hdr",
)  # fmt: skip
"""None = not given."""


def add_parser(subparsers: Any, text: str) -> None:
    parser = subparsers.add_parser(
        "load",
        usage="expertctl load (ADDRESS ... | --echo) [OPTION ...]",
        help=text,
        description="Sends many requests and reports latency and throughput.  Closed loop (the default): --concurrency"
        " clients, each waits for its answer before it sends again.  Open loop (--rate): requests are sent on schedule,"
        " answered or not, and latency counts from the scheduled time.  Several values are a sweep.",
        epilog="Exit code 0 if a request was answered, whatever failed beside it and whether or not the SLO was met; 1"
        " if none was, or the server cannot be reached or refuses; 2 for options that exclude each other or that this"
        " server does not take, and for --slo without any answer; 130 after Ctrl-C, with the report until then.",
    )
    _add_most_used(parser)
    _add_loop(parser.add_argument_group("Rate"))
    requests = parser.add_argument_group("Requests")
    requests.add_argument("--layers", type=numbers, metavar="0-3,7", help="layers, called in turn (default: all)")
    add_routing(requests)
    wire = parser.add_argument_group("Messages")
    wire.add_argument(
        "--synthetic", action="store_true", help="the server generates the tensors: requests of about 60 bytes"
    )
    wire.add_argument("--digest", action="store_true", help="the server answers with a checksum instead of the output")
    wire.add_argument(
        "--output-dtype", choices=OUTPUT_DTYPES, default="bf16", help="dtype of the outputs (default: bf16)"
    )
    turn = parser.add_argument_group("Decoding steps of a model")
    turn.add_argument(
        "--generate",
        type=at_least(1),
        metavar="STEPS",
        help="one client calls the layers one after the other: time of a layer and of a step, over the transport that"
        " the server offers and over gRPC",
    )
    turn.add_argument("--depth", type=at_least(1), metavar="N", help="layers of a step; --layers are repeated")
    echo = parser.add_argument_group("A server without kernels")
    echo.add_argument("--echo", action="store_true", help="start an echo server and load it instead of ADDRESS")
    echo.add_argument(
        "--hidden-size", type=at_least(1), default=4096, metavar="H", help="hidden size of --echo (default: 4096)"
    )
    add_reports(parser)
    connection = parser.add_argument_group("Connection")
    add_transport(connection)
    add_credentials(connection)


def _add_most_used(parser: argparse.ArgumentParser) -> None:
    """ADDRESS and the options that most runs need."""
    parser.add_argument("address", metavar="ADDRESS", nargs="*", help=ADDRESS + SEVERAL)
    parser.add_argument("-c", "--concurrency", type=_callers, metavar="N,N", help="clients (default: 8)")
    parser.add_argument(
        "-n", "--requests", type=at_least(1), metavar="N", help="most requests (default: as many as fit in --duration)"
    )
    parser.add_argument(
        "-z",
        "--duration",
        type=duration_s,
        metavar="TIME",
        help="how long requests are sent, for example 10s, 2m or 10 (seconds); an open loop that is late stops a second"
        " after it; answers are waited for (default: 10s; with --slo 3s for each trial; no limit with --requests)",
    )
    parser.add_argument("--rate", type=_rates, metavar="R,R", help="open loop: requests per second; a ramp: 100..1000")
    add_tokens(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _add_loop(loop: argparse._ArgumentGroup) -> None:
    loop.add_argument(
        "--arrivals",
        choices=("poisson", "fixed"),
        default="poisson",
        help="open loop: random or equal gaps (default: poisson)",
    )
    loop.add_argument(
        "--slo", type=parse_slo, metavar="p99<20ms", help="find the largest rate that meets this objective"
    )
    loop.add_argument(
        "--repeats",
        type=at_least(1),
        default=3,
        metavar="N",
        help="repetitions of the last trial of --slo (default: 3)",
    )
    loop.add_argument(
        "--warmup",
        type=at_least(0),
        metavar="N",
        help=f"requests before the measurement (default: {POOL})",
    )
    loop.add_argument("--streams", type=at_least(1), metavar="N", help="connections (default: 1)")
    loop.add_argument(
        "--timeout",
        type=duration_s,
        default=30.0,
        metavar="TIME",
        help="for each request, from when it was really sent, also in the open loop (default: 30s)",
    )


def add_reports(parser: argparse.ArgumentParser) -> None:
    """What finish() writes."""
    reports = parser.add_argument_group("Reports")
    reports.add_argument("--html", type=new_file, metavar="FILE", help="write a page with plots (needs plotly)")
    reports.add_argument("--hdr", type=new_file, metavar="FILE", help="write latencies as .hgrm (needs hdrhistogram)")


def run(args: argparse.Namespace) -> int:
    _check(args)
    with contextlib.ExitStack() as stack:
        if args.echo:
            if missing := no_echo():
                raise ValueError(f"--echo: {missing}")
            args.address = [stack.enter_context(echo_server(args.hidden_size, max(4096, args.m)))]
        if args.generate:
            return generation.run(args)
        if note := _not_carried(args):
            print(note, file=sys.stderr)
        return finish(args, run_precisely(_run(args)))


def finish(args: argparse.Namespace, o: Outcome) -> int:
    """Prints and writes what was found, and names each file on standard error; the exit code."""
    if args.json:
        print(json.dumps(as_json(o), indent=2))
    else:
        show(console(), o)
    if args.html is not None:
        args.html.write_text(page(o), encoding="utf-8")
        print(f"wrote {args.html}", file=sys.stderr)
    if args.hdr is not None and o.runs:
        args.hdr.write_text(hdr_text(o.runs[-1].report.raw.latencies_s), encoding="ascii")
        print(f"wrote {args.hdr}", file=sys.stderr)
    if o.interrupted:
        return INTERRUPTED
    return 0 if any(run.report.answered for run in o.runs) else 1


def _check(args: argparse.Namespace) -> None:
    """Raises ValueError for options that exclude each other."""
    if args.echo == bool(args.address):
        got = "both" if args.echo else "neither"
        raise ValueError(f"ADDRESS and --echo: got {got}, want one of them")
    _check_cluster(args)
    _check_transport(args)
    _check_generate(args)
    _check_synthetic(args)
    given = args.concurrency is not None
    args.concurrency = args.concurrency or [_CLIENTS]
    args.warmup = POOL if args.warmup is None else args.warmup
    args.streams = args.streams or 1
    if args.depth and not args.generate:
        raise ValueError(f"--depth {args.depth}: got it without --generate, want both: other loads have no steps")
    several = len(args.concurrency) * len(args.rate or [0]) > 1
    if args.slo and several:
        raise ValueError("--slo: got a sweep with it, want one value of --concurrency and no --rate")
    if args.slo and args.rate:
        raise ValueError("--slo: got --rate with it, want one of them: --slo searches the rate")
    if args.slo and args.requests:
        raise ValueError("--slo: got --requests with it, want --duration: the length of a trial")
    if args.rate and given:
        raise ValueError("--concurrency: got --rate with it, want one of them: an open loop does not wait for answers")
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
        ("--digest", args.digest, "the checksum of a partial sum is not that of the sum"),
        ("--generate", args.generate, f"expertctl trace {' '.join(args.address)} shows where a cluster's step goes"),
        ("--output-dtype e4m3", args.output_dtype == "e4m3", "partial sums have to be added"),
    ):
        if given:
            raise for_one_server(flag, args.address, why)


def _check_transport(args: argparse.Namespace) -> None:
    """Raises ValueError for a --transport that another option excludes."""
    if args.transport == "auto":
        return
    if args.generate:
        raise ValueError("--transport: got --generate with it, want one of them: --generate shows both transports")
    if args.unary and args.transport != "grpc":
        raise ValueError(f"--transport {args.transport}: got --unary with it, want one of them: unary calls are gRPC")


def _check_generate(args: argparse.Namespace) -> None:
    """Before defaults are filled in.  Raises ValueError for what --generate does not do."""
    if not args.generate:
        return
    for flag in _NOT_WITH_GENERATE:
        if getattr(args, flag[2:]) is not None:
            raise ValueError(
                f"--generate: got {flag} with it, want one of them: --generate is one client that sends its steps"
            )
    if args.routing.path is not None:
        raise ValueError(f"--generate: got --routing {args.routing.text} with it, want uniform, zipf, hot or incast")


def _check_synthetic(args: argparse.Namespace) -> None:
    """Raises ValueError for recorded routes, which a server cannot generate."""
    if args.synthetic and args.routing.path is not None:
        raise ValueError(
            f"--synthetic: got --routing {args.routing.text} with it, want uniform or zipf: servers draw no others"
        )


def check_reports(args: argparse.Namespace) -> None:
    """Before anything is sent.  Raises ValueError for a report that nobody here can make."""
    for flag, path, module, why in (("--html", args.html, "plotly", NO_PLOTLY), ("--hdr", args.hdr, "hdrh", NO_HDR)):
        if path is not None and importlib.util.find_spec(module) is None:
            raise ValueError(f"{flag}: {why}")


def _not_carried(args: argparse.Namespace) -> str:
    """A note where no request will travel over the transport that was asked for; "" = they will."""
    flags = [flag for flag in ("--synthetic", "--digest") if getattr(args, flag[2:])]
    if args.transport not in ("shm", "tcp") or not flags:
        return ""
    agreed = f"though --transport {args.transport} is agreed on"
    return f"note: {' and '.join(flags)}: these requests travel over gRPC, {agreed}"


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
    async with CommandClients(args, args.address, max(args.concurrency) if closed else None) as callers:
        if args.slo:
            found = await callers.largest_rate(args.slo, plans[0], args.repeats)
        else:
            await callers.each(plans)
        settings = _settings(args, callers.transports)
        return Outcome(" ".join(args.address), callers.layers, settings, callers.runs, found, callers.interrupted)


def _settings(args: argparse.Namespace, transports: Mapping[str, str]) -> dict[str, Any]:
    more = ", tensors generated by the server" if args.synthetic else ""
    more += f", hidden states sent as {args.wire_dtype}" if args.wire_dtype else ""
    servers = len(args.address)
    return {
        "wire_dtype": args.wire_dtype,
        **({"servers": f"a cluster of {servers} servers"} if servers > 1 else {}),
        "routing": args.routing.text,
        "transport": transports[args.address[0]] if servers == 1 else dict(transports),
        "messages": counted(args.streams, "connection") + more,
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
