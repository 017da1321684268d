"""`expertctl describe`: what a server holds, accepts and chose."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict
from itertools import groupby
from typing import Any

from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.table import Table
from rich.text import Text

from expertctl.commands.options import add_common, credentials
from expertd.common.dtypes import dtype_name
from expertd.common.ranges import format_ranges, format_runs
from expertd.common.tables import VerdictRow, console, print_table, print_verdicts
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.clients.client import ExpertClient
from expertd_client.exchange.session import INLINE, Session
from expertd_client.transports.admin import admin_address

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any, text: str) -> None:
    parser = subparsers.add_parser(
        "describe",
        help=text,
        description="Shows what a server serves: model, limits, transports, load and memory, and for each layer its"
        " experts and backend.",
    )
    add_common(parser)
    parser.add_argument("--decisions", action="store_true", help="also show why the other backends were rejected")


def run(args: argparse.Namespace) -> int:
    with ExpertClient(args.address, credentials=credentials(args)) as client:
        answer = client.describe(include_decisions=args.decisions, timeout_s=args.timeout)
        session = client.session(timeout_s=args.timeout)
    if args.json:
        print(json.dumps({**as_json(answer), "session": asdict(session)}, indent=2))
    else:
        show(console(), args.address, answer, session)
    return 0


def as_json(answer: pb.DescribeResponse) -> dict[str, Any]:
    """Protobuf's own JSON, with the field names of the contract (64-bit numbers are strings there)."""
    out: dict[str, Any] = MessageToDict(
        answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return out


def show(out: Console, address: str, d: pb.DescribeResponse, session: Session) -> None:
    """The description for people."""
    m, limits = d.model, d.limits
    facts = {
        "server": f"{address}, expertd {d.version}, instance {d.instance_id}",
        "model": f"{m.family}, H {m.hidden_size}, fingerprint {m.fingerprint}",
        "accepts": f"{_dtypes(d.input_dtypes)}; answers in {_dtypes(d.output_dtypes)}",
        "limits": f"{limits.max_tokens} tokens, {limits.max_message_bytes / 2**20:,.1f} MiB a message,"
        f" {limits.max_requests_in_flight} requests in flight on a stream",
        "transports": ", ".join([*d.transports, "gRPC"]),
        "session": "; ".join([_name(session.transport), *(f"{name}: {why}" for name, why in session.refused.items())]),
        "load": f"{d.load.queued_requests} requests with {d.load.queued_tokens} tokens wait,"
        f" {d.load.token_ns / 1e3:,.1f} us a token{', draining' if d.load.draining else ''}",
    }
    if d.HasField("memory"):
        facts["memory"] = _memory(d.memory)
    if d.placement_epoch:
        facts["placement"] = f"epoch {d.placement_epoch}"
    if d.admin_address:
        facts["admin"] = f"experts and weights can be changed at {admin_address(address, d)}"
    grid = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        grid.add_row(name, Text(value))
    out.print(grid)
    out.print()
    groups = _alike(d.layers)
    print_table(out, _layers(groups))
    how = [(format_ranges(layer.layer for layer in group), _how(group)) for group in groups]
    same = len({text for _, text in how}) == 1
    for layers, text in how[: 1 if same else None]:
        out.print(Text(text if same else f"layers {layers}: {text}"))
    for group in groups:
        if len(group[0].parts) > 1:
            out.print()
            out.print(Text(f"layers {format_ranges(x.layer for x in group)}: {group[0].parts[0].why}"))
            print_table(out, _parts(group))
    for text in dict.fromkeys(layer.advice.text for layer in d.layers if layer.HasField("advice")):
        out.print(Text(text, "bold"), soft_wrap=True)
    for group in groups:
        if group[0].verdicts:
            out.print()
            _print_verdicts(out, group)


def _name(transport: str) -> str:
    return "gRPC" if transport == INLINE else transport


def _memory(m: pb.Memory) -> str:
    """ "weights 13.92, scratch 0.18, ... GiB as planned; 62.10 GiB free"."""
    parts = {"weights (mapped)" if m.weights_mapped else "weights": m.weights_bytes, "scratch": m.scratch_bytes,
             "buffers": m.buffers_bytes, "graphs": m.graphs_bytes, "context": m.context_bytes,
             "pinned": m.pinned_bytes, "limit": m.limit_bytes}  # fmt: skip
    planned = ", ".join(f"{name} {size / 2**30:,.2f}" for name, size in parts.items() if size)
    return f"{planned} GiB as planned; " + (f"{m.free_bytes / 2**30:,.2f} GiB free" if m.free_bytes else "free unknown")


def _layers(groups: list[list[pb.Layer]]) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    names = ("layers", "experts held", "of", "top-k", "I", "weights", "backend")
    for name in names:
        table.add_column(name, justify="right" if name in ("of", "top-k", "I") else "left")
    for group in groups:
        x = group[0]
        table.add_row(
            format_ranges(layer.layer for layer in group),
            format_runs((r.first, r.first + r.count - 1) for r in x.held) or "none",
            str(x.num_experts),
            str(x.top_k),
            str(x.intermediate_size),
            x.weight_scheme,
            Text(_plan(x), "bold"),
        )
    return table


def _parts(group: list[pb.Layer]) -> Table:
    """Where the experts of layers are that are alike."""
    table = Table(show_edge=False, pad_edge=False)
    for name in ("device", "experts", "which", "backend", "MiB a layer"):
        table.add_column(name, justify="right" if name in ("experts", "MiB a layer") else "left")
    for p in group[0].parts:
        table.add_row(
            f"{p.device} ({p.hardware})",
            str(sum(r.count for r in p.held)),
            format_runs((r.first, r.first + r.count - 1) for r in p.held),
            p.backend,
            f"{p.weights_bytes / 2**20:,.1f}",
        )
    return table


def _how(group: list[pb.Layer]) -> str:
    """What has no column, of layers that are alike."""
    x = group[0]
    cached = ", mapped from the cache" if x.from_cache else ""
    return f"{x.activation}, activations {_activations(x)}, backend chosen by --oracle {x.chosen_by or 'order'}{cached}"


def _plan(layer: pb.Layer) -> str:
    """ "a to 64 tokens, then b", or the one backend."""
    if len(layer.plan) < 2:
        return layer.backend
    parts = [f"{p.backend} to {p.max_tokens} tokens" if p.max_tokens else p.backend for p in layer.plan]
    return ", then ".join(parts)


def _activations(layer: pb.Layer) -> str:
    does, wants = layer.activation_scheme, layer.checkpoint_activation_scheme
    return does if wants in ("", does) else f"{does} (checkpoint: {wants})"


def _print_verdicts(out: Console, group: list[pb.Layer]) -> None:
    counts = sorted({t.tokens for v in group[0].verdicts for t in v.times})
    rows = []
    for v in group[0].verdicts:
        chosen = v.backend == group[0].backend
        times = {t.tokens: t.microseconds for t in v.times}
        verdict = Text("; ".join(v.refusals), "dim")
        if v.eligible:
            verdict = Text("chosen", "bold green") if chosen else Text("eligible")
        cells = [f"{times[n]:,.0f}" if n in times else "" for n in counts]
        cells.append(f"{v.relative_error:.1e}" if v.relative_error else "")
        rows.append(VerdictRow(Text(v.backend, "bold" if chosen else ""), verdict, cells))
    out.print(Text(f"layers {format_ranges(x.layer for x in group)}", "italic"))
    print_verdicts(out, rows, [*(f"us at {n}" for n in counts), "error"])


def _alike(layers: Iterable[pb.Layer]) -> list[list[pb.Layer]]:
    """Runs of layers that differ in nothing but their number, their weights and what was measured of them."""

    def key(layer: pb.Layer) -> bytes:
        same = pb.Layer()
        same.CopyFrom(layer)
        same.layer = 0
        same.ClearField("weight_digests")
        for p in same.parts:
            del p.surface[:]
        for v in same.verdicts:
            v.microseconds = v.relative_error = 0.0
            del v.times[:]
        return same.SerializeToString(deterministic=True)

    return [list(run) for _, run in groupby(layers, key=key)]


def _dtypes(dtypes: Iterable[int]) -> str:
    return ", ".join(dtype_name(d) for d in dtypes)
