"""`expertctl replay`: sends what was recorded again, at the same times or N times as fast."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from expertctl.commands.clients import CommandClients
from expertctl.commands.load import add_reports, check_reports, finish
from expertctl.commands.options import OUTPUT_DTYPES, add_common, add_transport
from expertctl.common.counts import at_least, counted, positive
from expertctl.load.departures import LoadPlan
from expertctl.load.recording import Recording, replayed
from expertctl.load.selector import run_precisely
from expertctl.load.show import Outcome

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any, text: str) -> None:
    parser = subparsers.add_parser(
        "replay",
        help=text,
        description="Sends the requests of a recording again, at the recorded times: the same layers, tokens and routes"
        " with random hidden states and weights.  The report is that of expertctl load.",
    )
    parser.add_argument("recording", type=Path, metavar="FILE", help="file that expertctl record wrote")
    add_common(parser)
    parser.add_argument(
        "--speed", type=positive, default=1.0, metavar="X", help="times the recorded speed (default: 1)"
    )
    parser.add_argument("--requests", type=at_least(1), metavar="N", help="only the first N")
    parser.add_argument(
        "--seed", type=at_least(0), default=0, metavar="N", help="seed of the random tensors (default: 0)"
    )
    parser.add_argument("--streams", type=at_least(1), default=1, metavar="N", help="connections (default: 1)")
    parser.add_argument("--unary", action="store_true", help="one gRPC call for each request instead of a stream")
    parser.add_argument("--wire-dtype", choices=("e4m3",), help="quantize hidden states before sending them")
    parser.add_argument("--output-dtype", choices=OUTPUT_DTYPES, default="bf16", help="default: bf16")
    add_transport(parser)
    add_reports(parser)


def run(args: argparse.Namespace) -> int:
    check_reports(args)
    recording = Recording.load(args.recording)
    if not len(recording):
        raise ValueError(f"{args.recording}: got a recording of no requests, want one of some")
    return finish(args, run_precisely(_replay(args, recording)))


async def _replay(args: argparse.Namespace, recording: Recording) -> Outcome:
    count = min(len(recording), args.requests or len(recording))
    tokens = set(recording.tokens[:count].tolist())
    plan = LoadPlan(
        tokens=tokens.pop() if len(tokens) == 1 else 0,
        schedule=(recording.at_us[:count] * 1e-6 / args.speed).tolist(),
        requests=count,
        seed=args.seed,
    )
    async with CommandClients(args, [args.address]) as callers:
        (described,) = callers.described
        wanted = replayed(recording, described, args.seed, output_dtype=args.output_dtype)
        await callers.run(plan, wanted)
    settings = {
        "wire_dtype": args.wire_dtype,
        "transport": callers.transports[args.address],
        "messages": counted(args.streams, "connection"),
        "recording": str(args.recording),
        "speed": args.speed,
    }
    layers = sorted(set(recording.layer[:count].tolist()))
    return Outcome(args.address, layers, settings, callers.runs, None, callers.interrupted)
