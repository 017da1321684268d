"""`expertctl bench cluster`: what a cluster's client does itself, beside a plain copy of the bytes that it moves.

    split   a batch to parts, one for each server: what the servers are sent is gathered
    join    their answers to one: added in float32
    copy    the same bytes copied once, from and to memory that was used before

And calls of echo servers on this host, over the transport that a user gets there (it needs the extra `server`):

    one     a cluster of one server, beside ExpertClient
    own     several servers: until the last part is sent, and from the last answer until the caller has his; and that of
            the calls in which nobody else got the caller's core: servers that are woken on it are not his work

Ways take turns, so what else the machine does hits all of them.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from expertctl.common.brief import fewer
from expertctl.common.counts import at_least
from expertctl.common.echo import echo_server, no_echo
from expertctl.common.progress import told
from expertctl.common.workload import LayerShape, drawn
from expertd.common.tables import console, print_table
from expertd_client.clients.client import ExpertClient
from expertd_client.cluster import ExpertCluster
from expertd_client.cluster.join import Sum, join
from expertd_client.cluster.split import split
from expertd_client.cluster.table import layer_table
from expertd_client.requests.request import Request
from expertd_client.tracing import trace

__all__ = ["One", "Own", "ClusterMeasurement", "add_arguments", "measure", "measure_one", "measure_own", "run_command"]

EXPERTS = 256
SIZES = ((1, 2048), (8, 2048), (8, 7168), (128, 2048), (128, 7168), (512, 7168))
CALLS_HIDDEN, CALLS_TOKENS = 2048, (1, 8, 128)
"""Of calls of echo servers."""


@dataclass(frozen=True, slots=True)
class ClusterMeasurement:
    """Medians, in microseconds; ratio: (split + join) / copy."""

    tokens: int
    hidden_size: int
    top_k: int
    servers: int
    bytes: int
    split_us: float
    join_us: float
    copy_us: float
    ratio: float


@dataclass(frozen=True, slots=True)
class One:
    """Medians of a call, in microseconds: ExpertClient, and a cluster of one server.  transport: of both."""

    tokens: int
    hidden_size: int
    transport: str
    client_us: float
    cluster_us: float


@dataclass(frozen=True, slots=True)
class Own:
    """Medians of what the client does of a call, in microseconds: until the last part is sent, and from the last answer
    until the caller has his.

    kept      share of the calls in which the caller kept his core from beginning to end, but for sleeping
    kept_us   of those, both; 0 = there was none"""

    tokens: int
    hidden_size: int
    servers: int
    before_us: float
    after_us: float
    kept: float
    kept_us: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--servers", type=at_least(1), default=8, metavar="N", help="servers (default: 8)")
    parser.add_argument("--top-k", type=at_least(1), default=8, metavar="K", help="routes of each token (default: 8)")
    parser.add_argument(
        "--rounds", type=at_least(1), default=fewer(60, 2), metavar="N", help="repetitions (default: 60)"
    )
    parser.add_argument("--profile", action="store_true", help="also profile whole calls")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run_command(args: argparse.Namespace) -> int:
    sizes = (measure(m, h, args.top_k, args.servers, args.rounds) for m, h in SIZES)
    first = f"{len(SIZES)} sizes, then calls of 1 and of {args.servers} echo servers"
    rows = list(told(sizes, first, lambda row: f"{row.tokens} x {row.hidden_size}"))
    ones: list[One] = []
    owns: list[Own] = []
    profiled, missing = "", no_echo()
    if not missing:
        requests = [_request(m, CALLS_HIDDEN, args.top_k) for m in CALLS_TOKENS]
        with _echoes(1) as (address,), ExpertClient(address) as client, ExpertCluster([address]) as cluster:
            calls = (measure_one(client, cluster, request, args.rounds * 20) for request in requests)
            ones = list(told(calls, "calls of 1 server", lambda one: f"{one.tokens} x {one.hidden_size}"))
        with _echoes(args.servers) as addresses, ExpertCluster(addresses) as cluster:
            shares = (measure_own(cluster, request, args.rounds * 5) for request in requests)
            first = f"calls of {args.servers} servers"
            owns = list(told(shares, first, lambda own: f"{own.tokens} x {own.hidden_size}"))
            if args.profile:
                profiled = profile(cluster, requests[1])
    if args.json:
        facts = {"rows": [asdict(r) for r in rows], "one": [asdict(o) for o in ones], "own": [asdict(o) for o in owns]}
        print(json.dumps(facts | ({"missing": missing} if missing else {})))
    else:
        _show(rows, ones, owns)
        if missing:
            print(f"calls were not measured: {missing}")
    if profiled:
        print(profiled)
    return 0


def measure(tokens: int, hidden_size: int, top_k: int, servers: int, rounds: int) -> ClusterMeasurement:
    """One size, bf16 in and out, experts spread evenly, routes uniform."""
    request = _request(tokens, hidden_size, top_k)
    table = layer_table(EXPERTS, {str(n): tuple(range(EXPERTS)[n::servers]) for n in range(servers)})
    owners = list(range(len(table.replicas)))
    parts = split(request, table, owners, len(owners))
    sent = np.concatenate([part.request.hidden_states for part in parts])
    answers = [Sum(part.rows, part.request.hidden_states.copy()) for part in parts]
    came, out = sent.copy(), np.empty_like(request.hidden_states)
    room = np.empty_like(sent), np.empty_like(came)

    def copy() -> None:
        np.copyto(room[0], sent)
        np.copyto(room[1], came)

    split_us, join_us, copy_us = _medians(
        rounds, lambda: split(request, table, owners, len(owners)), lambda: join(answers, out), copy
    )
    ratio = (split_us + join_us) / copy_us
    return ClusterMeasurement(tokens, hidden_size, top_k, servers, 2 * sent.nbytes, split_us, join_us, copy_us, ratio)


def measure_one(client: ExpertClient, cluster: ExpertCluster, request: Request, rounds: int) -> One:
    """A call of one server, by both."""
    transport = client.session().transport
    client_us, cluster_us = _medians(
        rounds, lambda: client.forward_request(request), lambda: cluster.forward_request(request)
    )
    return One(request.tokens, request.hidden_states.shape[1], transport, client_us, cluster_us)


def measure_own(cluster: ExpertCluster, request: Request, rounds: int) -> Own:
    """The client's share of a call, as trace() has it."""
    cluster.forward_request(request)
    lost = [_cores_lost()]
    with trace() as traced:
        for _ in range(rounds):
            cluster.forward_request(request)
            lost.append(_cores_lost())
    calls = traced.finished
    before_ns = np.array([max(part.sent_ns for part in call.parts) - call.begin_ns for call in calls])
    after_ns = np.array([call.end_ns - call.joined_ns for call in calls])
    kept = np.diff(lost) == 0
    times = before_ns, after_ns, (before_ns + after_ns)[kept] if kept.any() else np.zeros(1)
    before_us, after_us, kept_us = (round(float(np.median(ns)) * 1e-3, 1) for ns in times)
    facts = request.tokens, request.hidden_states.shape[1], len(cluster.servers)
    return Own(*facts, before_us, after_us, round(float(kept.mean()), 3), kept_us)


