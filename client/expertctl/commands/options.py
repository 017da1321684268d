"""Options that several commands share, and how numbers are read and shown."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Literal

from expertctl.common.counts import at_least, duration_s
from expertctl.common.workload import Popularity
from expertctl.load.routing import KINDS, Routing, parse_routing
from expertd.common.ranges import parse_ranges
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.requests.e4m3 import taken
from expertd_client.transports.credentials import Credentials

__all__ = [
    "ADDRESS",
    "OUTPUT_DTYPES",
    "SEVERAL",
    "add_common",
    "add_credentials",
    "add_routing",
    "add_tokens",
    "add_transport",
    "checked_wire_dtype",
    "credentials",
    "new_file",
    "numbers",
    "popularity",
]


ADDRESS = "HOST or HOST:PORT (default port: 50051), [::1]:PORT, unix:/path, https://HOST (TLS)"
"""Of --help: what expertd_client.transports.address reads."""
SEVERAL = "; several addresses are called as one cluster"
OUTPUT_DTYPES = ("bf16", "f16", "f32", "e4m3")
"""Of --output-dtype: what Request.output_dtype takes by name."""


def add_common(parser: argparse.ArgumentParser, addresses: Literal["+", "*"] | None = None) -> None:
    """ADDRESS, --timeout, --json, and those of add_credentials.  addresses: how many, as argparse's nargs."""
    parser.add_argument("address", metavar="ADDRESS", nargs=addresses, help=ADDRESS + (SEVERAL if addresses else ""))
    add_credentials(parser)
    parser.add_argument(
        "--timeout",
        type=duration_s,
        default=30.0,
        metavar="TIME",
        help="for each request, for example 500ms or 10 (seconds) (default: 30s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def add_credentials(parser: argparse._ActionsContainer) -> None:
    """What credentials() reads."""
    parser.add_argument("--tls", action="store_true", help="use TLS with the certificate authorities of this system")
    for flag, text in (
        ("--ca", "use TLS with these certificate authorities (PEM)"),
        ("--cert", "certificate of this client (PEM)"),
        ("--key", "private key of this client (PEM)"),
        ("--token-file", "file with the token that is sent with every call"),
        ("--server-name", "name in the server's certificate (default: the host of ADDRESS)"),
    ):
        parser.add_argument(flag, metavar="NAME" if flag == "--server-name" else "FILE", help=text)


def credentials(args: argparse.Namespace) -> Credentials:
    """Of the flags of add_credentials."""
    return Credentials(args.tls, args.ca, args.cert, args.key, args.token_file, args.server_name or "")


def add_tokens(parser: argparse._ActionsContainer) -> None:
    """--m."""
    parser.add_argument(
        "-m", "--m", type=at_least(0), default=8, metavar="M", help="tokens of each request (default: 8)"
    )


def add_transport(parser: argparse._ActionsContainer) -> None:
    """--transport."""
    parser.add_argument(
        "--transport",
        choices=("auto", "grpc", "shm", "tcp"),
        default="auto",
        help="auto: the fastest that client and server agree on; another one, where the server does not take it, is"
        " refused with the reason (default: auto)",
    )


def add_routing(parser: argparse._ActionsContainer) -> None:
    """--top-k, --routing, --seed, --unary, --wire-dtype."""
    parser.add_argument("--top-k", type=at_least(1), metavar="K", help="routes of each token (default: the model's)")
    parser.add_argument(
        "--routing",
        type=parse_routing,
        default=Routing(),
        metavar="KIND",
        help=f"distribution of the routes over experts: {KINDS} (default: uniform)",
    )
    parser.add_argument(
        "--seed", type=at_least(0), default=0, metavar="N", help="seed of the random tensors (default: 0)"
    )
    parser.add_argument("--unary", action="store_true", help="one gRPC call for each request instead of a stream")
    parser.add_argument(
        "--wire-dtype",
        choices=("e4m3",),
        help="quantize hidden states before sending them (default: send them unchanged)",
    )


def checked_wire_dtype(args: argparse.Namespace, described: pb.DescribeResponse) -> str | None:
    """--wire-dtype, for the server that was described.  Raises ValueError where hidden states would not travel so."""
    wanted: str | None = args.wire_dtype
    if wanted is not None and args.synthetic:
        raise ValueError(
            f"--wire-dtype {wanted}: got --synthetic with it, want one of them: nothing is sent of what is drawn"
        )
    if wanted is not None and not taken(described):
        raise ValueError(
            f"--wire-dtype {wanted}: got a server that does not take it, want one that lists it in Describe"
        )
    return wanted


def popularity(args: argparse.Namespace) -> float | Popularity:
    """--routing as numbers; of Zipf's exponent alone where --synthetic is given.  Raises ValueError."""
    routing: Routing = args.routing
    if routing.path is not None:
        raise ValueError(f"--routing {routing.text}: got it without a load, want it in expertctl load")
    if routing.zipf is not None:
        return routing.zipf
    if getattr(args, "synthetic", False):
        got = f"--synthetic: got --routing {routing.text} with it"
        raise ValueError(f"{got}, want uniform or zipf: servers draw no others")
    return lambda shape: routing.log_weights(shape, args.seed)


def numbers(text: str) -> list[int]:
    """ "0-3,7" -> [0, 1, 2, 3, 7], as argparse's type."""
    try:
        return list(parse_ranges(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def new_file(text: str) -> Path:
    """A file that is to be written at the end, as argparse's type: what could not be written is known before."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"got the folder {text!r}, want a file")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"got {text!r}, in a folder that is not there; want it in one that is")
    return path
