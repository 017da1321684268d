"""What is done to a cluster of three servers under load, and what its callers notice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from expertd_client.faults.load import Callers, Effect, effect, p99_ms
from expertd_client.faults.scene import FAULTS, Event, Scene

__all__ = ["AWAY_S", "FAULTS", "Row", "run"]

BOUND = 2e-2
"""Relative, of an answer to the one before anything happened: servers join batches, which rounds otherwise."""
AWAY_S, QUIET_S = 2.5, 1.0


@dataclass(frozen=True, slots=True)
class Row:
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
) -> Iterator[tuple[Row, list[str]]]:
    """The row of each fault, and why calls failed, on the same servers."""
    with ExitStack() as stack:
        scene = Scene(stack, tokens, faults)
        for fault in faults:
            cluster, expected = scene.cluster(fault)
            with Callers(cluster, scene.request, expected, BOUND, threads) as callers:
                effects, wrong = [], list[str]()
                for n in range(events):
                    event = scene.event(fault, n % 2)
                    effects.append(_suffer(callers, event, away_s, wrong, partial(scene.back, n % 2)))
            failures = [*wrong, *(why for _, why in callers.failures)]
            yield _row(fault, effects, len(callers.calls), len(failures)), failures


def _suffer(callers: Callers, event: Event, away_s: float, wrong: list[str], back: Callable[[], object]) -> Effect:
    """One event, so long without whom it met, and until he is back."""
    event.ready()
    callers.wait(50, 5.0)
    before_s = time.monotonic()
    time.sleep(min(QUIET_S, away_s))
    at_s = time.monotonic()
    event.begin()
    time.sleep(away_s)
    until_s = time.monotonic()
    if why := event.wrong():
        wrong.append(why)
    event.end()
    back()
    back_s = time.monotonic()
    callers.wait(1, 5.0)
    return effect(list(callers.calls), before_s, at_s, until_s, back_s)


def _row(fault: str, effects: Sequence[Effect], calls: int, failed: int) -> Row:
    longest_s, recovered_s = max(e.longest_s for e in effects), max(e.recovered_s for e in effects)
    return Row(
        fault,
        len(effects),
        calls + failed,
        failed,
        round(1e3 * longest_s, 1),
        round(recovered_s, 2),
        p99_ms([seconds for e in effects for seconds in e.before]),
        p99_ms([seconds for e in effects for seconds in e.during]),
    )
