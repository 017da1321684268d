"""The connections that a load travels on, and the requests that it is made of."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from expertctl.commands.connect import connected
from expertctl.commands.options import checked_wire_dtype, credentials, popularity
from expertctl.common.workload import POOL, LayerShape, layer_shapes, requests, with_routes
from expertctl.load.by_server import of_all
from expertctl.load.carried import Carried, counted_transport
from expertctl.load.departures import LoadPlan
from expertctl.load.generator import LoadReport, LoadRun
from expertctl.load.live import stoppable, watched
from expertctl.load.recording import Recording, routes_of
from expertctl.load.routing import Routing
from expertctl.load.show import Run, describe_plan
from expertctl.load.slo import Found, Slo, Trial, search
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.clients.async_client import AsyncExpertClient
from expertd_client.clients.forwarder import AsyncForwarder
from expertd_client.cluster import AsyncExpertCluster
from expertd_client.requests.request import Request
from expertd_client.requests.result import ForwardResult
from expertd_client.transports.protocol import Transport

__all__ = ["CommandClients"]

_NO_BOUND = 1 << 20
"""Requests in flight of an open loop: nothing may hold one back; their number is bounded by their timeout alone."""
_CONNECT_S = 10.0
"""Describe and the agreement on a transport; --timeout is for requests."""
_PEAK_S = 2.0
"""Of the closed loop that shows where a search begins."""
_LATE_SHARE = 0.25
"""A trial whose generator sent later than this share of the bound, in the SLO's quantile, says nothing."""


