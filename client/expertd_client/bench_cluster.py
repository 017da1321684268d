"""`expertctl bench cluster`: what a cluster's client does itself, beside a plain copy of the bytes that it moves.

    split   a batch to parts, one for each server: what the servers are sent is gathered
    join    their answers to one: added in float32
    copy    the same bytes copied once, from and to memory that was used before
    call    a whole call whose servers answer at once and for nothing: all of the client's own work
    one     the same with one server, beside ExpertClient

Ways take turns, so what else the machine does hits all of them.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from expertd.v1 import expert_service_pb2 as pb
from expertd.wire import ForwardRequestView, ForwardResponseView, TensorView
from expertd_client.client import ExpertClient
from expertd_client.cluster import ExpertCluster
from expertd_client.cluster.join import Sum, join
from expertd_client.cluster.split import split
from expertd_client.cluster.table import layer_table
from expertd_client.tables import print_table
from expertd_client.transport import FunctionTransport
from expertd_client.workload import LayerShape, drawn

__all__ = ["Row", "add_arguments", "measure", "measure_one", "run_command"]

EXPERTS = 256
SIZES = ((1, 2048), (8, 2048), (8, 7168), (128, 2048), (128, 7168), (512, 7168))


@dataclass(frozen=True, slots=True)
class Row:
    """Medians, in microseconds; ratio: (split + join) / copy."""

    tokens: int
    hidden_size: int
    top_k: int
    servers: int
    bytes: int
    split_us: float
    join_us: float
    copy_us: float
    call_us: float
    ratio: float


@dataclass(frozen=True, slots=True)
class One:
    """Medians of a call, in microseconds: ExpertClient, and a cluster of one server."""

    tokens: int
    hidden_size: int
    client_us: float
    cluster_us: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--servers", type=int, default=8, metavar="N", help="that the experts are spread over (8)")
    parser.add_argument("--top-k", type=int, default=8, metavar="K", help="routes a token (8)")
    parser.add_argument("--rounds", type=int, default=60, metavar="N", help="of each way (60)")
    parser.add_argument("--profile", action="store_true", help="show where the time of whole calls goes")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run_command(args: argparse.Namespace) -> int:
    rows = [measure(m, h, args.top_k, args.servers, args.rounds) for m, h in SIZES]
    ones = [measure_one(m, h, args.top_k, args.rounds * 5) for m, h in SIZES[:2]]
    if args.json:
        print(json.dumps({"rows": [asdict(r) for r in rows], "one": [asdict(o) for o in ones]}))
    else:
        _show(rows, ones)
    if args.profile:
        print(profile(8, 2048, args.top_k, args.servers))
    return 0


def measure(tokens: int, hidden_size: int, top_k: int, servers: int, rounds: int) -> Row:
    """One size, bf16 in and out, experts spread evenly, routes uniform."""
    request = drawn(np.random.default_rng(0), tokens, LayerShape(0, hidden_size, EXPERTS, top_k), 0.0)
    table = layer_table(EXPERTS, {str(n): tuple(range(EXPERTS)[n::servers]) for n in range(servers)})
    owners = list(range(len(table.holders)))
    parts = split(request, table, owners, len(owners))
    sent = np.concatenate([part.request.hidden_states for part in parts])
    answers = [Sum(part.rows, part.request.hidden_states.copy()) for part in parts]
    came, out = sent.copy(), np.empty_like(request.hidden_states)
    room = np.empty_like(sent), np.empty_like(came)

    def copy() -> None:
        np.copyto(room[0], sent)
        np.copyto(room[1], came)

    with _cluster(table.holders, hidden_size) as cluster:
        split_us, join_us, copy_us, call_us = _medians(
            rounds,
            lambda: split(request, table, owners, len(owners)),
            lambda: join(answers, out),
            copy,
            lambda: cluster.forward_request(request),
        )
    ratio = (split_us + join_us) / copy_us
    return Row(tokens, hidden_size, top_k, servers, 2 * sent.nbytes, split_us, join_us, copy_us, call_us, ratio)


def measure_one(tokens: int, hidden_size: int, top_k: int, rounds: int) -> One:
    """A whole call of one server that answers at once."""
    request = drawn(np.random.default_rng(0), tokens, LayerShape(0, hidden_size, EXPERTS, top_k), 0.0)
    with (
        ExpertClient(_server("0", range(EXPERTS), hidden_size)) as client,
        _cluster([("0",)], hidden_size) as cluster,
    ):
        client_us, cluster_us = _medians(
            rounds, lambda: client.forward_request(request), lambda: cluster.forward_request(request)
        )
    return One(tokens, hidden_size, client_us, cluster_us)


def profile(tokens: int, hidden_size: int, top_k: int, servers: int) -> str:
    """Where the time of whole calls goes."""
    request = drawn(np.random.default_rng(0), tokens, LayerShape(0, hidden_size, EXPERTS, top_k), 0.0)
    with _cluster([(str(n),) for n in range(servers)], hidden_size) as cluster:
        cluster.forward_request(request)
        found = cProfile.Profile()
        found.runcall(lambda: [cluster.forward_request(request) for _ in range(300)])
    text = io.StringIO()
    pstats.Stats(found, stream=text).sort_stats("tottime").print_stats(20)
    return text.getvalue()


def _medians(rounds: int, *ways: Callable[[], object]) -> list[float]:
    """Microseconds of each way; they take turns."""
    times = np.empty((len(ways), rounds))
    for way in ways:
        way()
    for n in range(rounds):
        for which, way in enumerate(ways):
            begin_s = time.perf_counter()
            way()
            times[which, n] = time.perf_counter() - begin_s
    return [round(float(t) * 1e6, 1) for t in np.median(times, axis=1)]


def _cluster(holders: object, hidden_size: int) -> ExpertCluster:
    """A cluster whose servers are functions that answer with their input; each expert is at one of them."""
    assert isinstance(holders, list | tuple)
    names = [names[0] for names in holders]
    held: Mapping[str, range] = {name: range(n, EXPERTS, len(names)) for n, name in enumerate(names)}
    return ExpertCluster(names, transport=lambda address: _server(address, held[address], hidden_size))


def _server(address: str, experts: range, hidden_size: int) -> FunctionTransport:
    holds = np.zeros(EXPERTS + 1, bool)
    holds[experts] = True

    def serve(request: ForwardRequestView) -> ForwardResponseView:
        assert request.topk_ids is not None
        ids = np.frombuffer(request.topk_ids.raw, np.int32)
        hidden = request.hidden_states
        assert hidden is not None
        output = TensorView.of_raw(pb.DATA_TYPE_BF16, hidden.shape, hidden.raw)
        routes = int(np.count_nonzero(holds[ids]))
        return ForwardResponseView(request.request_id, output, routes_computed=routes, load=pb.Load(token_ns=100.0))

    def describe(request: pb.DescribeRequest) -> pb.DescribeResponse:
        held = [pb.ExpertRange(first=e, count=1) for e in experts]
        layer = pb.Layer(layer=0, num_experts=EXPERTS, held=held)
        return pb.DescribeResponse(model=pb.Model(fingerprint="bench", hidden_size=hidden_size), layers=[layer])

    return FunctionTransport(serve, describe, address)


def _show(rows: list[Row], ones: list[One]) -> None:
    plain = Console(highlight=False)
    out = plain if plain.is_terminal else Console(highlight=False, width=120)
    first = rows[0]
    title = f"the client's own work, microseconds: {first.servers} servers, top-{first.top_k}, bf16"
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for name in ("M", "H", "bytes moved", "split", "join", "plain copy", "(split + join) / copy", "whole call"):
        table.add_column(name, justify="right")
    for r in rows:
        times = (f"{r.split_us:,.0f}", f"{r.join_us:,.0f}", f"{r.copy_us:,.0f}", f"{r.ratio:.2f}", f"{r.call_us:,.0f}")
        table.add_row(f"{r.tokens:,}", f"{r.hidden_size:,}", f"{r.bytes:,}", *times)
    print_table(out, table)
    table = Table(title="one server, microseconds of a call", title_justify="left", show_edge=False, pad_edge=False)
    for name in ("M", "H", "ExpertClient", "ExpertCluster", "more"):
        table.add_column(name, justify="right")
    for o in ones:
        more = o.cluster_us - o.client_us
        table.add_row(f"{o.tokens}", f"{o.hidden_size:,}", f"{o.client_us:.0f}", f"{o.cluster_us:.0f}", f"{more:.0f}")
    print_table(out, table)
