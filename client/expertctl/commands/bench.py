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
from expertctl.common.columns import IndentedFormatter, explained

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any, text: str) -> None:
    parser = subparsers.add_parser(
        "bench", help=text, description="Measures client, transports and servers on this machine."
    )
    parts = parser.add_subparsers(dest="part", metavar="PART", required=True)
    _add_client_parts(parts)
    _add_server_parts(parts)


def _part(parts: Any, name: str, what: str, description: str, columns: str = "") -> argparse.ArgumentParser:
    """description: a sentence of which {} is `what`; columns: of the tables, for the end of --help."""
    made: argparse.ArgumentParser = parts.add_parser(
        name, help=what, description=description.format(what), formatter_class=IndentedFormatter, epilog=columns or None
    )
    return made


def _add_client_parts(parts: Any) -> None:
    """Those that need no server of their own, or start echo servers."""
    codec = "echoes of 8 KiB to 16 MiB with expertd's codec, plain bytes and protobuf's own classes"
    bench_codec.add_arguments(_part(parts, "codec", codec, "Times {}.", explained(bench_codec.COLUMNS)))
    path = "the time of a request by stage and transport, and of the same bytes without expertd"
    how = (
        "Measures {}: a gRPC stream (inline), a socket (tcp), shared memory with an eventfd (shm).  They take turns, so"
        " that other load of the machine affects all of them."
    )
    command.add_arguments(_part(parts, "path", path, how))
    work = "the cluster client's own work, and a plain copy of the bytes that it moves"
    bench_cluster.add_arguments(_part(parts, "cluster", work, "Times {}."))
    choice = "choosing among two replicas and hedging, where one replica is slow"
    replicas.add_arguments(_part(parts, "replicas", choice, "Times {}.", explained(replicas.COLUMNS)))


def _add_server_parts(parts: Any) -> None:
    """Those that start servers."""
    trouble = "calls of a cluster whose servers are killed, hang or are slow"
    how = (
        "Measures {}.  It starts three servers on this host (extra `server`): two replicas of one half of the experts,"
        " one of the other half.  Every answer is checked."
    )
    faults.add_arguments(_part(parts, "faults", trouble, how, explained(faults.COLUMNS)))
    moved = "calls while experts move between servers"
    how = (
        "Measures {}.  It starts three servers on this host (extra `server`) and moves a tenth of the experts there and"
        " back under a constant load.  Every answer is checked."
    )
    moves.add_arguments(_part(parts, "moves", moved, how, explained(moves.COLUMNS, *moves.MORE)))
    speeds = "servers of different speeds and little memory: an even split, and the planner's placement"
    how = (
        "Measures {}.  It starts three servers on this host (extra `server`), plans by their counters and moves the"
        " experts under load."
    )
    unequal.add_arguments(_part(parts, "unequal", speeds, how, explained(unequal.COLUMNS, *unequal.MORE)))
    more = "a server with more requests than it can answer in time"
    how = (
        "Measures {}: first the p99 at half the rate of a closed loop, then its peak rate, then multiples of the peak,"
        " in an open loop with a deadline of --slack times that p99.  Without ADDRESS it starts a server (extra"
        " `server`); only of that one `server CPU` and `server MB` are known."
    )
    overload.add_arguments(_part(parts, "overload", more, how))


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
