"""`expertctl load --generate`: time of a step and of a layer, by transport."""

from __future__ import annotations

import argparse
import json
from itertools import islice
from typing import Any

from rich.table import Table

from expertctl.commands.options import checked_wire_dtype, credentials, popularity
from expertctl.common.workload import layer_shapes, requests
from expertctl.load.generation import Generation, generate
from expertctl.load.show import summary_us, transport_text
from expertd.common.tables import console, duration, print_table
from expertd_client.clients.client import ExpertClient
from expertd_client.exchange.session import INLINE
from expertd_client.transports.grpc.sync import GrpcTransport

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Over the transport that the server gives, then inline."""
    (address,) = args.address
    found = [_one(args, address)]
    if found[0].transport != INLINE:
        found.append(_one(args, GrpcTransport(address, unary=args.unary, credentials=credentials(args))))
    if args.json:
        print(json.dumps({"rows": [_as_json(args, g) for g in found]}, indent=2))
    else:
        _show(args, found)
    return 0


def _one(args: argparse.Namespace, server: str | GrpcTransport) -> Generation:
    wire = args.wire_dtype
    with ExpertClient(
        server, timeout_s=args.timeout, unary=args.unary, credentials=credentials(args), wire_dtype=wire
    ) as client:
        described = client.describe(timeout_s=args.timeout)
        checked_wire_dtype(args, described)
        shapes = layer_shapes(described, args.layers, args.top_k)
        wanted: Any = {"output_dtype": args.output_dtype, "digest": args.digest}
        turn = list(
            islice(
                requests(shapes, args.m, popularity(args), not args.synthetic, args.seed, **wanted),
                args.depth or len(shapes),
            )
        )
        transport = INLINE if args.unary else client.session().transport
        return generate(client, transport, turn, args.generate)


def _as_json(args: argparse.Namespace, g: Generation) -> dict[str, Any]:
    """Durations in microseconds."""
    return {
        "transport": g.transport,
        "tokens": args.m,
        "steps": g.step.count,
        "layers": g.layer.count // g.step.count,
        "step_us": summary_us(g.step),
        "layer_us": summary_us(g.layer),
        "slowest": {"layer": g.slowest[0], "p50_us": round(g.slowest[1] * 1e6, 1)},
        "kernel_us": round(g.kernel_s * 1e6, 1),
    }


def _show(args: argparse.Namespace, found: list[Generation]) -> None:
    layers = found[0].layer.count // found[0].step.count
    table = Table(
        title=f"one client, {args.m} tokens, {layers} layers in turn, {args.generate} steps",
        title_justify="left",
        show_edge=False,
        pad_edge=False,
    )
    for name in ("", "layer p50", "p99", "step p50", "p99", "kernel", "slowest layer"):
        table.add_column(name, justify="right" if name else "left")
    for g in found:
        times = (g.layer.p50_s, g.layer.p99_s, g.step.p50_s, g.step.p99_s, g.kernel_s)
        table.add_row(transport_text(g.transport), *map(duration, times), f"{g.slowest[0]}: {duration(g.slowest[1])}")
    print_table(console(), table)
