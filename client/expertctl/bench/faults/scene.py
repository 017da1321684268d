"""The servers that things happen to, and the clusters that call them: two replicas of one half of the experts, one of
the other half."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from expertctl.bench.faults.damaged import write_copies
from expertctl.bench.faults.netns import Namespace
from expertctl.bench.faults.processes import ServerProcess, Stampede
from expertctl.bench.faults.relay import Relay
from expertctl.common.workload import LayerShape, drawn
from expertd_client.cluster import ExpertCluster
from expertd_client.transports.grpc.sync import GrpcTransport

__all__ = ["FAULTS", "Event", "Scene"]

ALONE = ("--device", "cpu", "--threads", "1")
MODEL = ("--synthetic", "tiny:int4_g128", "--layers", "0", *ALONE)
SHAPE = LayerShape(0, 256, 8, 2)
HALVES = ("0-3", "0-3", "4-7")
BACK_S = 30.0

FAULTS = {
    "kill": "kill -9 of one of the two replicas, which is started again",
    "stop": "SIGSTOP of one of them: connections stay, nothing answers until SIGCONT",
    "restart": "SIGTERM and a new start, one replica after the other",
    "restart-cached": "the same with packed weights kept on disk",
    "join": "a third replica is added to the placement, and leaves it again",
    "garbage": "the same with one whose copy of the weights is damaged, which is to be refused",
    "delay": "everything from one of them comes 100 ms later",
    "cut": "nothing gets through to one of them any more, and no connection breaks",
    "partition": "the same by packets, between network namespaces (needs root)",
    "client": "another client, with 64 large requests under way at one of them, is killed",
}
"""What may happen."""
_KINDS = {"delay": "relayed", "cut": "relayed", "join": "told", "garbage": "copies", "partition": "apart"}
"""The cluster that it happens to; the others: "direct"."""


@dataclass(frozen=True, slots=True)
class Event:
    """ready: before it; begin: it; wrong: what should not have come of it, "" = nothing; end: after it."""

    begin: Callable[[], object]
    end: Callable[[], object] = lambda: None
    ready: Callable[[], object] = lambda: None
    wrong: Callable[[], str] = lambda: ""


class Reported:
    """A source that says what it is told to say."""

    every_s = 0.02

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = tuple(addresses)

    def tell(self, addresses: Sequence[str]) -> None:
        self.addresses = tuple(addresses)

    def read(self) -> tuple[str, ...]:
        return self.addresses


class Scene:
    """faults: of FAULTS, that are to happen here; what only others need is not there."""

    def __init__(self, stack: ExitStack, tokens: int, faults: Sequence[str]) -> None:
        self._stack = stack
        near = HALVES if set(faults) - {"partition", "garbage"} else ()
        self.servers = self._started([[*MODEL, "--experts", half] for half in near])
        spares = self._started([[*MODEL, "--experts", HALVES[0]]] if "join" in faults else [])
        self._relays = [stack.enter_context(Relay(server.ready())) for server in self.servers]
        self._addresses = [server.address for server in self.servers]
        self._spares = [server.ready() for server in spares]
        self._clusters: dict[str, ExpertCluster] = {}
        self._expected: dict[str, NDArray[np.float32]] = {}
        self.request = drawn(np.random.default_rng(0), tokens, SHAPE, 0.0)

    def cluster(self, fault: str) -> tuple[ExpertCluster, NDArray[np.float32]]:
        """The one that a fault happens to, and what it answers to the request, [M, H]; made when it is first asked
        for."""
        kind = _KINDS.get(fault, "direct")
        if kind not in self._clusters:
            cluster = self._clusters[kind] = self._stack.enter_context(self._made(kind))
            self._expected[kind] = np.asarray(cluster.forward_request(self.request).output, np.float32)
        return self._clusters[kind], self._expected[kind]

    def _started(self, options: Sequence[Sequence[str]]) -> list[ServerProcess]:
        return [self._stack.enter_context(ServerProcess(each)) for each in options]

    def _made(self, kind: str) -> ExpertCluster:
        if kind == "relayed":
            return ExpertCluster([relay.address for relay in self._relays], transport=GrpcTransport)
        if kind == "told":
            self._told = Reported(self._addresses)
            return ExpertCluster(self._told)
        if kind == "copies":
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="expertd-copies-"))
            whole, damaged = write_copies(Path(folder), SHAPE)
            held = [(whole, half) for half in HALVES] + [(damaged, HALVES[0])]
            copies = self._started([["--checkpoint", str(f), "--experts", half, *ALONE] for f, half in held])
            *good, self._damaged = [server.ready() for server in copies]
            self._copies = Reported(good)
            return ExpertCluster(self._copies)
        if kind == "apart":
            self._namespaces = [self._stack.enter_context(Namespace()) for _ in HALVES]
            far = [
                self._stack.enter_context(ServerProcess([*MODEL, "--experts", half, "--insecure"], namespace))
                for namespace, half in zip(self._namespaces, HALVES, strict=True)
            ]
            return ExpertCluster([server.ready() for server in far])
        return ExpertCluster(self._addresses)

    def back(self, which: int) -> None:
        """Waits until all clusters ask that server again."""
        end_s = time.monotonic() + BACK_S
        for cluster in self._clusters.values():
            while list(cluster.servers.values())[which] and time.monotonic() < end_s:
                time.sleep(0.01)

    def event(self, fault: str, which: int) -> Event:
        """A fault at one of the replicas."""
        if fault == "partition":
            return Event(self._namespaces[which].cut, self._namespaces[which].mend)
        if fault == "garbage":
            good = self._copies.addresses
            return Event(
                lambda: self._copies.tell([*good, self._damaged]),
                lambda: self._copies.tell(good),
                wrong=self._admitted,
            )
        server, relay = self.servers[which], self._relays[which]
        if fault == "kill":
            return Event(server.kill, server.restart)
        if fault == "stop":
            return Event(server.stop, server.go_on)
        if fault == "restart":
            return Event(server.end, server.restart)
        if fault == "restart-cached":
            return Event(server.end, lambda: server.restart("--cache", self._cache()))
        if fault == "join":
            near = self._addresses
            return Event(lambda: self._told.tell([*near, *self._spares]), lambda: self._told.tell(near))
        if fault == "delay":
            return Event(lambda: relay.slow(0.1), lambda: relay.slow(0.0))
        if fault == "cut":
            return Event(relay.cut, relay.mend)
        others = Stampede(server.address)
        return Event(others.kill, ready=lambda: self._stack.enter_context(others).wait())

    def _admitted(self) -> str:
        """Why the damaged copy is not refused as it should be."""
        why = self._clusters["copies"].servers.get(self._damaged, "it is not there")
        refused = "other weights" in why or "its sums are not added" in why  # by a digest, or by the identity
        return "" if refused else f"the damaged copy: {why or 'is asked'}"

    def _cache(self) -> str:
        if not hasattr(self, "_folder"):
            self._folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="expertd-cache-"))
        return self._folder
