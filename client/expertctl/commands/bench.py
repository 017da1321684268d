"""`expertctl bench`: measures parts of client, transports and servers on this machine.

codec    the codec, a plain stream of bytes and protobuf's own classes
path     time of a request by stage and transport, and of the same bytes without expertd
cluster  the cluster client's own work, and a plain copy of the same bytes
replicas choosing among replicas and hedging, with one bad replica
faults   calls of a cluster whose servers are killed, hang or are slow
moves    calls while experts move between servers
unequal  servers of different speeds: an even split, and the planner's
overload a server with more requests than it can answer in time
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
    parser = subparsers.add_parser(
        "bench", help=text, description="Measures client, transports and servers on this machine."
    )
    parts = parser.add_subparsers(dest="part", metavar="PART", required=True)
    codec = "echoes of 8 KiB to 16 MiB with expertd's codec, plain bytes and protobuf's own classes"
    bench_codec.add_arguments(parts.add_parser("codec", help=codec, description=f"Times {codec}."))
    path = "the time of a request by stage and transport, and of the same bytes without expertd"
    command.add_arguments(
        parts.add_parser(
            "path",
            help=path,
            description=f"Measures {path}: a gRPC stream (inline), a socket (tcp), shared memory with an eventfd (shm)."
            "  They take turns, so that other load of the machine affects all of them.",
        )
    )
    work = "the cluster client's own work, and a plain copy of the bytes that it moves"
    bench_cluster.add_arguments(parts.add_parser("cluster", help=work, description=f"Times {work}."))
    choice = "choosing among two replicas and hedging, where one replica is slow"
    replicas.add_arguments(parts.add_parser("replicas", help=choice, description=f"Times {choice}."))
    trouble = "calls of a cluster whose servers are killed, hang or are slow"
    faults.add_arguments(
        parts.add_parser(
            "faults",
            help=trouble,
            description=f"Measures {trouble}.  It starts three servers on this host (extra `server`): two replicas"
            " of one"
            " half of the experts, one of the other half.  Every answer is checked.",
        )
    )
    moved = "calls while experts move between servers"
    moves.add_arguments(
        parts.add_parser(
            "moves",
            help=moved,
            description=f"Measures {moved}.  It starts three servers on this host (extra `server`) and moves a tenth of"
            " the experts there and back under a constant load.  Every answer is checked.",
        )
    )
    speeds = "servers of different speeds and little memory: an even split, and the planner's placement"
    unequal.add_arguments(
        parts.add_parser(
            "unequal",
            help=speeds,
            description=f"Measures {speeds}.  It starts three servers on this host (extra `server`), plans by their"
            " counters and moves the experts under load.",
        )
    )
    more = "a server with more requests than it can answer in time"
    overload.add_arguments(
        parts.add_parser(
            "overload",
            help=more,
            description=f"Measures {more}: first the p99 at half the rate of a closed loop, then its peak rate,"
            " then multiples of the peak, in an open loop with a deadline of --slack times that p99.  Without"
            " ADDRESS it starts a server (extra `server`); only of that one `server CPU` and `server MB` are known.",
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
