"""What a plan is made from: servers' own words, their Prometheus counters, files.

inventory    what an operator says of servers: a JSON file, address -> what is known better than they can tell
ask          what they hold and the room they have (Describe)
scrape       routes to each expert and time in kernels, from the text that Prometheus reads
problem_of   all of it as a Problem
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from expertctl.planner.expected import parts_of, speed_of
from expertctl.planner.problem import Place, Problem
from expertd.errors import PlacementError, UnavailableError
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.clients.client import ExpertClient
from expertd_client.transports.address import parse_address
from expertd_client.transports.credentials import Credentials

__all__ = [
    "Counters",
    "Loads",
    "Machine",
    "ask",
    "counters",
    "inventory",
    "loads_of",
    "places_of",
    "problem_of",
    "read_loads",
    "scrape",
]

Loads = Mapping[int, NDArray[np.float64]]
"""Layer -> [experts], routes to each."""

_T = TypeVar("_T")
_A = TypeVar("_A")

_AT_ONCE = 32
_SAMPLE = re.compile(r"^(expertd_expert_tokens_total|expertd_kernel_seconds_sum)(?:\{([^}]*)\})?\s+(\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_LEAST_S = 1e-3
"""Of time in kernels, from which on a speed is believed."""


@dataclass(frozen=True)
class Machine:
    """What an operator says of a server; what is left out is asked, measured or guessed.

    metrics   "host:port" of its Prometheus counters
    speed     routes a second
    experts   of each layer that it has room for
    host, zone   replicas are placed apart; host "" = that of the address
    drain     it is to hold nothing any more
    delay_us  of the network to it and back
    """

    metrics: str = ""
    speed: float = 0.0
    experts: int = 0
    host: str = ""
    zone: str = ""
    drain: bool = False
    delay_us: float = 0.0


@dataclass
class Counters:
    """Of one server: routes by (layer, expert), and seconds in kernels."""

    routes: dict[tuple[int, int], float] = field(default_factory=dict)
    kernel_s: float = 0.0

    def since(self, before: Counters) -> Counters:
        """What came after `before`; where the server was started anew, what came since then."""
        if self.kernel_s < before.kernel_s:
            return self
        routes = {key: n - before.routes.get(key, 0.0) for key, n in self.routes.items()}
        return Counters(routes, self.kernel_s - before.kernel_s)

    @property
    def speed(self) -> float:
        """Routes a second of time in kernels; 0 = it did too little to tell."""
        return sum(self.routes.values()) / self.kernel_s if self.kernel_s >= _LEAST_S else 0.0


def inventory(path: Path) -> dict[str, Machine]:
    """A file {"10.0.0.1:50051": {"speed": 1e6, "zone": "a"}, ...}.  Raises PlacementError for what it must not hold."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlacementError(f"{path}: cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise PlacementError.about(str(path), got=type(found).__name__, want="an object, address -> what is known")
    return {str(address): _machine(f"{path}: {address}", facts) for address, facts in found.items()}


def _machine(where: str, facts: object) -> Machine:
    want = {
        "metrics": str,
        "speed": (int, float),
        "experts": int,
        "host": str,
        "zone": str,
        "drain": bool,
        "delay_us": (int, float),
    }
    if not isinstance(facts, dict):
        raise PlacementError.about(where, got=type(facts).__name__, want="an object")
    for key, value in facts.items():
        kind: Any = want.get(key)
        if kind is None or not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise PlacementError.about(where, got=f"{key!r}: {value!r}", want=f"some of {', '.join(want)}")
    return Machine(**facts)


def read_loads(path: Path) -> Loads:
    """A recorded trace: {"0": [routes to each expert], ...} as JSON, or an .npy of [layers, experts]."""
    try:
        if path.suffix == ".npy":
            rows = np.load(path, allow_pickle=False)
            found = dict(enumerate(np.atleast_2d(rows)))
        else:
            found = {int(layer): np.array(row) for layer, row in json.loads(path.read_text(encoding="utf-8")).items()}
        loads = {layer: np.asarray(row, np.float64) for layer, row in sorted(found.items())}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise PlacementError(f"{path}: is no trace of loads: {error}") from None
    bad = next((n for n, row in loads.items() if row.ndim != 1 or not np.isfinite(row).all() or (row < 0).any()), None)
    if bad is not None or not loads:
        got = "nothing" if bad is None else f"layer {bad}"
        raise PlacementError.about(str(path), got=got, want="for each layer a number >= 0 for each expert")
    return loads


def ask(
    addresses: Sequence[str], credentials: Credentials | None = None, timeout_s: float = 10.0
) -> dict[str, pb.DescribeResponse]:
    """What each says of itself.  Raises a row of the error table where one does not answer."""

    def one(address: str) -> pb.DescribeResponse:
        with ExpertClient(address, credentials=credentials) as client:
            return client.describe(include_decisions=True, timeout_s=timeout_s)

    return dict(zip(addresses, _each(one, addresses), strict=True))


