"""`expertctl ray`: servers as actors of a Ray cluster."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from rich.table import Table

from expertctl.commands.options import add_credentials, credentials, new_file
from expertctl.common.counts import at_least, at_least_0, duration_s
from expertd.common.tables import console, print_sentence, print_table
from expertd.errors import UnimplementedError
from expertd.placement import Placement

if TYPE_CHECKING:
    from rich.console import Console

    from expertctl.ray.deploy import Rows
    from expertctl.ray.spec import Spec

__all__ = ["add_parser", "run"]

_UP = """Options after -- are those of expertd serve, for every server; {node} is the address of its node, {part} its
shard and {replica} its replica.  Example: expertctl ray up --checkpoint /models/m --shards 8 --replicas 2 --resources
GPU=1 -- --cache /var/cache/expertd --metrics-listen {node}:0 --insecure.  Every node needs expertd with the extras
server and ray, and the checkpoint at the same path.  Ray restarts a server whose process or node ends; replicas of a
shard are placed on different nodes if there are any.  Clients: ExpertCluster(RayServers("experts"))."""


def add_parser(subparsers: Any, text: str) -> None:
    parser = subparsers.add_parser("ray", help=text, description="Runs servers as actors of a Ray cluster.")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    up = actions.add_parser("up", help="start servers and wait until they serve", epilog=_UP)
    what = up.add_mutually_exclusive_group(required=True)
    what.add_argument("--checkpoint", metavar="DIR", help="as expertd serve's, on every node")
    what.add_argument("--synthetic", metavar="MODEL:SCHEME", help="as expertd serve's")
    up.add_argument(
        "--shards", type=at_least(1), default=1, metavar="N", help="equal shards of the experts (default: 1)"
    )
    up.add_argument("--replicas", type=at_least(1), default=1, metavar="N", help="replicas of each shard (default: 1)")
    up.add_argument(
        "--resources",
        action="append",
        default=[],
        metavar="[SHARDS:]NAME=N,...",
        help="Ray resources of each server, for example GPU=1, or 6-7:xpu=1,CPU=4 for these shards; the last one that"
        " names a shard counts (default: CPU=1)",
    )
    up.add_argument(
        "--wait", type=at_least_0, default=1800.0, metavar="S", help="seconds until all servers serve (default: 1800)"
    )
    up.add_argument("options", nargs="*", metavar="-- OPTION ...", help="options of expertd serve, for every server")
    status = actions.add_parser("status", help="show the state of every server")
    status.add_argument("--json", action="store_true", help="print JSON instead of a table")
    down = actions.add_parser("down", help="drain and stop all servers")
    down.add_argument(
        "--grace", type=at_least_0, default=30.0, metavar="S", help="seconds for requests in flight (default: 30)"
    )
    follow = actions.add_parser("follow", help="keep a placement file up to date, for clients outside of Ray")
    follow.add_argument(
        "file", type=new_file, metavar="FILE", help="placement file, for PlacementFile and EXPERTD_ADDRESS"
    )
    follow.add_argument(
        "--timeout", type=duration_s, default=10.0, metavar="TIME", help="for each query (default: 10s)"
    )
    add_credentials(follow)
    for action in (up, status, down, follow):
        action.add_argument(
            "--name", default="experts", metavar="NAME", help="name of these servers (default: experts)"
        )
        action.add_argument(
            "--ray", metavar="ADDRESS", help="Ray cluster (default: RAY_ADDRESS, or the one on this host)"
        )


def run(args: argparse.Namespace) -> int:
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # what Ray's next version does
    try:
        import ray
    except ImportError as error:
        raise UnimplementedError.about(
            "expertctl ray", got=str(error), want="the package", remedy="pip install 'ray>=2.50,<3'"
        ) from None
    spec = _spec(args) if args.action == "up" else None
    from expertd_client.cluster.ray import connect

    joined = connect(args.ray)
    try:
        if spec is not None:
            return _up(spec, args)
        return {"status": _status, "down": _down, "follow": _follow}[args.action](args)
    finally:
        if joined:
            ray.shutdown()


def _spec(args: argparse.Namespace) -> Spec:
    from expertctl.ray.spec import Spec, needs_of

    name, value = ("--checkpoint", args.checkpoint) if args.checkpoint else ("--synthetic", args.synthetic)
    argv = (name, value, *args.options)
    return Spec(args.name, argv, args.shards, args.replicas, needs_of(args.resources))


def _up(spec: Spec, args: argparse.Namespace) -> int:
    from expertctl.ray.deploy import up

    out, begin_s = console(), time.monotonic()
    with out.status("starting") as line:

        def told(rows: Rows) -> None:
            phases = [row["phase"] for row in rows]
            line.update(", ".join(f"{phases.count(p)} {p}" for p in sorted(set(phases))))

        try:
            rows = up(spec, args.wait, told)
        except KeyboardInterrupt:
            print("expertctl ray up: the servers go on starting; status shows them, down ends them", file=sys.stderr)
            raise
    _show(out, rows)
    out.print(f"{len(rows)} servers serve after {time.monotonic() - begin_s:.0f} s", soft_wrap=True)
    return 0


def _status(args: argparse.Namespace) -> int:
    from expertctl.ray.deploy import status

    rows = status(args.name)
    if args.json:
        print(json.dumps({"servers": rows}))
    else:
        _show(console(), rows)
    return 0 if all(row["phase"] == "serving" for row in rows) else 1


def _down(args: argparse.Namespace) -> int:
    from expertctl.ray.deploy import down

    answered = down(args.name, args.grace)
    console().print(f"{args.name}: ended{'' if answered else '; not everything that was taken is answered'}")
    return 0 if answered else 1


def _follow(args: argparse.Namespace) -> int:
    from expertctl.ray.follow import Follower
    from expertd_client.cluster.ray import RayServers

    follower = Follower(RayServers(args.name), args.file, credentials(args), args.timeout)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    out = console()
    while not ended.is_set():
        placement: Placement | None = follower.step()
        if placement is not None:
            out.print(f"epoch {placement.epoch}: {len(placement.servers)} servers", soft_wrap=True)
    return 0


def _show(out: Console, rows: Rows) -> None:
    """A line for each server; what some say of their state is a sentence below."""
    table = Table(show_edge=False, pad_edge=False)
    for name in ("part", "replica", "state", "address", "starts"):
        table.add_column(name, justify="right" if name in ("part", "replica", "starts") else "left")
    for row in rows:
        table.add_row(*(str(row[k]) for k in ("part", "replica", "phase", "address", "starts")))
    print_table(out, table)
    for row in rows:
        if row["why"]:
            print_sentence(out, f"part {row['part']}, replica {row['replica']}: {row['why']}")
