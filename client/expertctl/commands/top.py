"""`expertctl top`: servers as they work: queue, rates, latency, device, the experts that are asked for most; live."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import re
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from http.client import HTTPException
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from expertctl.commands.options import ADDRESS, add_credentials, credentials
from expertctl.common.counts import at_least, duration_s
from expertd.common.tables import console, duration, print_table
from expertd.errors import ExpertdError
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.clients.client import ExpertClient
from expertd_client.transports.address import parse_address

__all__ = ["TopEntry", "Seen", "add_parser", "row_of", "run", "samples"]

Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]
"""(name, labels) -> value."""

_SAMPLE = re.compile(r"^(\w+)(?:\{([^}]*)\})?[ \t]+(\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_HOTTEST = 3
_MOST_BYTES, _MOST_DIGITS = 64 << 20, 9
"""Of metrics, which hold a line for each expert where it is wanted; of a layer's or an expert's number."""
_NO_METRICS = "tokens/s, busy, queue, GPU and hottest need --metrics PORT (usually 9464)"


@dataclass(frozen=True)
class Seen:
    """One look at one server.  error: why it could not be asked, "" = it answered; told: its counters, {} = none"""

    address: str
    at_s: float
    ping_s: float = 0.0
    described: pb.DescribeResponse = field(default_factory=pb.DescribeResponse)
    told: Samples = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class TopEntry:
    """None: not known.  busy: share of the time in kernels; queue_s: a request's mean wait for its batch; gpu: share;
    hottest: (layer, expert, share of the routes), of the time between two looks"""

    address: str
    state: str
    queued_requests: int | None = None
    queued_tokens: int | None = None
    token_us: float | None = None
    ping_ms: float | None = None
    tokens_per_s: float | None = None
    busy: float | None = None
    queue_s: float | None = None
    free_bytes: int | None = None
    gpu: float | None = None
    gpu_celsius: float | None = None
    hottest: Sequence[tuple[int, int, float]] = ()


def add_parser(subparsers: Any, text: str) -> None:
    parser = subparsers.add_parser(
        "top",
        help=text,
        description="Watches servers.  Rates, kernel time, GPU and experts come from the metrics port (--metrics;"
        " experts"
        " need servers with --expert-metrics yes), the rest from gRPC.  Ctrl-C ends it.",
        epilog="Columns: waiting: requests in queues, and their tokens; us/token: of the kernels, by which the server"
        " predicts waits; ping: of a Describe; busy: share of the time in kernels; queue: a request's mean wait for"
        " its batch; free: memory of the device; hottest: layer/expert and its share of the routes.",
    )
    parser.add_argument("address", metavar="ADDRESS", nargs="+", help=ADDRESS)
    add_credentials(parser)
    parser.add_argument(
        "--metrics",
        type=at_least(1),
        metavar="PORT",
        help="metrics port of the servers, usually 9464 (default: no metrics)",
    )
    parser.add_argument(
        "--every", type=duration_s, default=1.0, metavar="TIME", help="between two updates (default: 1s)"
    )
    parser.add_argument("--timeout", type=duration_s, default=5.0, metavar="TIME", help="for each query (default: 5s)")
    parser.add_argument("--once", action="store_true", help="print once and end; with --metrics after two samples")
    parser.add_argument("--json", action="store_true", help="print JSON once and end")


def run(args: argparse.Namespace) -> int:
    looks = [_Look(a, args) for a in args.address]
    try:
        with ThreadPoolExecutor(len(looks)) as pool:

            def all_of_them() -> list[Seen]:
                return list(pool.map(lambda look: look(), looks))

            before = all_of_them()
            if args.once or args.json:
                if args.metrics:
                    time.sleep(args.every)
                rows = [row_of(a, b) for a, b in zip(before, all_of_them(), strict=True)]
                if args.json:
                    print(json.dumps({"servers": [asdict(row) for row in rows]}, indent=2))
                else:
                    print_table(console(), _table(rows))
                    if not args.metrics:
                        print(_NO_METRICS, file=sys.stderr)
                return 0 if any(row.state != "gone" for row in rows) else 1
            _live(before, all_of_them, args.every)
    finally:
        for look in looks:
            look.client.close()
    return 0


def _live(before: list[Seen], all_of_them: Any, every_s: float) -> None:
    out = console()
    with Live(console=out, auto_refresh=False, screen=out.is_terminal) as live:
        while True:
            time.sleep(every_s)
            after = all_of_them()
            drawn = io.StringIO()  # the live console would draw itself into what it captures
            paper = Console(file=drawn, width=out.width, markup=False, emoji=False)
            print_table(paper, _table([row_of(a, b) for a, b in zip(before, after, strict=True)]))
            live.update(Text(drawn.getvalue().rstrip("\n")), refresh=True)
            before = after


class _Look:
    """Asks one server."""

    def __init__(self, address: str, args: argparse.Namespace) -> None:
        self._address, self._timeout_s = address, args.timeout
        self._metrics = parse_address(address).with_port(args.metrics) if args.metrics else ""
        self.client = ExpertClient(address, credentials=credentials(args))

    def __call__(self) -> Seen:
        begin_s = time.monotonic()
        try:
            described = self.client.describe(timeout_s=self._timeout_s)
        except ExpertdError as error:
            return Seen(self._address, begin_s, error=error.message)
        ping_s = time.monotonic() - begin_s
        return Seen(self._address, time.monotonic(), ping_s, described, self._counted())

    def _counted(self) -> Samples:
        if not self._metrics:
            return {}
        try:
            with _OPENER.open(f"http://{self._metrics}/metrics", timeout=self._timeout_s) as answer:
                return samples(_read(answer, time.monotonic() + self._timeout_s).decode("utf-8", "replace"))
        except (OSError, HTTPException):
            return {}


class _Stay(urllib.request.HTTPRedirectHandler):
    """No server sends this program elsewhere."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_Stay)


