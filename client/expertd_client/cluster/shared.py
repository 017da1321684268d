"""What all calls of a cluster share."""

from __future__ import annotations

import ctypes as C
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from expertd.errors import ExpertdError, RequestCancelledError
from expertd_client.cluster.member import Member
from expertd_client.cluster.members import Members
from expertd_client.cluster.policy import Latencies, Policy
from expertd_client.cluster.timers import Timer

if TYPE_CHECKING:
    from expertd_client.cluster.call_memory import CallMemory

__all__ = ["CallInFlight", "ClusterState"]


class CallInFlight(Protocol):
    """What is known here of a Flight."""

    def end(self, error: ExpertdError | None, /) -> bool:
        """It is over.  False: it was before."""
        ...


class ClusterState:
    """clock: what all times are on; wake: has a server described at once; flights: the calls under way.

    call_memories      that nobody uses; usual_ns: what calls that wait for themselves take
                       (expertd_client.cluster.fast_call)
    """

    def __init__(self, members: Members, policy: Policy, timer: Timer, wake: Callable[[Member], None]) -> None:
        self.members = members
        self.clock = members.clock
        self.policy = policy
        self.timer = timer
        self.wake = wake
        self.latencies = Latencies(policy.hedge)
        self.rng = random.Random()
        self.closed = False
        self.flights: set[CallInFlight] = set()
        self.call_memories: list[CallMemory] = []
        self.usual_ns = C.c_uint64()

    def close(self) -> None:
        """Ends every call under way."""
        self.closed = True
        for flight in list(self.flights):
            flight.end(RequestCancelledError("cluster: this client was closed before the answer came"))
        self.timer.close()
