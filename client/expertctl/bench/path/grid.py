"""The grid: every number of tokens and of callers, over every transport, each beside its bare channel."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from expertctl.bench.path.bare import Bare, bare_server
from expertctl.bench.path.measurements import PathMeasurement, Samples, row_of
from expertctl.bench.path.transports import BARE, NotToBeHadError, TimedTransport, bare_way, client_way, codec_ns
from expertctl.common.echo import echo_server, no_echo
from expertctl.common.workload import LayerShape, drawn, layer_shapes
from expertd_client.clients.client import ExpertClient
from expertd_client.exchange.session import INLINE
from expertd_client.requests.request import Request

__all__ = ["ECHO", "Measured", "PathPlan", "measure"]

ECHO = "echo"
_ROUNDS = 8


@dataclass(frozen=True)
class PathPlan:
    """What to measure.

    address       a server, beside the echo server; None = the echo server alone
    hidden_size   of the echo server, and of its requests; a server at `address` has its own
    layer         of the server; None = its first
    seconds       for each cell, all ways together
    """

    address: str | None = None
    transports: Sequence[str] = (INLINE,)
    clients: Sequence[str] = ("asyncio",)
    tokens: Sequence[int] = (1, 8, 64, 512)
    callers: Sequence[int] = (1, 8)
    hidden_size: int = 4096
    layer: int | None = None
    seconds: float = 3.0


@dataclass
class Measured:
    """refused: "server transport client" -> why it could not be measured."""

    rows: list[PathMeasurement] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)


def measure(plan: PathPlan) -> Measured:
    """Starts the bare channels' server and the echo server, measures, and ends them.

    Raises rows of the error table where the server fails, ValueError for a grid that it does not take."""
    out = Measured()
    with contextlib.ExitStack() as stack:
        shapes: dict[str, tuple[str, LayerShape]] = {}
        hidden_size = plan.hidden_size
        if plan.address is not None:
            shape = _shape(plan.address, plan.layer, plan.tokens)
            shapes[plan.address] = (plan.address, shape)
            hidden_size = shape.hidden_size
        if missing := no_echo():
            out.refused[ECHO] = missing
        else:
            address = stack.enter_context(echo_server(hidden_size, max(plan.tokens)))
            shapes[ECHO] = (address, _shape(address, None, plan.tokens))
        if not shapes:
            raise ValueError(f"no server: {missing}; or name the address of one")
        most = 2 * hidden_size * max(plan.tokens)
        bare = stack.enter_context(bare_server(max(plan.callers), most))
        asyncio.run(_measure(plan, shapes, bare, most, out))
    return out


async def _measure(
    plan: PathPlan, servers: Mapping[str, tuple[str, LayerShape]], bare: Bare, most: int, out: Measured
) -> None:
    """most: bytes of a request of the bare channels."""
    shapes = {name: shape for name, (_, shape) in servers.items()}
    names = [(s, t, c) for s in servers for t in plan.transports for c in plan.clients]
    for callers in plan.callers:
        async with contextlib.AsyncExitStack() as stack:
            ways: dict[tuple[str, str, str], TimedTransport] = {}
            for name in names:
                server, transport, client = name
                try:
                    ways[name] = await client_way(client, transport, servers[server][0], callers)
                except NotToBeHadError as e:
                    out.refused[" ".join(name)] = str(e)
                else:
                    stack.push_async_callback(ways[name].close)
            floors = {}
            for kind in dict.fromkeys(BARE[transport] for _, transport, _ in ways):
                floors[kind] = await bare_way(kind, bare, callers, most)
                stack.push_async_callback(floors[kind].close)
            for tokens in plan.tokens:
                out.rows += await _cell(plan, ways, floors, shapes, tokens, callers)


async def _cell(
    plan: PathPlan,
    ways: Mapping[tuple[str, str, str], TimedTransport],
    floors: Mapping[str, TimedTransport],
    shapes: Mapping[str, LayerShape],
    tokens: int,
    callers: int,
) -> list[PathMeasurement]:
    """One number of tokens."""
    requests = {s: drawn(np.random.default_rng(tokens), tokens, shape, 0.0) for s, shape in shapes.items()}
    hidden_size = next(iter(shapes.values())).hidden_size
    payload = bytes(range(256)) * (tokens * hidden_size // 128)
    loads: list[tuple[TimedTransport, Any]] = [(way, payload) for way in floors.values()]
    loads += [(way, requests[server]) for (server, _, _), way in ways.items()]
    for way, load in loads:
        await way.round(load, 0.05)  # connections, windows and caches are as they stay
        way.samples = Samples()
    each_s = plan.seconds / len(loads) / _ROUNDS
    for _ in range(_ROUNDS):
        for way, load in loads:
            await way.round(load, each_s)
    rows = []
    for name, way in ways.items():
        server, transport, client = name
        way.samples.take_timings()
        if transport == INLINE and client != "bytes":
            _add_codec(way.samples, requests[server])
        kind = BARE[transport]
        sizes = (tokens, hidden_size, callers)
        rows.append(row_of(name, sizes, way.samples, kind, floors[kind].samples))
    for way, _ in loads:
        way.samples = Samples()
    return rows


def _add_codec(samples: Samples, request: Request) -> None:
    """Stages that no clock sees by themselves: gRPC's calls are in the same functions."""
    encode_ns, decode_ns = codec_ns(request)
    stages = samples.stages
    stages["client_encode"] = array("q", [encode_ns])
    stages["client_decode"] = array("q", [value + decode_ns for value in stages.get("client_decode", (0,))])


def _shape(address: str, layer: int | None, tokens: Sequence[int]) -> LayerShape:
    with ExpertClient(address) as client:
        described = client.describe(timeout_s=30.0, wait_for_ready=True)
    most = described.limits.max_tokens
    if max(tokens) > most:
        raise ValueError(f"tokens: got {max(tokens)}, want at most {most}, the limit of {address}")
    return layer_shapes(described, None if layer is None else [layer], None)[0]
