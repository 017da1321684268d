"""`expertctl record`: which layers and experts a server's callers ask for, when, for `expertctl replay` and `load`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import json
from typing import Any

from expertctl.commands.options import add_common, credentials, new_file
from expertctl.common.counts import at_least, duration_s
from expertctl.load.live import stoppable
from expertctl.load.proxy import Proxy, Recorder
from expertctl.load.recording import Recording
from expertd.common.tables import console
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.clients.async_client import AsyncExpertClient
from expertd_client.transports.address import parse_address

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any, text: str) -> None:
    parser = subparsers.add_parser(
        "record",
        help=text,
        description="A proxy in front of a server: clients call --listen instead, every call is forwarded unchanged,"
        " and"
        " the layers, tokens, routes and times of the requests are written to FILE at the end (Ctrl-C, --seconds or"
        " --requests).",
        epilog="Privacy: neither hidden states nor weights are written, but routes and times reveal something about"
        " the text: treat FILE like the text itself.  Recorded clients use gRPC, not shared memory or TCP.  Exit code"
        " 0: FILE has requests, however recording ended (a second Ctrl-C and SIGTERM, too); 1: it has none, or the"
        " server could not be reached at the start; 2: wrong arguments.",
    )
    add_common(parser)
    parser.add_argument(
        "-o", "--output", type=new_file, required=True, metavar="FILE", help="file for the recording (npz)"
    )
    parser.add_argument(
        "--listen",
        type=_here,
        default="127.0.0.1:0",
        metavar="HOST:PORT",
        help="address of the proxy on this host (default: a free port)",
    )
    parser.add_argument(
        "--seconds",
        type=duration_s,
        metavar="TIME",
        help="how long to record, for example 30 (seconds) or 2m (default: until Ctrl-C)",
    )
    parser.add_argument(
        "--requests",
        type=at_least(1),
        default=1_000_000,
        metavar="N",
        help="most requests (default: 1,000,000); 1 GiB of routes ends it, too",
    )


def run(args: argparse.Namespace) -> int:
    recording = asyncio.run(_record(args))
    recording.save(args.output)
    facts = {
        "file": str(args.output),
        "requests": len(recording),
        "seconds": float(recording.at_us[-1]) * 1e-6 if len(recording) else 0.0,
        "tokens": int(recording.tokens.sum()),
    }
    if args.json:
        print(json.dumps(facts))
    else:
        text = (
            f"{facts['requests']:,} requests of {facts['tokens']:,} tokens in {facts['seconds']:.2f} s: {args.output}"
        )
        console().print(text, markup=False, soft_wrap=True)
    return 0 if len(recording) else 1


async def _record(args: argparse.Namespace) -> Recording:
    """What was recorded until the end: the first signal closes the proxy, one more does not wait for open calls."""
    async with AsyncExpertClient(args.address, credentials=credentials(args)) as client:
        described: pb.DescribeResponse = await client.describe(timeout_s=args.timeout)
    recorder = Recorder(args.requests)
    recorder.recording(described).check()  # what it says of itself, before anything waits for it
    proxy = Proxy(args.address, args.listen, credentials(args), recorder)
    with stoppable(recorder.full.set, proxy.hurry):
        async with proxy:
            if not args.json:
                console().print(f"recording: call {proxy.address} instead of {args.address}", markup=False)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(recorder.full.wait(), args.seconds)
    return recorder.recording(described)


def _here(text: str) -> str:
    """An address of this host alone: the proxy speaks plain text and shows the server its own token."""
    if text.startswith("unix:"):
        return text
    host, _, port = text.rpartition(":")
    try:
        if port != "0":
            parse_address(text)
        here = host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; want 127.0.0.1:PORT, [::1]:PORT or unix:/path") from None
    if not here:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, want 127.0.0.1:PORT, [::1]:PORT or unix:/path: what is recorded travels in plain text"
        )
    return text