def _read(answer: Any, end_s: float) -> bytes:
    """Raises OSError where it is too long, or comes too slowly."""
    parts, left = [], _MOST_BYTES
    while piece := answer.read1(min(left, 1 << 16)):
        parts.append(piece)
        left -= len(piece)
        if left <= 0 or time.monotonic() > end_s:
            raise OSError("metrics: too many, or too slow")
    return b"".join(parts)


def samples(text: str) -> Samples:
    """Of Prometheus' text; what is none is left out."""
    found = {}
    for name, labels, value in _SAMPLE.findall(text):
        with contextlib.suppress(ValueError):
            found[name, frozenset(_LABEL.findall(labels))] = float(value)
    return found


def row_of(before: Seen, after: Seen) -> TopEntry:
    """What two looks say together."""
    if after.error:
        return TopEntry(after.address, "gone")
    d, load = after.described, after.described.load
    known: dict[str, Any] = {
        "queued_requests": load.queued_requests,
        "queued_tokens": load.queued_tokens,
        "token_us": load.token_ns / 1e3 or None,
        "ping_ms": after.ping_s * 1e3,
        "free_bytes": d.memory.free_bytes or None,
    }
    state = "draining" if load.draining else "serving"
    if not after.told:
        return TopEntry(after.address, state, **known)
    gpu = _only(after.told, "expertd_gpu_utilization_ratio", "of", "compute")
    known |= {"gpu": gpu, "gpu_celsius": _only(after.told, "expertd_gpu_temperature_celsius")}
    took_s = after.at_s - before.at_s
    restarted = before.described.instance_id != d.instance_id
    if not before.told or took_s <= 0 or restarted:
        return TopEntry(after.address, state, **known)
    grew = {k: v - before.told.get(k, 0.0) for k, v in after.told.items()}
    waits = _sum(grew, "expertd_queue_seconds_count")
    return TopEntry(
        after.address,
        state,
        **known,
        tokens_per_s=_sum(grew, "expertd_tokens_total") / took_s,
        busy=_sum(grew, "expertd_kernel_seconds_sum") / took_s,
        queue_s=_sum(grew, "expertd_queue_seconds_sum") / waits if waits else None,
        hottest=_hottest(grew),
    )


def _sum(told: Samples, name: str) -> float:
    return sum(v for (n, _), v in told.items() if n == name)


def _only(told: Samples, name: str, label: str = "", value: str = "") -> float | None:
    labels = frozenset({(label, value)}) if label else frozenset()
    return told.get((name, labels))


def _hottest(grew: Samples) -> list[tuple[int, int, float]]:
    routes = {_place(k[1]): v for k, v in grew.items() if k[0] == "expertd_expert_tokens_total" and 0 < v < math.inf}
    routes.pop(None, None)
    whole = sum(routes.values())
    most = sorted(routes.items(), key=lambda item: -item[1])[:_HOTTEST]
    return [(*place, n / whole) for place, n in most if place is not None]


def _place(labels: frozenset[tuple[str, str]]) -> tuple[int, int] | None:
    """(layer, expert), where they are numbers."""
    of = dict(labels)
    layer, expert = (of.get(name, "")[:_MOST_DIGITS] for name in ("layer", "expert"))
    return (int(layer), int(expert)) if layer.isdecimal() and expert.isdecimal() else None


def _table(rows: Sequence[TopEntry]) -> Table:
    title = time.strftime("%H:%M:%S")
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    names = ("server", "state", "waiting", "us/token", "ping", "tokens/s", "busy", "queue", "free", "GPU", "hottest")
    for name in names:
        table.add_column(name, justify="left" if name in ("server", "state", "hottest") else "right")
    for r in rows:
        table.add_row(*_cells(r))
    return table


def _cells(r: TopEntry) -> list[str]:
    hot = f", {r.gpu_celsius:.0f} C" if r.gpu_celsius else ""
    return [
        r.address,
        r.state,
        _or(r.queued_requests, lambda n: f"{n:,} ({r.queued_tokens:,} tokens)"),
        _or(r.token_us, lambda v: f"{v:,.1f}"),
        _or(r.ping_ms, lambda v: duration(v * 1e-3)),
        _or(r.tokens_per_s, lambda v: f"{v:,.0f}"),
        _or(r.busy, lambda v: f"{v:.0%}"),
        _or(r.queue_s, duration),
        _or(r.free_bytes, lambda v: f"{v / 2**30:,.1f} GiB"),
        _or(r.gpu, lambda v: f"{v:.0%}{hot}"),
        ", ".join(f"{layer}/{expert} {share:.0%}" for layer, expert, share in r.hottest) or "-",
    ]


def _or(value: Any, text: Any) -> str:
    return "-" if value is None else str(text(value))
