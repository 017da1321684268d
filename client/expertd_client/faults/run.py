"""What is done to a cluster of three servers under load: two replicas of one half of the experts, one of the other.

kill      kill -9 of one of the two replicas, which is started again
stop      SIGSTOP of one of them: connections stay, nothing answers; SIGCONT later
restart   SIGTERM and a new start, one server after the other where there is another one
delay     everything from one of them comes 100 ms later
cut       nothing gets through to one of them any more, and no connection breaks (a partition)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from expertd_client.cluster import ExpertCluster
from expertd_client.faults.load import Callers, Effect, effect
from expertd_client.faults.processes import ServerProcess
from expertd_client.faults.relay import Relay
from expertd_client.grpc_sync import GrpcTransport
from expertd_client.workload import LayerShape, drawn

__all__ = ["FAULTS", "Row", "run"]

MODEL = ("--synthetic", "tiny:int4_g128", "--layers", "0", "--device", "cpu", "--threads", "1")
SHAPE = LayerShape(0, 256, 8, 2)
HALVES = ("0-3", "0-3", "4-7")
BOUND = 2e-2
"""Relative, of an answer to the one before anything happened: servers join batches, which rounds otherwise."""
AWAY_S, BACK_S = 2.5, 30.0


@dataclass(frozen=True, slots=True)
class Row:
    """What a fault did: over `events` of it, calls and how many of them failed, the longest call, and the longest time
    until throughput was that of the servers that were left."""

    fault: str
    events: int
    calls: int
    failed: int
    longest_ms: float
    recovered_s: float


class Scene:
    """Three servers, each also behind a relay.

    clusters   by whether it knows the relays: one over the best transport that there is, one over gRPC through relays
    """

    def __init__(self, stack: ExitStack, tokens: int) -> None:
        self.servers = [stack.enter_context(ServerProcess([*MODEL, "--experts", half])) for half in HALVES]
        self.relays = [stack.enter_context(Relay(server.ready())) for server in self.servers]
        relays = [relay.address for relay in self.relays]
        self.clusters = {
            False: stack.enter_context(ExpertCluster([server.address for server in self.servers])),
            True: stack.enter_context(ExpertCluster(relays, transport=GrpcTransport)),
        }
        self.request = drawn(np.random.default_rng(0), tokens, SHAPE, 0.0)
        self.expected = np.asarray(self.clusters[False].forward_request(self.request).output, np.float32)

    def back(self, which: int) -> None:
        """Waits until both clusters ask that server again."""
        end_s = time.monotonic() + BACK_S
        for cluster in self.clusters.values():
            while list(cluster.servers.values())[which] and time.monotonic() < end_s:
                time.sleep(0.01)

    def suffer(self, callers: Callers, fault: str, which: int, away_s: float) -> Effect:
        """One event at one of the replicas, and so long without that server."""
        begin, end = _events(self, fault, which)
        callers.wait(50, 5.0)
        at_s = time.monotonic()
        begin()
        time.sleep(away_s)
        until_s = time.monotonic()
        callers.wait(1, 5.0)
        found = effect(list(callers.calls), at_s, until_s)
        end()
        self.back(which)
        return found


def _events(scene: Scene, fault: str, which: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """How a fault begins at one of the replicas, and how it ends."""
    server, relay = scene.servers[which], scene.relays[which]
    found: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "kill": (server.kill, server.restart),
        "stop": (server.stop, server.go_on),
        "restart": (server.end, server.restart),
        "delay": (lambda: relay.slow(0.1), lambda: relay.slow(0.0)),
        "cut": (relay.cut, relay.mend),
    }
    return found[fault]


FAULTS = ("kill", "stop", "restart", "delay", "cut")
RELAYED = ("delay", "cut")


def run(
    faults: Sequence[str], events: int, threads: int = 4, tokens: int = 8, away_s: float = AWAY_S
) -> Iterator[tuple[Row, list[str]]]:
    """The row of each fault, and why calls failed, on the same three servers."""
    with ExitStack() as stack:
        scene = Scene(stack, tokens)
        for fault in faults:
            with Callers(scene.clusters[fault in RELAYED], scene.request, scene.expected, BOUND, threads) as callers:
                effects = [scene.suffer(callers, fault, n % 2, away_s) for n in range(events)]
            failures = [why for _, why in callers.failures]
            longest_s, recovered_s = max(e.longest_s for e in effects), max(e.recovered_s for e in effects)
            calls = len(callers.calls) + len(failures)
            yield Row(fault, events, calls, len(failures), round(1e3 * longest_s, 1), round(recovered_s, 2)), failures
