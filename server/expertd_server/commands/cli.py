"""The `expertd` command.  One row of COMMANDS and one module in commands/ each, imported when it is called."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence

import expertd
from expertd.common.command_line import Parser
from expertd_server.commands.extra import complaint

__all__ = ["COMMANDS", "main"]

COMMANDS: Mapping[str, str] = {
    "serve": "load experts and answer calls over gRPC",
    "explain": "print which backend would serve each layer, and why not the others",
    "verify": "check a checkpoint's experts against the float32 reference",
    "prepare": "compile the kernels that a start would compile",
    "quantize": "write a quantized copy of an unquantized checkpoint",
}
"""Command -> what --help says.  Module: expertd_server.commands.NAME, with add_parser(subparsers) and run(args)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code (2 for a wrong command line, as argparse does, and for an install
    that is not that of a server: the next start would fail, too)."""
    try:
        return _main(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        return 130


def _main(argv: list[str]) -> int:
    parser = Parser(prog="expertd", description="Serves the experts of quantized MoE models over gRPC.")
    parser.add_argument("--version", action="version", version=f"expertd {expertd.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    named = next((a for a in argv if not a.startswith("-")), None)
    modules = {}
    for name, text in COMMANDS.items():
        if name == named:
            modules[name] = importlib.import_module(f"expertd_server.commands.{name}")
            modules[name].add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=text)
    args = parser.parse_args(argv)
    if missing := complaint():
        print(f"expertd {args.command}: {missing}", file=sys.stderr)
        return 2
    try:
        code = int(modules[args.command].run(args))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # who reads it has seen enough: `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
