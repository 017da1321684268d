"""`expertctl apply`: brings a running cluster to a placement."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from expertctl.commands.options import add_credentials, credentials, new_file
from expertctl.common.counts import at_least, at_least_0, duration_s
from expertctl.rebalancing.rebalance import Options, Progress, Rebalancer, RebalancingFailedError
from expertctl.rebalancing.steps import Step
from expertd.common.ranges import format_ranges
from expertd.common.tables import console, print_table
from expertd.placement import Placement

__all__ = ["add_parser", "run"]

_DETAILS = """Servers need --admin-listen.  A few layers at a time, new replicas load, clients learn of them, and then
the old ones release the experts, so each expert always has a replica.  If the command is stopped, run it again: it
asks the servers what is left to do.  If a step fails, the steps before it are undone, unless --keep."""


def add_parser(subparsers: Any, text: str) -> None:
    parser = subparsers.add_parser(
        "apply",
        help=text,
        description="Moves the experts of running servers to a placement.  They serve meanwhile.",
        epilog=_DETAILS,
    )
    parser.add_argument("placement", type=Path, metavar="PLACEMENT", help="JSON file that expertctl plan wrote")
    parser.add_argument(
        "--dry-run", action="store_true", help="only show the steps, and whether the servers have memory for them"
    )
    parser.add_argument(
        "--at-once", type=at_least(1), default=4, metavar="N", help="layers that are moved together (default: 4)"
    )
    parser.add_argument(
        "--settle",
        type=at_least_0,
        default=2.0,
        metavar="S",
        help="seconds until the clients know of a change: they ask once a second (default: 2)",
    )
    parser.add_argument(
        "--publish",
        type=new_file,
        metavar="FILE",
        help="placement file that clients follow; it is updated after each step",
    )
    parser.add_argument("--keep", action="store_true", help="if a step fails, do not undo the steps before it")
    parser.add_argument("--abort", action="store_true", help="discard changes that another apply has prepared")
    parser.add_argument(
        "--timeout", type=duration_s, default=10.0, metavar="TIME", help="for each query (default: 10s)"
    )
    add_credentials(parser)


def run(args: argparse.Namespace) -> int:
    then = Placement.from_file(args.placement)
    options = Options(args.at_once, args.settle, args.publish, args.keep, args.abort, args.timeout)
    out = console()
    with closing(Rebalancer(then, credentials(args), options)) as mover:
        if args.dry_run:
            found = mover.steps()
            if found:
                print_table(out, _table(found))
            out.print("every server has enough memory" if found else "nothing to do: the servers match the placement")
            return 0
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        with Bar(*columns, console=out, disable=not out.is_terminal) as bar:
            task = bar.add_task("looking", total=None)
            progress = Progress()
            last = ""

            def show() -> None:
                nonlocal last
                bar.update(task, total=progress.total, completed=progress.done, description=progress.text)
                if not out.is_terminal and progress.text != last:
                    last = progress.text
                    out.print(f"{progress.done}/{progress.total} {last}", soft_wrap=True)

            progress.changed = show
            try:
                moved = mover.run(progress)
            except RebalancingFailedError as error:
                bar.stop()
                print(f"expertctl apply: {error}", file=sys.stderr)
                return 1
    if args.abort:
        where = f" at {', '.join(mover.aborted)}" if mover.aborted else ""
        out.print(f"{'a prepared change was' if where else 'no prepared change was there to be'} discarded{where}")
    out.print(f"{moved:,} experts moved; epoch {then.epoch} is in effect")
    return 0


def _table(steps: list[Step]) -> Table:
    out = Table(show_edge=False, pad_edge=False)
    for name in ("step", "layers", "experts moved", "servers that load", "that release"):
        out.add_column(name, justify="left" if name == "layers" else "right")
    for n, step in enumerate(steps):
        out.add_row(str(n + 1), format_ranges(step.layers), f"{step.moves:,}", str(len(step.add)), str(len(step.drop)))
    return out