def scrape(urls: Mapping[str, str], timeout_s: float = 10.0) -> dict[str, Counters]:
    """address -> counters of the server.  urls: address -> "host:port" of its metrics.  Raises UnavailableError."""

    def one(where: str) -> Counters:
        try:
            with urllib.request.urlopen(f"http://{where}/metrics", timeout=timeout_s) as answer:
                text = answer.read().decode("utf-8", "replace")
        except OSError as error:
            raise UnavailableError(f"metrics of {where}: {error}; want the server's --metrics-listen") from None
        found = counters(text)
        if found.kernel_s and not found.routes:
            raise UnavailableError(f"metrics of {where}: no series by expert; want the server's --expert-metrics yes")
        return found

    return dict(zip(urls, _each(one, list(urls.values())), strict=True))


def counters(text: str) -> Counters:
    """From Prometheus' text."""
    out = Counters()
    for name, labels, value in _SAMPLE.findall(text):
        if name == "expertd_kernel_seconds_sum":
            out.kernel_s += float(value)
        else:
            of = dict(_LABEL.findall(labels))
            out.routes[int(of["layer"]), int(of["expert"])] = float(value)
    return out


def _each(work: Callable[[_A], _T], items: Iterable[_A]) -> list[_T]:
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(work, items))


def loads_of(found: Iterable[Counters], num_experts: Mapping[int, int]) -> dict[int, NDArray[np.float64]]:
    """Routes to each expert over all servers."""
    out = {layer: np.zeros(n) for layer, n in num_experts.items()}
    for counted in found:
        for (layer, expert), n in counted.routes.items():
            if layer in out and expert < len(out[layer]):
                out[layer][expert] += n
    return out


def problem_of(loads: Loads, places: Sequence[Place]) -> Problem:
    """Layers may have different numbers of experts."""
    layers = tuple(sorted(loads))
    counts = tuple(len(loads[n]) for n in layers)
    load = np.zeros((len(layers), max(counts, default=0)))
    for i, n in enumerate(layers):
        load[i, : counts[i]] = loads[n]
    return Problem(layers, counts, load, tuple(places))


def places_of(
    machines: Mapping[str, Machine],
    described: Mapping[str, pb.DescribeResponse],
    counted: Mapping[str, Counters],
    layers: int,
) -> list[Place]:
    """The servers with their speed and room.  layers: of the model.  Raises PlacementError where room is not known."""
    speeds = {a: m.speed or _speed(a, described, counted) for a, m in machines.items()}
    known = [s for s in speeds.values() if s]
    usual = sum(known) / len(known) if known else 1.0
    expert = _expert_bytes(described.values())
    besides = max((_besides(d.memory) for d in described.values() if d.layers), default=0)
    out = []
    for address, m in machines.items():
        host = m.host or parse_address(address).host
        room, total = (0, False) if m.drain else (m.experts, False)
        if not room and not m.drain:
            room, total = _room(address, described.get(address), expert, besides, layers), True
        out.append(Place(address, speeds[address] or usual, room, host, m.zone, total, m.delay_us))
    return out


def _speed(address: str, described: Mapping[str, pb.DescribeResponse], counted: Mapping[str, Counters]) -> float:
    measured = counted[address].speed if address in counted else 0.0
    if measured or counted or address not in described:
        return measured
    d = described[address]
    top_k = max((layer.top_k for layer in d.layers), default=1)
    surface = speed_of(parts_of({address: d}).get(address, {}), top_k)
    return surface or (1e9 / d.load.token_ns if d.load.token_ns else 0.0)


def _expert_bytes(described: Iterable[pb.DescribeResponse]) -> float:
    """Of one expert's packed weights in one layer; 0 = nobody holds any."""
    found = [(d.memory.weights_bytes, sum(r.count for x in d.layers for r in x.held)) for d in described]
    nbytes, experts = (sum(column) for column in zip(*found, strict=True)) if found else (0, 0)
    return nbytes / experts if experts else 0.0


def _besides(m: pb.Memory) -> int:
    """What a server needs beside weights: while it serves, or while it packs a layer."""
    return m.context_bytes + m.scratch_bytes + max(m.buffers_bytes + m.graphs_bytes, m.loading_bytes)


def _room(address: str, d: pb.DescribeResponse | None, expert: float, besides: int, layers: int) -> int:
    """Experts, over all layers, that fit beside one more layer: a layer that changes is there twice for a while."""
    if d is None or not expert:
        raise PlacementError.about(
            f"{address}: room",
            got="nothing that tells how many experts fit",
            want='"experts" in the inventory, or a server that answers Describe and one that holds some',
        )
    m = d.memory
    bounds = []
    if m.limit_bytes:
        bounds.append(m.limit_bytes - (_besides(m) if d.layers else besides))
    if m.free_bytes:
        bounds.append(m.weights_bytes + m.free_bytes - m.loading_bytes)
    if not bounds:
        raise PlacementError.about(
            f"{address}: room", got="neither a limit nor free memory", want='"experts" in the inventory'
        )
    return max(0, int(min(bounds) / expert * layers / (layers + 1)))
