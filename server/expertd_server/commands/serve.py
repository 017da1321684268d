"""expertd serve: load experts and answer calls."""

from __future__ import annotations

import argparse
import logging
import sys
from typing import Any

from expertd_server.config import ConfigError, add_flags, resolve

__all__ = ["add_parser", "run"]

_SWITCH_S = 0.0003
"""How long the event loop and the engine's thread may keep Python's lock from each other.  At Python's default of 5 ms
a round trip of one token took 855 us, at 0.3 ms 690 us (median, gRPC stream over loopback, empty kernel, 16 cores)."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="load experts and answer calls over gRPC",
        description="Loads quantized experts once and answers calls over gRPC until SIGTERM.  Every option can also"
        " stand in the environment (EXPERTD_MAX_TOKENS) or in a TOML file (--config); a flag goes before both.",
    )
    add_flags(parser)
    parser.add_argument("--print-config", action="store_true", help="print the configuration and stop")


def run(args: argparse.Namespace) -> int:
    try:
        config = resolve(args)
    except ConfigError as e:
        print(f"expertd serve: {e}", file=sys.stderr)
        return 2
    if args.print_config:
        print(config)
        return 0
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    # torch and grpc take a second to import: only now, when the options are known to be good.
    import asyncio
    import faulthandler
    import signal

    from rich.console import Console

    from expertd.hostmem import tune_allocator
    from expertd_server.boot.assignment import BootError
    from expertd_server.life import serve

    tune_allocator()
    sys.setswitchinterval(_SWITCH_S)
    # kill -USR1 prints every thread's stack: what a server that hangs is doing.
    faulthandler.register(signal.SIGUSR1, file=2)
    try:
        return asyncio.run(serve(config, Console(width=None if sys.stdout.isatty() else 120)))
    except BootError as e:
        print(f"expertd serve: {e}", file=sys.stderr)
        return 1