def _cores_lost() -> int:
    """How often somebody else got this thread's core before it gave it up."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


def profile(cluster: ExpertCluster, request: Request) -> str:
    """Where the time of calls goes."""
    found = cProfile.Profile()
    found.runcall(_call, cluster, request, 300)
    text = io.StringIO()
    pstats.Stats(found, stream=text).sort_stats("tottime").print_stats(20)
    return text.getvalue()


def _call(cluster: ExpertCluster, request: Request, times: int) -> None:
    for _ in range(times):
        cluster.forward_request(request).release()


def _request(tokens: int, hidden_size: int, top_k: int) -> Request:
    return drawn(np.random.default_rng(0), tokens, LayerShape(0, hidden_size, EXPERTS, top_k), 0.0)


@contextmanager
def _echoes(servers: int) -> Iterator[list[str]]:
    """Addresses of echo servers that hold as many experts each."""
    with ExitStack() as stack:
        shards = [("--experts", str(EXPERTS), "--shard", f"{n}/{servers}") for n in range(servers)]
        most = max(CALLS_TOKENS)
        yield [stack.enter_context(echo_server(CALLS_HIDDEN, most, *shard)) for shard in shards]


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


def _show(rows: list[ClusterMeasurement], ones: list[One], owns: list[Own]) -> None:
    out = console()
    first = rows[0]
    title = f"the client's own work in microseconds: {first.servers} servers, top-{first.top_k}, bf16"
    times = [(f"{r.split_us:,.0f}", f"{r.join_us:,.0f}", f"{r.copy_us:,.0f}", f"{r.ratio:.2f}") for r in rows]
    names = ("M", "H", "bytes moved", "split", "join", "plain copy", "(split + join) / copy")
    facts = [(f"{r.tokens:,}", f"{r.hidden_size:,}", f"{r.bytes:,}") for r in rows]
    _print(out, title, names, [(*fact, *time) for fact, time in zip(facts, times, strict=True)])
    if ones:
        cells = [
            (f"{o.tokens}", f"{o.client_us:.0f}", f"{o.cluster_us:.0f}", f"{o.cluster_us - o.client_us:.0f}")
            for o in ones
        ]
        title = f"a call to one server in microseconds: H {ones[0].hidden_size}, {ones[0].transport}"
        _print(out, title, ("M", "ExpertClient", "ExpertCluster", "difference"), cells)
    if owns:
        own = [(f"{o.before_us:.0f}", f"{o.after_us:.0f}", f"{o.before_us + o.after_us:.0f}") for o in owns]
        kept = [(f"{o.kept_us:.0f}" if o.kept else "-", f"{o.kept:.0%}") for o in owns]
        title = f"the client's share of a call to {owns[0].servers} servers in microseconds: H {owns[0].hidden_size}"
        _print(
            out,
            title,
            ("M", "before sending", "after the last answer", "both", "without preemption", "of calls"),
            [(f"{o.tokens}", *t, *k) for o, t, k in zip(owns, own, kept, strict=True)],
        )


def _print(out: Console, title: str, names: Sequence[str], rows: Sequence[tuple[str, ...]]) -> None:
    table = Table(title=title, show_edge=False, pad_edge=False)
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    print_table(out, table)
