"""The `expertctl` command: asks a server, calls it, loads it.  One row of COMMANDS and one module in commands/ each,
imported when it is called.

Exit codes: 0 done; 1 the server refused, failed or could not be reached; 2 a wrong command line, or a file that it
names.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from types import ModuleType

import expertd
from expertd.common.command_line import Parser
from expertd.common.hostmem import tune_allocator
from expertd.errors import ExpertdError, PlacementError, printable

__all__ = ["COMMANDS", "main", "parser_of"]

COMMANDS: Mapping[str, str] = {
    "describe": "show what a server serves: layers, experts, backends, limits, load",
    "health": "check whether a server accepts requests",
    "load": "send many requests and report latency and throughput",
    "forward": "send one request and show the answer",
    "top": "watch servers: queues, rates, latency, device, hottest experts",
    "trace": "call every layer and write a timeline of where the time goes",
    "record": "record which layers and experts the clients of a server ask for",
    "replay": "send a recording again, at its own speed or faster",
    "plan": "compute a placement: which server serves which experts",
    "apply": "move the experts of running servers to a placement",
    "update": "give servers new weights while they serve",
    "versions": "show which weights servers hold, or go back to the version before",
    "simulate": "simulate a large cluster under load and failures",
    "ray": "run servers as actors of a Ray cluster",
    "strip": "copy a checkpoint without its experts, for an engine that calls servers",
    "bench": "measure client, transports and servers on this machine",
    "completion": "print a completion script for bash, zsh or fish",
}
"""Command -> what --help says.  Module: expertctl.commands.NAME, with add_parser(subparsers) and run(args)."""
_MOST = 4000
"""Characters of an error: what a server or a file says may stand in it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    try:
        return _main(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        return 130


def _main(argv: list[str]) -> int:
    parser, modules = parser_of([a for a in argv if not a.startswith("-")][:1])
    args = parser.parse_args(argv)
    tune_allocator()
    try:
        code = int(modules[args.command].run(args))
        sys.stdout.flush()
        return code
    except ExpertdError as error:
        _complain(error, getattr(args, "json", False))
        return 2 if isinstance(error, PlacementError) else 1
    except ValueError as error:  # an argument that only the server's description, or a file, shows to be wrong
        print(f"expertctl {args.command}: {printable(str(error), _MOST)}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # who reads it has seen enough: `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a file that cannot be written, a disk that is full
        said = f"{error.filename}: {error.strerror}" if error.filename else str(error) or type(error).__name__
        print(f"expertctl {args.command}: {said}", file=sys.stderr)
        return 1


def parser_of(whole: Collection[str]) -> tuple[Parser, dict[str, ModuleType]]:
    """The parser, with the arguments of the commands in `whole`, and their modules; others are names alone, so that
    nothing is imported for them."""
    parser = Parser(prog="expertctl", description="Inspects, calls, loads and manages expertd servers.")
    parser.add_argument("--version", action="version", version=f"expertctl {expertd.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    modules = {}
    for name, text in COMMANDS.items():
        if name in whole:
            modules[name] = importlib.import_module(f"expertctl.commands.{name}")
            modules[name].add_parser(subparsers, text)
        else:
            subparsers.add_parser(name, help=text)
    return parser, modules


def _complain(error: ExpertdError, as_json: bool) -> None:
    """The error for people on stderr, for programs on stdout as {"error": {...}}."""
    if as_json:
        row = {"reason": error.reason, "code": error.code.name, "message": error.message, "retryable": error.retryable}
        print(json.dumps({"error": row}))
    else:
        print(f"expertctl: {error.reason}: {error.message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
