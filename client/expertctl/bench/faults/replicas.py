"""`expertctl bench replicas`: two replicas of which one is worse, and what choosing and hedging make of it.

CASES and WAYS say what is compared.  The servers are threads of this process that sleep, so that nothing but the choice
differs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from expertctl.common.brief import fewer
from expertctl.common.columns import Column, table_of
from expertctl.common.counts import at_least
from expertctl.common.percentiles import Durations
from expertd.codec import ForwardRequestView, ForwardResponseView, TensorView
from expertd.common.identity import synthetic_identity
from expertd.common.tables import console, print_table
from expertd.errors import RequestCancelledError
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.clients.client import ExpertClient
from expertd_client.clients.forwarder import Forwarder
from expertd_client.cluster import ExpertCluster, Policy
from expertd_client.requests.request import Request
from expertd_client.transports.protocol import Closed, Deliver, MainConnection, SessionTransport, Waiter, no_session

__all__ = ["COLUMNS", "ReplicaMeasurement", "add_arguments", "measure", "run_command"]

TOKENS, HIDDEN = 4, 64
SERVICE_S, STUMBLE_S, STUMBLES = 0.002, 0.05, 0.05


@dataclass(frozen=True, slots=True)
class ReplicaMeasurement:
    """extra: requests that were computed for nothing, as a share of the calls."""

    case: str
    way: str
    calls: int
    p50_ms: float
    p99_ms: float
    extra: float


class Sleeper:
    """A server of one expert, and the transport to it.  service_s: of a call; stumbles: share of the answers that come
    STUMBLE_S later; workers: calls at once, others wait.

    computed   calls that were begun
    """

    offers: Sequence[SessionTransport] = ()

    def __init__(self, target: str, service_s: float, stumbles: float = 0.0, workers: int = 1) -> None:
        self.target = target
        self.computed = 0
        self._service_s = service_s
        self._stumbles = stumbles
        self._rng = random.Random(0)
        self._waiting = 0
        self._pool = ThreadPoolExecutor(workers)
        self._lock = threading.Lock()

    def connect(self, deliver: Deliver, closed: Closed) -> MainConnection:
        return _SleepingConnection(self, deliver, closed)

    def unary(
        self, method: str, request: Any, answer: Any, timeout_s: float, wait_for_ready: bool, waiter: Waiter[Any]
    ) -> None:
        layer = pb.Layer(layer=0, num_experts=1, held=[pb.ExpertRange(first=0, count=1)])
        model = pb.Model(fingerprint="sleep", hidden_size=HIDDEN)
        same = pb.WeightVersion(number=1, identity=synthetic_identity(model.fingerprint))
        waiter.answer(pb.DescribeResponse(model=model, layers=[layer], versions=[same]))

    def submit(self, view: ForwardRequestView, wanted: Callable[[], bool], deliver: Deliver) -> None:
        with self._lock:
            self._waiting += 1
        self._pool.submit(self._serve, view, wanted, deliver, time.monotonic_ns())

    def _serve(self, view: ForwardRequestView, wanted: Callable[[], bool], deliver: Deliver, came_ns: int) -> None:
        begun_ns = time.monotonic_ns()
        with self._lock:
            self._waiting -= 1
            self.computed += wanted()
            late = self._rng.random() < self._stumbles
        if not wanted():
            return
        time.sleep(self._service_s)
        timing = pb.Timing(queue_ns=begun_ns - came_ns, kernel_ns=time.monotonic_ns() - begun_ns)
        if late:
            time.sleep(STUMBLE_S)  # on the way
        hidden = view.hidden_states
        assert hidden is not None
        load = pb.Load(queued_tokens=TOKENS * self._waiting, token_ns=1e9 * self._service_s / TOKENS)
        output = TensorView.of_raw(hidden.dtype, hidden.shape, hidden.raw)
        deliver(ForwardResponseView(view.request_id, output, routes_computed=TOKENS, timing=timing, load=load))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def wait_closed(self) -> None:
        """Nothing to wait for."""


class _SleepingConnection:
    def __init__(self, server: Sleeper, deliver: Deliver, closed: Closed) -> None:
        self._server = server
        self._deliver = deliver
        self._closed: Closed | None = closed
        self._cancelled: set[int] = set()

    def takes(self, request: Request) -> bool:
        return True

    def forward(self, request_id: int, timeout_us: int, request: Request) -> None:
        view = request.view(request_id, timeout_us)
        self._server.submit(view, lambda: request_id not in self._cancelled, self._deliver)

    def cancel(self, request_id: int) -> None:
        self._cancelled.add(request_id)

    def offer(self, offer: pb.SessionOffer) -> None:
        self._deliver(no_session(offer, "a thread has no sessions"))

    def close(self) -> None:
        closed, self._closed = self._closed, None
        if closed is not None:
            closed(RequestCancelledError("closed by this client"))


CASES = {
    "stumbles": f"one replica delays {STUMBLES:.0%} of its answers by {1e3 * STUMBLE_S:g} ms",
    "slow": "one replica takes four times as long for each call",
}
WAYS = {
    "in turn": "two clients, one after the other (round robin)",
    "two choices": "a cluster without hedging",
    "hedged": "a cluster with hedging, the default",
}
COLUMNS = (
    Column("case", "what is wrong with one of two replicas", values=CASES),
    Column("strategy", "how a replica is chosen", "way", values=WAYS),
    Column("calls", "that were made"),
    Column("p50 ms", "median time of a call", "p50_ms"),
    Column("p99 ms", "99th percentile of these times", "p99_ms"),
    Column("extra work", "computed for a call whose answer came from the other replica, as a share of calls", "extra"),
)


def measure(calls: int, callers: int) -> list[ReplicaMeasurement]:
    """Both cases, each way."""
    rows = []
    for case, way in itertools.product(CASES, WAYS):
        if case == "stumbles":
            servers = {"good": Sleeper("good", SERVICE_S, 0.0, 16), "bad": Sleeper("bad", SERVICE_S, STUMBLES, 16)}
        else:
            servers = {"good": Sleeper("good", SERVICE_S), "bad": Sleeper("bad", 4 * SERVICE_S)}
        with ExitStack() as stack:
            ways: list[Forwarder] = [ExpertClient(server) for server in servers.values()]
            if way != "in turn":
                policy = Policy() if way == "hedged" else Policy(hedge=0.0)
                ways = [ExpertCluster(list(servers), transport=servers.__getitem__, policy=policy)]
            for forwarder in ways:
                stack.enter_context(forwarder)
            rows.append(_row(case, way, ways, list(servers.values()), calls, callers))
    return rows


def _row(
    case: str, way: str, ways: Sequence[Forwarder], servers: Sequence[Sleeper], calls: int, callers: int
) -> ReplicaMeasurement:
    request = Request(
        0, np.ones((TOKENS, HIDDEN), np.float32), np.zeros((TOKENS, 1), np.int32), np.ones((TOKENS, 1), np.float32)
    )
    numbers, times = iter(range(calls)), Durations()
    turns = itertools.cycle(ways)

    def call() -> None:
        for _ in numbers:
            begin_s = time.perf_counter()
            next(turns).forward_request(request)
            times.add(time.perf_counter() - begin_s)

    threads = [threading.Thread(target=call) for _ in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found, computed = times.summary(), sum(server.computed for server in servers)
    p50_ms, p99_ms = round(1e3 * found.p50_s, 2), round(1e3 * found.p99_s, 2)
    return ReplicaMeasurement(case, way, calls, p50_ms, p99_ms, round((computed - calls) / calls, 4))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--calls", type=at_least(1), default=fewer(3000, 20), metavar="N", help="calls of each strategy (default: 3000)"
    )
    parser.add_argument("--callers", type=at_least(1), default=2, metavar="N", help="client threads (default: 2)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run_command(args: argparse.Namespace) -> int:
    rows = measure(args.calls, args.callers)
    if args.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))
        return 0
    table = table_of(COLUMNS, "two replicas, one of them slow")
    for r in rows:
        table.add_row(r.case, r.way, f"{r.calls:,}", f"{r.p50_ms:.1f}", f"{r.p99_ms:.1f}", f"{r.extra:.1%}")
    print_table(console(), table)
    return 0
