"""The client's own cluster code in a world of virtual time."""

from __future__ import annotations

import contextlib
import gc
import random
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, cast

from expertctl.simulation.outcome import Outcome, SimulationTally
from expertctl.simulation.service import Service
from expertctl.simulation.trace import LAYER, Outage, Trace
from expertctl.simulation.world import SimulatedExchange, SimulatedServer, World
from expertd.common.ranges import runs
from expertd.errors import DeadlineExceededError, ExpertdError, UnavailableError
from expertd.placement import Placement
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.cluster.call import Call
from expertd_client.cluster.cluster import DESCRIBE_S
from expertd_client.cluster.flight import Flight, start
from expertd_client.cluster.member import Member
from expertd_client.cluster.members import Members
from expertd_client.cluster.policy import OnMissing, Policy
from expertd_client.cluster.shared import ClusterState
from expertd_client.requests.deadline import Deadline

if TYPE_CHECKING:
    from expertd_client.exchange.exchange import Exchange
    from expertd_client.transports.protocol import Transport

__all__ = ["describes", "simulate"]


def describes(placement: Placement, address: str, max_tokens: int) -> pb.DescribeResponse:
    """What a server of the placement says of itself."""
    (held,) = (s.layers[LAYER] for s in placement.servers if s.address == address)
    ranges = [pb.ExpertRange(first=a, count=b - a + 1) for a, b in runs(held)]
    layer = pb.Layer(layer=LAYER, num_experts=placement.num_experts[LAYER], held=ranges)
    model = pb.Model(fingerprint="simulated", hidden_size=8)
    version = pb.WeightVersion(number=1, serving=True, identity="synthetic:simulated")
    limits = pb.Limits(max_tokens=max_tokens)
    return pb.DescribeResponse(model=model, layers=[layer], limits=limits, versions=[version])


def simulate(
    placement: Placement,
    service: Service,
    trace: Trace,
    timeout_s: float,
    policy: Policy,
    seed: int = 0,
    progress: Callable[[int], object] | None = None,
) -> tuple[Outcome, SimulationTally]:
    """What becomes of the calls of a trace; timeout_s: of each.  progress: called with how many have ended."""
    begin_s = time.perf_counter()
    cluster = _Cluster(placement, service, trace, timeout_s, policy, seed)
    cluster.tally.progress = progress
    with _without_collector():
        parts = cluster.run()
    computed = sum(server.computed for server in cluster.servers.values())
    return cluster.tally.outcome(parts, computed, round(time.perf_counter() - begin_s, 1)), cluster.tally


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Calls that have ended are in no cycle, so nothing piles up; to look for one again and again in all that is under
    way took half of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class _Cluster:
    """What ExpertCluster is on threads: members that are watched, and calls."""

    def __init__(
        self, placement: Placement, service: Service, trace: Trace, timeout_s: float, policy: Policy, seed: int
    ) -> None:
        self.world, rng = World(), random.Random(seed + 1)
        self.tally = SimulationTally.of(len(trace.at_s))
        self.servers = {
            s.address: SimulatedServer(self.world, service, describes(placement, s.address, service.max_tokens), rng)
            for s in placement.servers
        }
        self._trace = trace
        self._timeout_s = timeout_s
        self._calls = [Call(request, None, OnMissing.FAIL, False) for request in trace.pool]
        for call in self._calls:
            call.bring(False)
        self._members = Members(self._way, policy.stall_s, self.world.clock)
        self._state = ClusterState(self._members, policy, self.world, self._wake)
        self._state.rng = random.Random(seed)
        self._asked: dict[Member, int] = {}
        self._answered = 0
        self._parts = 0
        self._members.apply(tuple(self.servers))

    def _way(self, address: str) -> tuple[Transport, Exchange]:
        exchange = SimulatedExchange(self.world, self.servers[address])
        return cast("Transport", None), cast("Exchange", exchange)

    def run(self) -> int:
        """All calls; the parts that counted."""
        for member in self._members.by_address.values():
            self._asked[member] = 0
            self._members.probed(member, self.servers[member.address].describe())
            self._ask_in(member, 0.0)
        for outage in self._trace.outages:
            self.world.at(outage.at_s, lambda outage=outage: self._strike(outage))  # type: ignore[misc]
        self.world.at(float(self._trace.at_s[0]), lambda: self._call(0))
        self.world.run(lambda: self._answered == len(self._trace.at_s))
        return self._parts

    def _strike(self, outage: Outage) -> None:
        server = self.servers[f"s{outage.server}"]
        if not server.up:
            return
        if outage.hangs:
            server.hang(outage.seconds)
        else:
            server.die(outage.seconds)

    # ---- calls -------------------------------------------------------------------------------------------------------

    def _call(self, number: int) -> None:
        if number + 1 < len(self._trace.at_s):
            self.world.at(float(self._trace.at_s[number + 1]), lambda: self._call(number + 1))
        now_s = self.tally.begun_s[number] = self.world.now_s
        deadline = Deadline(self._timeout_s, now_s + self._timeout_s)
        try:
            start(self._state, self._calls[self._trace.which[number]], deadline, lambda f: self._landed(number, f))
        except ExpertdError as error:
            self._end(number, error)

    def _landed(self, number: int, flight: Flight) -> None:
        self._parts += len(flight.sub_requests) if flight.error is None else 0
        self._end(number, flight.error)
        flight.forget()

    def _end(self, number: int, error: ExpertdError | None) -> None:
        self._answered += 1
        self.tally.ended(number, self.world.now_s, error)

    # ---- the watch on servers ----------------------------------------------------------------------------------------

    def _wake(self, member: Member) -> None:
        if self._asked[member] >= 0:  # else it is being asked
            self._ask_in(member, 0.0)

    def _ask_in(self, member: Member, pause_s: float) -> None:
        turn = self._asked[member] = abs(self._asked[member]) + 1
        self.world.at(self.world.now_s + pause_s, lambda: self._ask(member, turn))

    def _ask(self, member: Member, turn: int) -> None:
        if self._asked[member] != turn:
            return
        self._asked[member] = -turn
        server = self.servers[member.address]
        later_s, answer = 2 * server.half_s(), UnavailableError("connection refused") if not server.up else None
        if server.up and server.hangs:
            later_s = DESCRIBE_S
        self.world.at(self.world.now_s + later_s, lambda: self._heard(member, answer, later_s == DESCRIBE_S))

    def _heard(self, member: Member, refused: ExpertdError | None, late: bool) -> None:
        answer: pb.DescribeResponse | ExpertdError = self.servers[member.address].describe()
        if late:
            answer = DeadlineExceededError("Describe: no answer in time")
        self._ask_in(member, self._members.probed(member, refused or answer))
