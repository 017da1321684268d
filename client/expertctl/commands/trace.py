"""`expertctl trace`: calls every layer in turn and writes where the time went."""

from __future__ import annotations

import argparse
import itertools
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from expertctl.commands.connect import connected
from expertctl.commands.options import add_common, add_routing, add_tokens, credentials, new_file, numbers, popularity
from expertctl.common.counts import at_least
from expertctl.common.workload import LayerShape, drawn, layer_shapes
from expertctl.pictures.trace import by_layer, write
from expertd.common.tables import console, duration, print_table
from expertd_client.clients.client import ExpertClient
from expertd_client.clients.forwarder import Forwarder
from expertd_client.cluster import ExpertCluster
from expertd_client.requests.request import Request
from expertd_client.tracing import Trace, trace
from expertd_client.tracing.chrome import clocks
from expertd_client.tracing.stages import STAGES

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any, text: str) -> None:
    parser = subparsers.add_parser(
        "trace",
        help=text,
        description="Calls the layers one after the other, as a decoding step does, and writes a timeline for"
        " ui.perfetto.dev or chrome://tracing, and a picture (.svg) beside it.  In a program of your own:"
        " `with expertd_client.trace(FILE): ...`.",
    )
    add_common(parser, "+")
    add_tokens(parser)
    add_routing(parser)
    parser.add_argument("--layers", type=numbers, metavar="0-3,7", help="layers to call (default: all)")
    parser.add_argument(
        "--steps", type=at_least(1), default=1, metavar="N", help="passes through all layers (default: 1)"
    )
    parser.add_argument(
        "--warmup", type=at_least(0), default=3, metavar="N", help="passes that are not recorded (default: 3)"
    )
    parser.add_argument(
        "--out", type=new_file, default=Path("trace.json"), metavar="FILE", help="file to write (default: trace.json)"
    )


def run(args: argparse.Namespace) -> int:
    servers: list[str] = args.address
    if args.out.suffix == ".svg":
        raise ValueError(f"--out: got {args.out}, want another suffix: the picture beside it is named so")
    with ExitStack() as stack:
        forwarder = stack.enter_context(connected(args, servers, ExpertClient, ExpertCluster))
        shapes = _shapes(args, servers)
        if isinstance(forwarder, ExpertClient) and not args.unary:
            forwarder.session(timeout_s=args.timeout)  # else the first calls travel inline
        rng = np.random.default_rng(args.seed)
        batches = [drawn(rng, args.m, shape, popularity(args)) for shape in shapes]
        for _ in range(args.warmup):
            _step(forwarder, batches)
        with trace() as found:
            for _ in range(args.steps):
                _step(forwarder, batches)
    write(found, args.out)
    if args.json:
        print(json.dumps(_as_json(found, args.out), indent=2))
    else:
        _show(found, args.out)
    return 0


def _shapes(args: argparse.Namespace, servers: list[str]) -> list[LayerShape]:
    """Of the layers that all servers together hold."""
    described = []
    for server in servers:
        with ExpertClient(server, credentials=credentials(args)) as client:
            described.append(client.describe(timeout_s=args.timeout))
    return layer_shapes(described, args.layers, args.top_k)


def _step(forwarder: Forwarder, batches: list[Request]) -> None:
    for request in batches:
        forwarder.forward_request(request).release()


def _as_json(found: Trace, out: Path) -> dict[str, Any]:
    return {
        "trace": str(out),
        "picture": str(out.with_suffix(".svg")),
        "calls": len(found.finished),
        "clocks": clocks(found),
        "layers_us": {str(n): stages for n, stages in by_layer(found).items()},
    }


def _show(found: Trace, out: Path) -> None:
    layers = by_layer(found)
    names = [name for name in STAGES if any(stages[name] for stages in layers.values())]
    table = Table(title="time of a call, on average", title_justify="left", show_edge=False, pad_edge=False)
    for name in ("layer", *names, "all"):
        table.add_column(name, justify="right")
    for n, stages in itertools.islice(layers.items(), 40):
        table.add_row(str(n), *(duration(stages[name] * 1e-6) for name in names), duration(sum(stages.values()) * 1e-6))
    screen = console()
    print_table(screen, table)
    if len(layers) > 40:
        screen.print(f"{len(layers) - 40} layers more in the files")
    for server, clock in clocks(found).items():
        screen.print(f"{server}: its stages are placed by {clock}", markup=False, soft_wrap=True)
    screen.print(
        f"{out}: open it in ui.perfetto.dev; {out.with_suffix('.svg')}: a picture", markup=False, soft_wrap=True
    )
