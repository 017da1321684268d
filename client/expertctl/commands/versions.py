"""`expertctl versions`: which weights servers hold, and the version before again."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from rich.table import Table

from expertctl.commands.options import ADDRESS, add_credentials, credentials
from expertctl.common.counts import at_least, duration_s
from expertd.common.ranges import format_ranges
from expertd.common.tables import console, print_table
from expertd.errors import printable
from expertd.v1 import weights_service_pb2 as pb
from expertd_client.weights import Updater

__all__ = ["add_parser", "run"]

_DIGEST = 12
"""Characters of a digest that are shown."""


def add_parser(subparsers: Any, text: str) -> None:
    parser = subparsers.add_parser(
        "versions", help=text, description="Shows which weights servers hold, or goes back to the version before."
    )
    parser.add_argument("address", metavar="ADDRESS", nargs="+", help=ADDRESS)
    parser.add_argument(
        "--rollback",
        nargs="?",
        type=at_least(1),
        const=0,
        metavar="N",
        help="serve the version before again, on all servers or on none; N: it must be that one",
    )
    parser.add_argument(
        "--timeout", type=duration_s, default=30.0, metavar="TIME", help="for each query (default: 30s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_credentials(parser)


def run(args: argparse.Namespace) -> int:
    out = console()
    with Updater(args.address, credentials=credentials(args), timeout_s=args.timeout) as updater:
        if args.rollback is not None:
            updater.rollback(args.rollback)
        found = updater.each("status", lambda s: s.status())
    if args.json:
        print(json.dumps({address: _facts(status) for address, status in found.items()}))
        return 0
    print_table(out, _table(found))
    for address, status in found.items():
        if status.update:
            state = pb.UpdateState.Name(status.state).removeprefix("UPDATE_STATE_").lower()
            done = f"{status.layers_done} of {status.layers} layers"
            if status.rolling:
                done += f", {status.layers_switched} of them switched"
            out.print(f"{address}: version {status.version} is {state}, {done}", soft_wrap=True)
        if status.last_error:
            out.print(f"{address}: the last update failed: {printable(status.last_error)}", soft_wrap=True)
    for (number, folder), servers in _folders(found).items():
        out.print(f"version {number} was read from {printable(folder)} by {', '.join(servers)}", soft_wrap=True)
    served = {status.versions[0].number for status in found.values() if status.versions}
    if len(served) > 1:
        out.print(f"servers serve several versions: {', '.join(map(str, sorted(served)))}")
    return 0


def _folders(found: Mapping[str, pb.GetUpdateResponse]) -> dict[tuple[int, str], list[str]]:
    """(version, folder on the server's host) -> servers that read it there."""
    out: dict[tuple[int, str], list[str]] = {}
    for address, status in found.items():
        for v in status.versions:
            if v.folder:
                out.setdefault((v.number, v.folder), []).append(address)
    return out


def _facts(status: pb.GetUpdateResponse) -> dict[str, Any]:
    return {
        "versions": [
            {
                "number": v.number,
                "label": v.label,
                "digest": v.digest,
                "ready_unix_ns": v.ready_unix_ns,
                "serving": v.serving,
                "source": v.source,
                "folder": v.folder,
                "rolling": v.rolling,
                "layers": list(v.layers),
            }
            for v in status.versions
        ],
        "update": status.update,
        "last_error": status.last_error,
    }


def _table(found: Mapping[str, pb.GetUpdateResponse]) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    for name in ("server", "version", "", "label", "from", "ready", "digest"):
        table.add_column(name, justify="right" if name == "version" else "left")
    for address, status in found.items():
        for n, v in enumerate(status.versions):
            ready = datetime.fromtimestamp(v.ready_unix_ns * 1e-9, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
            serves = "served" if v.serving else "before"
            if v.layers:
                serves = f"layers {format_ranges(v.layers)}"
            row: Sequence[str] = (
                "" if n else address,
                str(v.number),
                serves,
                *(printable(t, 256) for t in (v.label, v.source)),
                ready,
            )
            table.add_row(*row, printable(v.digest[:_DIGEST]))
    return table
