"""What is done to a cluster of three servers under load, and what its callers notice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from expertctl.bench.faults.failures import Failures
from expertctl.bench.faults.load import Effect, LoadClients, effect, p99_ms
from expertctl.bench.faults.scene import FAULTS, Event, Scene

__all__ = ["AWAY_S", "FAULTS", "QUIET_S", "FaultMeasurement", "run"]

BOUND = 2e-2
"""Relative, of an answer to the one before anything happened: servers join batches, which rounds otherwise."""
AWAY_S, QUIET_S = 2.5, 1.0
_GO_ON_S = 30.0
"""Every caller is to have an answer during an event; here is nobody for whom it is too late, only a busy machine."""


@dataclass(frozen=True, slots=True)
class FaultMeasurement:
    """What a fault did: over `events` of it, calls and how many of them failed, the longest call until all was as
    before, and the longest time until throughput was that of the servers that were left; the 99th percentile of calls
    in the seconds before events, and in those of events."""

    fault: str
    events: int
    calls: int
    failed: int
    longest_ms: float
    recovered_s: float
    quiet_p99_ms: float
    p99_ms: float


def run(
    faults: Sequence[str], events: int, threads: int = 4, tokens: int = 8, away_s: float = AWAY_S
) -> Iterator[tuple[FaultMeasurement, Failures]]:
    """The row of each fault, and the calls that failed, on the same servers."""
    with ExitStack() as stack:
        scene = Scene(stack, tokens, faults)
        for fault in faults:
            cluster, expected = scene.cluster(fault)
            with LoadClients(cluster, scene.request, expected, BOUND, threads) as callers:
                effects = []
                for n in range(events):
                    event = scene.event(fault, n % 2)
                    name = f"{fault} of {scene.servers[n % 2].address if scene.servers else n % 2}"
                    effects.append(_suffer(callers, event, name, away_s, partial(scene.back, n % 2)))
            yield _row(fault, effects, len(callers.calls), len(callers.failures)), callers.failures


def _suffer(callers: LoadClients, event: Event, name: str, away_s: float, back: Callable[[], object]) -> Effect:
    """One event, so long without whom it met, and until he is back."""
    happened = callers.failures.happened
    event.ready()
    callers.wait(50, 5.0)
    before_s = time.monotonic()
    time.sleep(min(QUIET_S, away_s))
    at_s = time.monotonic()
    happened(f"{name} begins")
    event.begin()
    happened(f"{name} has begun")
    if not callers.all_go_on(_GO_ON_S):
        callers.failures.failed(at_s, f"a caller has had no answer for {_GO_ON_S:g} s since {name} has begun")
    time.sleep(max(0.0, at_s + away_s - time.monotonic()))
    until_s = time.monotonic()
    if why := event.wrong():
        callers.failures.failed(at_s, why)
    event.end()
    happened(f"{name} is over")
    back()
    happened("all servers are asked again")
    back_s = time.monotonic()
    callers.wait(1, 5.0)
    return effect(list(callers.calls), before_s, at_s, until_s, back_s)


def _row(fault: str, effects: Sequence[Effect], calls: int, failed: int) -> FaultMeasurement:
    longest_s, recovered_s = max(e.longest_s for e in effects), max(e.recovered_s for e in effects)
    return FaultMeasurement(
        fault,
        len(effects),
        calls + failed,
        failed,
        round(1e3 * longest_s, 1),
        round(recovered_s, 2),
        p99_ms([seconds for e in effects for seconds in e.before]),
        p99_ms([seconds for e in effects for seconds in e.during]),
    )
