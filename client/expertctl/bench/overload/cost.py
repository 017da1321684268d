"""What a part of the server costs where there is no overload: the same load with it and without, in turns.

    forecast    admission by what batches take
    nonfinite   a look at every hidden state (--nonfinite refuse)
    tls, mtls   of gRPC, from certificates in a folder: ca.pem, server.pem, server.key, client.pem, client.key

Two servers that answer with what they get (`expertd-echo`), so that nothing hides it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from expertctl.bench.faults.processes import ServerProcess
from expertctl.bench.overload.clients import OverloadClients
from expertctl.bench.overload.loop import LoopClock
from expertctl.common.workload import LayerShape, requests
from expertctl.load.selector import run_precisely
from expertd_client.requests.request import Request
from expertd_client.transports.credentials import Credentials

__all__ = ["PARTS", "Cost", "measure_cost"]

PARTS = ("forecast", "nonfinite", "tls", "mtls")
_HIDDEN = 2048
_SHAPE = LayerShape(0, _HIDDEN, 8, 8)
_DEADLINE_S = 10.0
_IN_FLIGHT = 16
_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Cost:
    """Of requests of one way: medians over rounds, with the part and without.  of_throughput, of_p50: with over
    without, the median of the rounds' own ratios."""

    part: str
    way: str
    requests_per_s: tuple[float, float]
    p50_us: tuple[float, float]
    of_throughput: float
    of_p50: float


def measure_cost(
    ways: tuple[str, ...],
    tokens: int,
    seconds: float,
    parts: Sequence[str] = ("forecast",),
    certificates: Path | None = None,
) -> Iterator[Cost]:
    """seconds: of all rounds of a way together, each way round."""
    for part in parts:
        options, credentials = _with(part, certificates)
        with ExitStack() as stack:
            always = ["--hidden-size", str(_HIDDEN)]
            servers = [
                stack.enter_context(ServerProcess([*always, *o], command="", module="expertd_echo"))
                for o in (options, _without(part))
            ]
            to = [(server.ready(), shown) for server, shown in zip(servers, (credentials, None), strict=True)]
            for way in ways:
                clock = LoopClock()
                yield run_precisely(_cost(part, to, way, tokens, seconds / (4 * _ROUNDS), clock), clock)


def _with(part: str, folder: Path | None) -> tuple[list[str], Credentials | None]:
    """Options of the server, and what callers show it.  Raises ValueError."""
    if part == "forecast":
        return ["--refuse-late", "yes"], None
    if part == "nonfinite":
        return ["--nonfinite", "refuse"], None
    if folder is None:
        raise ValueError(f"{part}: got no folder of certificates, want ca.pem, server.pem, server.key, ...")
    ca, client = folder / "ca.pem", (folder / "client.pem", folder / "client.key")
    options = ["--tls-cert", str(folder / "server.pem"), "--tls-key", str(folder / "server.key")]
    if part == "tls":
        return options, Credentials(ca=ca)
    return [*options, "--tls-client-ca", str(ca)], Credentials(ca=ca, certificate=client[0], key=client[1])


def _without(part: str) -> list[str]:
    return ["--refuse-late", "no"] if part == "forecast" else []


async def _cost(
    part: str, to: list[tuple[str, Credentials | None]], way: str, tokens: int, seconds: float, clock: LoopClock
) -> Cost:
    def fresh() -> Iterator[Request]:
        return requests([_SHAPE], tokens, 0.0, way != "synthetic", 0, digest=way == "synthetic")

    both = [OverloadClients(address, way, 4, clock, shown) for address, shown in to]
    rates: list[list[float]] = []
    p50s: list[list[float]] = []
    try:
        for callers in both:
            await callers.open()
            await callers.closed_loop(fresh(), _IN_FLIGHT, seconds, _DEADLINE_S)
        for n in range(_ROUNDS):
            order = (0, 1) if n % 2 else (1, 0)
            rate, p50 = [0.0, 0.0], [0.0, 0.0]
            for i in order:
                rate[i], _ = await both[i].closed_loop(fresh(), _IN_FLIGHT, seconds, _DEADLINE_S)
            for i in order:
                _, took = await both[i].closed_loop(fresh(), 1, seconds, _DEADLINE_S)
                p50[i] = 1e6 * took.summary().p50_s
            if not all(rate + p50):
                got = f"a piece of {seconds * 1e3:.0f} ms without an answer"
                raise ValueError(f"--seconds: got {got}, want more: each measurement has {4 * _ROUNDS} pieces")
            rates.append(rate)
            p50s.append(p50)
    finally:
        for callers in both:
            await callers.close()

    def median(values: list[list[float]], i: int) -> float:
        return round(statistics.median(v[i] for v in values), 1)

    def ratio(values: list[list[float]]) -> float:
        return round(statistics.median(a / b for a, b in values), 4)

    return Cost(
        part, way, (median(rates, 0), median(rates, 1)), (median(p50s, 0), median(p50s, 1)), ratio(rates), ratio(p50s)
    )