class CommandClients:
    """To one server, or to several as one cluster.  args: those of `expertctl load`.  Ctrl-C ends what is under way
    (`interrupted`)."""

    def __init__(self, args: argparse.Namespace, servers: Sequence[str], in_flight: int | None = None) -> None:
        self._args, self._servers, self.interrupted = args, servers, False
        self._run: LoadRun | None = None
        self.runs: list[Run] = []
        self._carried: Carried = Carried()
        self._only: str | None = None if args.transport == "auto" else args.transport
        more: dict[str, Any] = {"max_in_flight": in_flight or _NO_BOUND}
        if len(servers) > 1:
            more["transport"] = self._transport
        self._clients: list[AsyncForwarder] = [
            connected(args, servers, self._client, AsyncExpertCluster, **more) for _ in range(args.streams)
        ]
        self.described: list[pb.DescribeResponse] = []
        self.transports: dict[str, str] = {}
        """Server -> what was agreed on, "unary" or a name of exchange.session.Session."""
        self._shapes: list[LayerShape] = []

    async def __aenter__(self) -> CommandClients:
        try:
            self.described = await self._describe()
            for client in self._clients:
                await client.__aenter__()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    def _transport(self, server: str) -> Transport:
        return counted_transport(server, credentials(self._args), self._carried, self._args.unary, self._only)

    def _client(self, server: str, unary: bool = False, **more: Any) -> AsyncExpertClient:
        return AsyncExpertClient(self._transport(server), unary=unary, **more)

    async def _describe(self) -> list[pb.DescribeResponse]:
        """By each server, before a cluster waits for one that is not there."""
        first = self._clients[0]
        if isinstance(first, AsyncExpertClient):
            return [await self._ask(first, self._servers[0])]
        found = []
        for server in self._servers:
            async with self._client(server) as client:
                found.append(await self._ask(client, server))
        return found

    async def _ask(self, client: AsyncExpertClient, server: str) -> pb.DescribeResponse:
        described = await client.describe(timeout_s=_CONNECT_S)
        unary = self._args.unary
        session = None if unary else await client.session(timeout_s=_CONNECT_S)
        self.transports[server] = "unary" if session is None else session.transport
        if session is not None and self._only not in (None, "grpc", session.transport):
            why = session.refused.get(self._only or "", "this server does not offer it")
            raise ValueError(f"--transport {self._only}: got a server, {server}, that does not take it: {why}")
        return described

    async def __aexit__(self, *_: object) -> None:
        for client in self._clients:
            await client.close()

    def endless(self) -> Iterator[Request]:
        """What the options ask for.  Raises ValueError."""
        args = self._args
        for described in self.described:
            checked_wire_dtype(args, described)
        self._shapes = layer_shapes(self.described, args.layers, args.top_k)
        wanted: Any = {"output_dtype": args.output_dtype, "digest": args.digest}
        routing: Routing = args.routing
        if routing.path is not None:
            return _with_recorded_routes(routing, self._shapes, args.m, args.seed, wanted)
        return requests(self._shapes, args.m, popularity(args), not args.synthetic, args.seed, **wanted)

    @property
    def layers(self) -> list[int]:
        return [shape.layer for shape in self._shapes]

    def stop(self) -> None:
        self.interrupted = True
        if self._run is not None:
            self._run.stop()

    async def run(self, plan: LoadPlan, wanted: Iterator[Request]) -> LoadReport:
        """One run, kept in `runs`, also where it was interrupted."""
        self._run = LoadRun(plan, self._carried)
        with stoppable(self.stop):
            async with watched(self._run, describe_plan(plan)):
                report = await self._run.run(wanted, self._send)
        if len(self._servers) > 1:
            report = replace(report, by_server=of_all(report.by_server, self._servers))
        self.runs.append(Run(plan, report))
        return report

    async def each(self, plans: list[LoadPlan]) -> None:
        """One after the other, until interrupted."""
        wanted = self.endless()
        for plan in plans:
            await self.run(plan, wanted)
            if self.interrupted:
                return

    async def largest_rate(self, slo: Slo, plan: LoadPlan, repeats: int) -> Found | None:
        """The search of expertctl.load.slo; None where it was interrupted.  plan: of a trial, less its rate."""
        wanted = self.endless()
        seconds = plan.duration_s or 1.0
        peak = await self.run(replace(plan, rate=None, duration_s=min(_PEAK_S, seconds), requests=None), wanted)

        async def trial(rate: float) -> Trial:
            if self.interrupted:
                raise _InterruptedError
            n = slo.requests(rate, seconds)
            step = replace(plan, rate=rate, duration_s=None, requests=n, warmup=0, seed=plan.seed + len(self.runs))
            report = await self.run(step, wanted)
            if self.interrupted:
                raise _InterruptedError
            return _judged(rate, report, slo)

        if self.interrupted:
            return None
        if not peak.answered:
            raise ValueError(f"--slo: got no answer at all, {peak.errors}")
        try:
            return await search(slo, peak.requests_per_s, trial, repeats)
        except _InterruptedError:
            return None

    def _send(self, request: Request, connection: int) -> Awaitable[ForwardResult]:
        return self._clients[connection % len(self._clients)].forward_request(request)


class _InterruptedError(Exception):
    pass


def _judged(rate: float, report: LoadReport, slo: Slo) -> Trial:
    took = np.asarray(report.raw.latencies_s)
    late = int((took >= slo.bound_s).sum()) + report.failed
    everything = np.concatenate([took, np.full(report.failed, np.inf)])
    value = float(np.quantile(everything, slo.quantile, method="inverted_cdf"))
    # What this process itself delayed counts as latency: where it alone would break the SLO, nothing is learnt.
    delayed = report.lateness.p99_s > _LATE_SHARE * slo.bound_s and late > slo.allowed * len(everything)
    return Trial(rate, len(everything), late, value, "rate" if report.behind else "lateness" if delayed else "")


def _with_recorded_routes(
    routing: Routing, shapes: list[LayerShape], tokens: int, seed: int, wanted: Any
) -> Iterator[Request]:
    assert routing.path is not None
    recording = Recording.load(routing.path)
    rng = np.random.default_rng(seed)
    rows = {shape: routes_of(recording, shape, tokens) for shape in shapes}
    hidden = [with_routes(rng, shape, next(rows[shape]), **wanted) for shape in shapes for _ in range(POOL)]

    def endless() -> Iterator[Request]:
        while True:
            for turn in range(POOL):
                for n, shape in enumerate(shapes):
                    some = hidden[n * POOL + turn]
                    yield Request(shape.layer, some.hidden_states, next(rows[shape]), some.topk_weights, **wanted)

    return endless()
