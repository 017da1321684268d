"""The same calls, failures and policy on real time: ExpertCluster with its threads, and servers that sleep.

The servers are threads of this process that batch as simulated ones do and sleep as long as those compute, so that what
differs is time itself: clocks, threads, locks, and what else the machine does.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from expertctl.simulation.outcome import Outcome, SimulationTally
from expertctl.simulation.service import Service
from expertctl.simulation.simulate import describes
from expertctl.simulation.trace import Outage, Trace
from expertd.codec import ForwardRequestView, ForwardResponseView, TensorView
from expertd.errors import RequestCancelledError, UnavailableError
from expertd.placement import Placement
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.cluster import ExpertCluster, Policy
from expertd_client.requests.request import Request
from expertd_client.transports.protocol import Closed, Deliver, MainConnection, SessionTransport, Waiter, no_session

__all__ = ["run_real"]


class SleepingServer:
    """A server, and the transport to it.

    computed   parts that were begun
    late_s     by how much each batch took longer than it should
    ways_s     of requests that came while nothing else was there: until its batch began, and until its answer was taken
    """

    offers: Sequence[SessionTransport] = ()

    def __init__(self, address: str, service: Service, placement: Placement) -> None:
        self.target = address
        self.computed = 0
        self.late_s: list[float] = []
        self.ways_s: list[float] = []
        self._service = service
        self._describes = describes(placement, address, service.max_tokens)
        held = next(s.layers[0] for s in placement.servers if s.address == address)
        self._holds = np.zeros(placement.num_experts[0] + 1, bool)
        self._holds[list(held)] = True
        self._lock = threading.Condition()
        self._queue: list[_Pending] = []
        self._ways: list[_SleepingConnection] = []
        self._up = True
        self._closed = False
        self._hung_until_s = 0.0
        self._token_s = 0.0
        self._thread = threading.Thread(target=self._run, name=f"sleeping-{address}", daemon=True)
        self._thread.start()

    # ---- the transport -----------------------------------------------------------------------------------------------

    def connect(self, deliver: Deliver, closed: Closed) -> MainConnection:
        way = _SleepingConnection(self, deliver, closed)
        with self._lock:
            up = self._up
            if up:
                self._ways.append(way)
        if not up:
            way.end(UnavailableError(f"{self.target}: connection refused"))
        return way

    def unary(
        self, method: str, request: Any, answer: Any, timeout_s: float, wait_for_ready: bool, waiter: Waiter[Any]
    ) -> None:
        if not self._up:
            waiter.fail(UnavailableError(f"{self.target}: connection refused"))
        elif time.monotonic() >= self._hung_until_s:
            waiter.answer(self._describes)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify()
        self._thread.join()

    async def wait_closed(self) -> None:
        """Nothing to wait for."""

    def take(self, asked: _Pending) -> None:
        with self._lock:
            self._queue.append(asked)
            self._lock.notify()

    # ---- what happens to it ------------------------------------------------------------------------------------------

    def die(self) -> None:
        with self._lock:
            self._up = False
            ways, self._ways, self._queue = self._ways, [], []
        for way in ways:
            way.end(UnavailableError(f"{self.target}: connection reset"))

    def rise(self) -> None:
        with self._lock:
            self._up, self._hung_until_s = True, 0.0

    def hang(self, until_s: float) -> None:
        with self._lock:
            self._hung_until_s = max(self._hung_until_s, until_s)

    # ---- its work ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._lock:
                idle = not self._queue
                while not self._queue and not self._closed:
                    self._lock.wait()
                if self._closed:
                    return
            self._wait_out()
            with self._lock:
                batch, tokens = self._batch()
            if not batch:
                continue
            begun_s = time.monotonic()
            self.computed += len(batch)
            time.sleep(self._service.batch_s(tokens))
            took_s = time.monotonic() - begun_s
            if begun_s > self._hung_until_s + 1.0:
                self.late_s.append(max(0.0, took_s - self._service.batch_s(tokens)))
            idle = idle and len(batch) == 1
            self._wait_out()
            self._token_s += (took_s / tokens - self._token_s) * (0.2 if self._token_s else 1.0)
            load = self._load()
            answered_s = time.monotonic()
            for asked in batch:
                asked.answer(begun_s, took_s, load, self._holds)
            if idle and begun_s > self._hung_until_s + 1.0:
                self.ways_s.append(batch[0].waited_s(begun_s) + time.monotonic() - answered_s)

    def _wait_out(self) -> None:
        while (left_s := self._hung_until_s - time.monotonic()) > 0 and not self._closed:
            time.sleep(min(left_s, 0.05))

    def _batch(self) -> tuple[list[_Pending], int]:
        batch: list[_Pending] = []
        tokens = 0
        while self._queue and (not batch or tokens + self._queue[0].tokens <= self._service.max_tokens):
            asked = self._queue.pop(0)
            if asked.wanted():
                batch.append(asked)
                tokens += asked.tokens
        return batch, tokens

    def _load(self) -> pb.Load:
        with self._lock:
            queued = sum(asked.tokens for asked in self._queue)
            return pb.Load(queued_tokens=queued, queued_requests=len(self._queue), token_ns=1e9 * self._token_s)


class _SleepingConnection:
    """One connection."""

    def __init__(self, server: SleepingServer, deliver: Deliver, closed: Closed) -> None:
        self.cancelled: set[int] = set()
        self.deliver = deliver
        self._server = server
        self._closed: Closed | None = closed

    @property
    def open(self) -> bool:
        return self._closed is not None

    def takes(self, request: Request) -> bool:
        return True

    def forward(self, request_id: int, timeout_us: int, request: Request) -> None:
        if self.open:
            self._server.take(_Pending(self, request.view(request_id, timeout_us), request.tokens))

    def cancel(self, request_id: int) -> None:
        self.cancelled.add(request_id)

    def offer(self, offer: pb.SessionOffer) -> None:
        self.deliver(no_session(offer, "a thread has no sessions"))

    def close(self) -> None:
        self.end(RequestCancelledError("closed by this client"))

    def end(self, why: Any) -> None:
        closed, self._closed = self._closed, None
        if closed is not None:
            closed(why)


class _Pending:
    """A request at a server."""

    def __init__(self, way: _SleepingConnection, view: ForwardRequestView, tokens: int) -> None:
        self.tokens = tokens
        self._way = way
        self._view = view
        self._came_s = time.monotonic()

    def waited_s(self, now_s: float) -> float:
        return now_s - self._came_s

    def wanted(self) -> bool:
        return self._way.open and self._view.request_id not in self._way.cancelled

    def answer(self, begun_s: float, took_s: float, load: pb.Load, holds: Any) -> None:
        if not self._way.open:
            return
        hidden, ids = self._view.hidden_states, self._view.topk_ids
        assert hidden is not None
        assert ids is not None
        routes = int(np.count_nonzero(holds[np.frombuffer(ids.raw, np.int32)]))
        timing = pb.Timing(queue_ns=int(1e9 * (begun_s - self._came_s)), kernel_ns=int(1e9 * took_s))
        output = TensorView.of_raw(hidden.dtype, hidden.shape, hidden.raw)
        self._way.deliver(
            ForwardResponseView(self._view.request_id, output, routes_computed=routes, timing=timing, load=load)
        )


def run_real(
    placement: Placement,
    service: Service,
    trace: Trace,
    timeout_s: float,
    policy: Policy,
    progress: Callable[[int], object] | None = None,
) -> tuple[Outcome, SimulationTally, Service]:
    """What becomes of the calls of a trace, now; and the service as threads gave it here, busy as the machine was.
    progress: called with how many have ended."""
    calls = len(trace.at_s)
    servers = {s.address: SleepingServer(s.address, service, placement) for s in placement.servers}
    sent_s: list[float] = []
    tally, parts, left = SimulationTally.of(calls, progress), [0] * calls, threading.Semaphore(0)
    with ExpertCluster(list(servers), transport=servers.__getitem__, policy=policy, max_in_flight=1 << 16) as cluster:
        cluster.forward_request(trace.pool[0])
        for server in servers.values():
            server.computed = 0
        begin_s = time.monotonic()

        def ended(number: int, future: Any) -> None:
            error = future.exception()
            parts[number] = 0 if error is not None else len(future.result().parts)
            tally.ended(number, time.monotonic(), error)
            left.release()

        fate = threading.Thread(target=_strike, args=(servers, trace.outages, begin_s), daemon=True)
        fate.start()
        for number in range(calls):
            time.sleep(max(0.0, begin_s + trace.at_s[number] - time.monotonic()))
            tally.begun_s[number] = time.monotonic()
            future = cluster.submit_request(trace.pool[trace.which[number]], timeout_s=timeout_s)
            sent_s.append(time.monotonic() - tally.begun_s[number])
            future.add_done_callback(partial(ended, number))
        for _ in range(calls):
            left.acquire()
        computed = sum(server.computed for server in servers.values())
        fate.join()
    late_s = [s for server in servers.values() for s in server.late_s]
    ways_s = [s + statistics.median(sent_s) for server in servers.values() for s in server.ways_s]
    given = replace(service, late_s=late_s or service.late_s, ways_s=ways_s or service.ways_s)
    return tally.outcome(sum(parts), computed, round(time.monotonic() - begin_s, 1)), tally, given


def _strike(servers: dict[str, SleepingServer], outages: Sequence[Outage], begin_s: float) -> None:
    """Lets servers die and rise when the trace says so."""
    up_s: dict[str, float] = {}
    acts: list[tuple[float, str, Outage]] = []
    for outage in outages:
        name = f"s{outage.server}"
        if outage.at_s < up_s.get(name, 0.0):
            continue  # it is down already
        acts.append((outage.at_s, "begin", outage))
        if not outage.hangs:
            up_s[name] = outage.at_s + outage.seconds
            acts.append((up_s[name], "end", outage))
    for at_s, act, outage in sorted(acts, key=lambda one: one[0]):
        time.sleep(max(0.0, begin_s + at_s - time.monotonic()))
        server = servers[f"s{outage.server}"]
        if act == "end":
            server.rise()
        elif outage.hangs:
            server.hang(time.monotonic() + outage.seconds)
        else:
            server.die()
