"""`expertctl bench`: what each part of the way costs on this machine.

codec    the codec beside a bare stream of bytes and the stock protobuf classes
path     where the time of a whole request goes, by transport, beside bare bytes
cluster  what a cluster's client does itself, beside a plain copy
replicas what choosing among replicas and asking two of them are good for
faults   what killed, hung and slow servers do to the calls of a cluster
moves    what callers notice of experts that move between servers
unequal  servers of different speeds: an even split, and what the planner makes of it
overload what a server makes of more requests than it can do, each with a deadline
"""

from __future__ import annotations

import argparse
from typing import Any

from expertctl.bench import cluster as bench_cluster
from expertctl.bench import codec as bench_codec
from expertctl.bench.faults import command as faults
from expertctl.bench.faults import moves, replicas, unequal
from expertctl.bench.overload import command as overload
from expertctl.bench.path import command

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any, text: str) -> None:
    parser = subparsers.add_parser("bench", help=text, description="Measures parts of the way on this machine.")
    parts = parser.add_subparsers(dest="part", metavar="PART", required=True)
    codec = "echoes of 8 KiB to 16 MiB: ours, bare bytes, stock protobuf"
    bench_codec.add_arguments(parts.add_parser("codec", help=codec, description=f"Times {codec}."))
    path = "where the time of a request goes, by transport, beside bare bytes"
    command.add_arguments(
        parts.add_parser(
            "path",
            help=path,
            description=f"Shows {path} of the same run: a stream (inline), a socket (tcp), an eventfd and memory (shm),"
            " in a process of their own on this host.  Ways take turns, so that what else the machine does hits all.",
        )
    )
    work = "what a cluster's client does itself, beside a plain copy of the bytes that it moves"
    bench_cluster.add_arguments(parts.add_parser("cluster", help=work, description=f"Times {work}."))
    choice = "two replicas of which one is worse: what choosing and asking both make of it"
    replicas.add_arguments(parts.add_parser("replicas", help=choice, description=f"Times {choice}."))
    trouble = "what killed, hung and slow servers do to the calls of a cluster"
    faults.add_arguments(
        parts.add_parser(
            "faults",
            help=trouble,
            description=f"Shows {trouble}: three servers of its own on this host (it needs the extra `server`), two"
            " replicas of one half of the experts and one of the other half; every answer is checked.",
        )
    )
    moved = "what callers notice of experts that move between servers"
    moves.add_arguments(
        parts.add_parser(
            "moves",
            help=moved,
            description=f"Shows {moved}: three servers of its own on this host (it needs the extra `server`), a tenth"
            " of the experts there and back under a paced load; every answer is checked.",
        )
    )
    speeds = "servers of different speeds and little memory: an even split, and what the planner makes of it"
    unequal.add_arguments(
        parts.add_parser(
            "unequal",
            help=speeds,
            description=f"Shows {speeds}: three servers of its own on this host (it needs the extra `server`), whose"
            " counters make a plan, that expertctl's code then brings them to under load.",
        )
    )
    more = "what a server makes of more requests than it can do, each with a deadline"
    overload.add_arguments(
        parts.add_parser(
            "overload",
            help=more,
            description=f"Shows {more}: its peak, the p99 at half of that, then multiples of the peak with deadlines"
            " of four times that p99, in an open loop.  Without an address it starts a server (the extra `server`).",
        )
    )


def run(args: argparse.Namespace) -> int:
    modules = {
        "codec": bench_codec,
        "path": command,
        "cluster": bench_cluster,
        "replicas": replicas,
        "faults": faults,
        "moves": moves,
        "unequal": unequal,
        "overload": overload,
    }
    return int(modules[args.part].run_command(args))
