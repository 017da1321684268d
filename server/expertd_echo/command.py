"""The command `expertd-echo`.  Help needs no package of the extra `server`."""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from expertd.common.command_line import Parser
from expertd_server.commands.extra import complaint
from expertd_server.config.parsers import argument, whole
from expertd_server.config.values import Address, Shard

if TYPE_CHECKING:
    from expertd.common.signals import MainWait

__all__ = ["main"]

_NAME = "expertd-echo"
_WHOLE = Shard(0, 1)


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT.  Returns the exit code: 1 where the server cannot start, 2 where
    packages are missing."""
    args = _parser().parse_args(argv)
    if missing := complaint():
        print(f"{_NAME}: {missing}", file=sys.stderr)
        return 2
    return _serve(args)


def _parser() -> Parser:
    parser = Parser(
        prog=_NAME,
        description="A server without experts, which answers every request with its hidden states.  It shows what the"
        " service itself costs; expertctl bench path and expertctl load --echo start one.",
    )
    parser.add_argument(
        "--listen",
        type=argument(Address.parse),
        default=Address("127.0.0.1", 0),
        metavar="HOST:PORT",
        help="address of the gRPC server (default: a free port on this host)",
    )
    parser.add_argument(
        "--hidden-size", type=argument(whole(1)), default=4096, metavar="H", help="hidden size (default: 4096)"
    )
    parser.add_argument(
        "--max-tokens",
        type=argument(whole(1)),
        default=4096,
        metavar="M",
        help="most tokens of a request (default: 4096)",
    )
    parser.add_argument(
        "--experts",
        type=argument(whole(1)),
        default=8,
        metavar="E",
        help="experts of its layer (default: 8)",
    )
    parser.add_argument(
        "--shard",
        type=argument(Shard.parse),
        default=_WHOLE,
        metavar="RANK/COUNT",
        help="shard of the experts (default: all)",
    )
    parser.add_argument(
        "--batch-us",
        type=argument(whole(0)),
        default=0,
        metavar="US",
        help="microseconds that each batch takes (default: 0)",
    )
    parser.add_argument(
        "--row-us",
        type=argument(whole(0)),
        default=0,
        metavar="US",
        help="additional microseconds for each token (default: 0)",
    )
    parser.add_argument("--refuse-late", choices=("yes", "no"), default="yes", help="as of `expertd serve`")
    parser.add_argument("--nonfinite", choices=("pass", "refuse", "zero"), default="pass", help="as of `expertd serve`")
    for name in ("--tls-cert", "--tls-key", "--tls-client-ca"):
        parser.add_argument(name, type=Path, metavar="FILE", help="as of `expertd serve`, for gRPC")
    parser.add_argument("--with-stdin", action="store_true", help="also stop when standard input is closed")
    return parser


def _serve(args: argparse.Namespace) -> int:
    from expertd.common.hostmem import tune_allocator
    from expertd.common.signals import ended_by_signals
    from expertd_echo.server import serving
    from expertd_server.boot.assignment import BootError
    from expertd_server.commands.serve import as_server
    from expertd_server.transports.security import Security

    tune_allocator()
    as_server()
    pace, refuse_late = (args.batch_us, args.row_us), args.refuse_late == "yes"
    security = Security(args.tls_cert, args.tls_key, args.tls_client_ca)
    held = args.shard.experts(args.experts)
    sizes = (args.hidden_size, args.max_tokens)
    try:
        with (
            ended_by_signals() as waiting,
            serving(args.listen, *sizes, pace, refuse_late, args.nonfinite, security, args.experts, held) as address,
        ):
            if args.with_stdin:
                threading.Thread(target=_wait_for_stdin, args=(waiting,), daemon=True).start()
            print(f"serving on {address}", flush=True)
            waiting.wait()
    except BootError as error:
        print(f"{_NAME}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _wait_for_stdin(waiting: MainWait) -> None:
    sys.stdin.read()
    waiting.ring()
