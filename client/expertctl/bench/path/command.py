"""The options of `expertctl bench path`, and how its rows are shown."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from expertctl.bench.path.grid import Measured, PathPlan, measure
from expertctl.bench.path.measurements import STAGES, PathMeasurement
from expertctl.bench.path.picture import draw
from expertctl.bench.path.transports import BARE, CLIENTS
from expertctl.common.brief import briefly
from expertctl.common.counts import at_least, positive
from expertd.common.tables import console, print_table

__all__ = ["add_arguments", "run_command"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    plan = PathPlan()
    parser.add_argument(
        "address", nargs="?", metavar="ADDRESS", help="server, measured beside the echo server that this always starts"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="file for a picture")
    parser.add_argument(
        "--transport",
        type=_names(BARE),
        default=plan.transports,
        metavar="T,T",
        help=f"transports, of {', '.join(BARE)} (default: inline)",
    )
    parser.add_argument(
        "--client",
        type=_names(CLIENTS),
        default=plan.clients,
        metavar="C,C",
        help="clients: asyncio (default), threads, or bytes (messages encoded in advance, inline only)",
    )
    for name, default, text in (
        ("--tokens", plan.tokens, "tokens of a request"),
        ("--callers", plan.callers, "clients, one connection each"),
    ):
        shown = ",".join(map(str, default))
        parser.add_argument(name, type=_counts, default=default, metavar="N,N", help=f"{text} (default: {shown})")
    parser.add_argument(
        "--hidden-size",
        type=at_least(1),
        default=plan.hidden_size,
        metavar="H",
        help="hidden size of the echo server (default: 4096)",
    )
    parser.add_argument("--layer", type=at_least(0), metavar="N", help="layer of the server (default: its first)")
    parser.add_argument(
        "--seconds",
        type=positive,
        default=briefly(plan.seconds, 0.1),
        metavar="S",
        help="seconds for each row (default: 3)",
    )


def run_command(args: argparse.Namespace) -> int:
    """Measures and prints.  1 where nothing could be measured."""
    plan = PathPlan(
        args.address,
        args.transport,
        args.client,
        args.tokens,
        args.callers,
        args.hidden_size,
        args.layer,
        args.seconds,
    )
    found = measure(plan)
    if args.svg is not None:
        args.svg.write_text(draw(found.rows))
    if args.json:
        print(json.dumps({"rows": [asdict(row) for row in found.rows], "refused": found.refused}))
    else:
        _show(found)
    return 0 if found.rows else 1


def _show(found: Measured) -> None:
    out = console(180)
    if found.rows:
        print_table(out, _times(found.rows))
        print_table(out, _stages(found.rows))
    for what, why in found.refused.items():
        out.print(f"{what}: not measured: {why}", markup=False)
    if len({row.server for row in found.rows}) > 1:
        out.print("echo: an echo server that this command started, beside the one that you named")


def _times(rows: Sequence[PathMeasurement]) -> Table:
    table = _table("time of a request in microseconds, and of the same bytes without expertd (bare)", rows)
    for name in ("p50", "p99", "bare p50", "p50 / bare", "kernel", "requests/s", "bare/s", "of bare"):
        table.add_column(name, justify="right")
    for r in rows:
        ratio = r.p50_us / r.bare_us if r.bare_us else 0.0
        rate = r.requests_per_s / r.bare_requests_per_s if r.bare_requests_per_s else 0.0
        times = (f"{r.p50_us:,.0f}", f"{r.p99_us:,.0f}", f"{r.bare_us:,.0f}", f"{ratio:.2f}", f"{r.kernel_us:,.0f}")
        table.add_row(*_key(r), *times, f"{r.requests_per_s:,.0f}", f"{r.bare_requests_per_s:,.0f}", f"{rate:.2f}")
    return table


def _stages(rows: Sequence[PathMeasurement]) -> Table:
    table = _table("medians of the stages in microseconds", rows)
    for name in STAGES:
        table.add_column(name.replace("_", " "), justify="right")
    for r in rows:
        table.add_row(*_key(r), *(f"{r.stages_us[name]:,.0f}" for name in STAGES))
    return table


def _table(title: str, rows: Sequence[PathMeasurement]) -> Table:
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for name in ("server", "transport", "client"):
        table.add_column(name, no_wrap=True)
    for name in ("M", "H", "callers"):
        table.add_column(name, justify="right")
    return table


def _key(r: PathMeasurement) -> tuple[str, ...]:
    return r.server, r.transport, r.client, f"{r.tokens:,}", f"{r.hidden_size:,}", f"{r.callers:,}"


class _names:  # noqa: N801 - reads as the function that it is
    """ "inline,shm", as argparse's type."""

    def __init__(self, known: Iterable[str]) -> None:
        self._known = tuple(known)

    def __call__(self, text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(text.split(",")))
        if unknown := [n for n in names if n not in self._known]:
            raise argparse.ArgumentTypeError(f"got {', '.join(unknown)!r}, want some of {', '.join(self._known)}")
        return names


def _counts(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(at_least(1)(part) for part in text.split(",")))
