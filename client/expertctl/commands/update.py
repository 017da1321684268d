"""`expertctl update`: new weights for servers, from a folder that each of them reads."""

from __future__ import annotations

import argparse
from typing import Any

from expertctl.commands.options import ADDRESS, add_credentials, credentials
from expertctl.common.counts import at_least, counted, duration_s
from expertd.common.tables import console
from expertd.v1 import weights_service_pb2 as pb
from expertd_client.weights import DeltaFolder, Updater, publish_delta_folder

__all__ = ["add_parser", "run"]

_DETAILS = """Servers need --admin-listen and room for a second version, or --rolling; they go on serving.  Every server
reads, quantizes, packs and checks its own experts; when all of them are ready, all of them switch.  Where one is not,
none does.  The version before stays in memory until the next one is served, or, where three do not fit, until the next
update begins (--dry-run says so): expertctl versions --rollback."""


def add_parser(subparsers: Any, text: str) -> None:
    parser = subparsers.add_parser(
        "update", help=text, description="Gives servers new weights while they serve.", epilog=_DETAILS
    )
    parser.add_argument("address", metavar="ADDRESS", nargs="+", help=ADDRESS)
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="the folder, on the servers' machines")
    parser.add_argument(
        "--version", type=at_least(1), default=0, metavar="N", help="number of the new version (default: the next one)"
    )
    parser.add_argument("--label", default="", metavar="TEXT", help="for people, shown by expertctl versions")
    parser.add_argument(
        "--delta",
        metavar="DIR",
        help="send what changed since --checkpoint: a folder of slime's delta updates, on this machine, as --checkpoint"
        " then is",
    )
    parser.add_argument(
        "--rolling",
        nargs="?",
        choices=("allowed", "always"),
        const="allowed",
        default="no",
        help="servers whose memory holds no second version switch layer after layer; afterwards there is no version to"
        " roll back to (always: all servers do)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="only say whether there is room for a second version, and what has to go for it",
    )
    parser.add_argument(
        "--timeout", type=duration_s, default=60.0, metavar="TIME", help="for each query (default: 60s)"
    )
    add_credentials(parser)


def run(args: argparse.Namespace) -> int:
    out = console()
    with Updater(args.address, credentials=credentials(args), timeout_s=args.timeout, rolling=args.rolling) as updater:
        if args.dry_run:
            for address, answer in updater.plan().items():
                out.print(f"{address}: {_plan(answer)}", soft_wrap=True)
        elif args.delta is not None:
            if args.version:
                raise ValueError(
                    "--version: got it with --delta, want one of them: the delta's folder says its version"
                )
            base = DeltaFolder(args.delta).base
            served = {versions[0].number for versions in updater.versions().values()}
            if len(served) != 1:
                raise ValueError(f"--delta: got servers of versions {sorted(served)}, want one version")
            number = publish_delta_folder(updater, args.delta, args.checkpoint, served.pop() - base)
            out.print(f"version {number} is served by {counted(len(args.address), 'server')}")
        else:
            number = updater.from_checkpoint(args.checkpoint, args.version, label=args.label)
            out.print(f"version {number} is served by {counted(len(args.address), 'server')}")
        if not args.dry_run:
            out.print("a server without --held serves its --checkpoint again when it restarts", soft_wrap=True)
    return 0


def _plan(answer: pb.BeginUpdateResponse) -> str:
    """What an update will do, for people."""
    goes = f"; version {answer.gives_up} goes when the update begins" if answer.gives_up else ""
    if answer.rolling:
        text = f"rolling: room for one layer beside version {answer.base}, so layers are switched one by one{goes}"
        return f"{text}; afterwards there is no version to roll back to"
    if goes:
        goes += ": until it is committed there is no version to roll back to"
    return f"room for a second version beside version {answer.base}{goes}"
