"""The `expertctl` command: asks a server, calls it, loads it.  One row of COMMANDS and one module in commands/ each,
imported when it is called.

Exit codes: 0 done; 1 the server refused, failed or could not be reached; 2 a wrong command line.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from types import ModuleType

from expertd.errors import ExpertdError
from expertd.hostmem import tune_allocator

__all__ = ["COMMANDS", "main", "parser_of"]

COMMANDS: Mapping[str, str] = {
    "describe": "what a server holds, accepts and chose",
    "health": "whether a server takes requests",
    "forward": "send one batch and show the answer",
    "load": "send many, in a closed or an open loop, and report latency and throughput",
    "top": "servers as they work: queue, rates, latency, device, the hottest experts",
    "record": "which layers and experts a server's callers ask for, when",
    "replay": "send what was recorded again, at the same times or N times as fast",
    "plan": "which server should hold which experts, from their load and the servers' speed and room",
    "apply": "bring a running cluster to a placement, while it serves",
    "update": "give servers new weights, while they serve",
    "versions": "which weights servers hold; and the version before again",
    "simulate": "what a cluster of many servers would make of a load",
    "ray": "servers as actors of a Ray cluster",
    "trace": "call every layer and write where the time went, for Perfetto and as a picture",
    "strip": "copy a checkpoint without its experts, for a frontend",
    "bench": "measure parts of the client on this machine",
    "completion": "a script that completes commands and options in bash, zsh or fish",
}
"""Command -> what --help says.  Module: expertctl.commands.NAME, with add_parser(subparsers) and run(args)."""


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
        return 1
    except ValueError as error:  # an argument that only the server's description, or a file, shows to be wrong
        print(f"expertctl {args.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # who reads it has seen enough: `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a file that cannot be written, a disk that is full
        said = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        print(f"expertctl {args.command}: {said}", file=sys.stderr)
        return 1


def parser_of(whole: Collection[str]) -> tuple[argparse.ArgumentParser, dict[str, ModuleType]]:
    """The parser, with the arguments of the commands in `whole`, and their modules; others are names alone, so that
    nothing is imported for them."""
    parser = argparse.ArgumentParser(prog="expertctl", description="Talks to an expertd server.")
    parser.add_argument("--version", action="version", version=f"expertctl {importlib.metadata.version('expertd')}")
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
