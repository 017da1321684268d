"""What was measured, as values: samples of one cell of the grid, and the row that they make."""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from expertctl.common.percentiles import Durations
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.tracing.stages import SERVER

__all__ = ["STAGES", "PathMeasurement", "Samples", "row_of"]

STAGES: Mapping[str, str] = {
    "client_encode": "the request to bytes, or into shared memory, and on its way",
    "wire": "all that the others are not: gRPC, sockets, doorbells, wake-ups of threads and tasks on both sides",
    "decode": "from the message's arrival at the server to its place in a queue",
    "queue": "until its batch was formed",
    "collect": "the batch gathered, converted, and moved to the device",
    "kernel": "the experts",
    "deliver": "the output moved back and converted",
    "encode": "the answer to bytes, as far as the server tells of it: what is written in place takes nothing",
    "client_decode": "bytes to the answer, and to who waits for it",
}
"""In the order of a request's way.  Their sum is the median of the whole time."""


@dataclass
class Samples:
    """Of one way and one cell.

    whole      seconds from before a request is made until its answer can be read
    wall_s     of all rounds together
    stages     name -> nanoseconds, one for each request
    timings    of the answers, as they came: taking them apart takes longer than a stage
    """

    whole: Durations = field(default_factory=Durations)
    wall_s: float = 0.0
    stages: dict[str, array[int]] = field(default_factory=dict)
    timings: list[pb.Timing] = field(default_factory=list)

    def add(self, stage: str, ns: int) -> None:
        self.stages.setdefault(stage, array("q")).append(ns)

    def take_timings(self) -> None:
        """Their fields into stages."""
        for stage, name in SERVER.items():
            self.stages[stage] = array("q", [getattr(t, name) for t in self.timings])
        self.timings.clear()

    def requests_per_s(self) -> float:
        return len(self.whole) / self.wall_s if self.wall_s else 0.0


@dataclass(frozen=True)
class PathMeasurement:
    """One cell of the grid, one transport.  Times are medians but for p99_us.

    server        "echo", or the address
    bytes         of the hidden states; as many come back
    client        "asyncio", "threads" or "bytes"
    callers       each with a connection of its own, and one request under way
    bare          what bare_us and bare_requests_per_s are of: "stream", "socket" or "eventfd"
    """

    server: str
    transport: str
    client: str
    tokens: int
    hidden_size: int
    bytes: int
    callers: int
    p50_us: float
    p99_us: float
    requests_per_s: float
    kernel_us: float
    bare: str
    bare_us: float
    bare_requests_per_s: float
    stages_us: Mapping[str, float]


def row_of(
    names: tuple[str, str, str], sizes: tuple[int, int, int], ours: Samples, bare_name: str, bare: Samples
) -> PathMeasurement:
    """names: server, transport, client; sizes: tokens, hidden size, callers."""
    tokens, hidden_size, callers = sizes
    whole, floor = ours.whole.summary(), bare.whole.summary()
    stages = stages_us(ours.stages, whole.p50_s * 1e6)
    return PathMeasurement(
        *names,
        tokens,
        hidden_size,
        2 * tokens * hidden_size,
        callers,
        round(whole.p50_s * 1e6, 1),
        round(whole.p99_s * 1e6, 1),
        round(ours.requests_per_s(), 1),
        stages["kernel"],
        bare_name,
        round(floor.p50_s * 1e6, 1),
        round(bare.requests_per_s(), 1),
        stages,
    )


def stages_us(measured: Mapping[str, Sequence[int]], whole_us: float) -> dict[str, float]:
    """The median of each stage; the wire is what is left of the whole."""
    found = {name: statistics.median(measured[name]) / 1000 if measured.get(name) else 0.0 for name in STAGES}
    found["wire"] = max(0.0, whole_us - sum(us for name, us in found.items() if name != "wire"))
    return {name: round(us, 1) for name, us in found.items()}
