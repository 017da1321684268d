"""The load generator: closed loop or open loop, with the clock of the event loop.

    closed   `concurrency` callers, each sends its next request when its last one was answered
    open     requests leave at times that were fixed before (a constant rate, or a Poisson process), whether or not
             earlier ones were answered

Latency in the open loop runs from the time at which a request was meant to leave, not from when it left: while the
server (or this generator) stalls, the requests that pile up behind the stall are charged with their wait.  Otherwise
a stall of a second would count once instead of a thousand times ("coordinated omission").  How late this generator
itself was stands in the report as `lateness`: where that is not small beside the latency, the generator was the
bottleneck."""

from __future__ import annotations

import asyncio
import contextlib
import math
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import count
from typing import Any, TypeVar

from expertctl.common.percentiles import Durations, Summary
from expertctl.load.by_server import ByServer, ServerAnswers
from expertctl.load.departures import LoadPlan, departures
from expertd.errors import DeadlineExceededError, ExpertdError
from expertd_client.cluster import ClusterResult
from expertd_client.requests.request import Request
from expertd_client.requests.result import ForwardResult

__all__ = ["Behind", "FirstFailure", "LoadReport", "LoadRun", "Now", "Raw", "Send", "ServerSide", "run_load"]

_T = TypeVar("_T")

Send = Callable[[Request, int], Awaitable[ForwardResult]]
"""Sends a request; the number spreads requests over connections (modulo how many there are)."""

_FAILURE_PAUSE_S = 0.01
"""After a failed request a caller of the closed loop waits this long: a server that is gone is not asked at full
speed."""
_GRACE_S = 1.0
"""An open loop that is late goes on for so long after its duration; what is left of its plan then is not sent."""
_BEHIND, _BEHIND_S = 1.1, 0.05
"""A generator is behind where its last request left so much later than planned: this many times the planned time, and
these seconds."""


@dataclass(frozen=True, slots=True)
class ServerSide:
    """Means of what the servers said of their own time, in nanoseconds, over the answered requests."""

    decode_ns: float = 0.0
    queue_ns: float = 0.0
    copy_in_ns: float = 0.0
    kernel_ns: float = 0.0
    copy_out_ns: float = 0.0
    encode_ns: float = 0.0
    batch_tokens: float = 0.0
    batch_requests: float = 0.0


_SERVER_FIELDS = tuple(f.name for f in fields(ServerSide))


@dataclass(frozen=True, slots=True)
class Raw:
    """Seconds: when each answer came and what it took, and when each failure did."""

    ends_s: Sequence[float]
    latencies_s: Sequence[float]
    failures_s: Sequence[float]


@dataclass(frozen=True, slots=True)
class Behind:
    """Requests a second that an open loop was to send until its last one, and that it sent."""

    offered_per_s: float
    sent_per_s: float


@dataclass(frozen=True, slots=True)
class FirstFailure:
    """after_s: since the first departure; text: of the error."""

    after_s: float
    text: str


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What came of a run.

    wall_s            from the first departure to the last answer
    answered, failed  requests; errors: failed ones by reason
    routes_computed   over all answers
    latency           of the answered ones
    lateness          open loop: how long after its time a request left this generator
    transports        requests by what carried them; {} = not counted
    behind            open loop: how far the generator fell behind its plan; None = it did not
    first_failure     when the first request failed, and with what; None = none did
    by_server         of a cluster: what each server answered
    """

    wall_s: float
    answered: int
    errors: dict[str, int]
    tokens: int
    routes_computed: int
    latency: Summary
    lateness: Summary
    server: ServerSide
    backends: dict[str, int]
    raw: Raw = field(default_factory=lambda: Raw((), (), ()), repr=False)
    by_server: Sequence[ServerAnswers] = ()
    transports: dict[str, int] = field(default_factory=dict)
    behind: Behind | None = None
    first_failure: FirstFailure | None = None

    @property
    def failed(self) -> int:
        return sum(self.errors.values())

    @property
    def requests_per_s(self) -> float:
        return self.answered / self.wall_s if self.wall_s else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s if self.wall_s else 0.0


async def run_load(plan: LoadPlan, requests: Iterator[Request], send: Send) -> LoadReport:
    """Runs the plan.  Errors of the table are counted; any other exception ends the run and is raised."""
    return await LoadRun(plan).run(requests, send)


class LoadRun:
    """One run of a plan, which can be looked at and stopped."""

    def __init__(self, plan: LoadPlan, carried: Counter[str] | None = None) -> None:
        """carried: where the transport counts requests; emptied after the warmup."""
        self.plan, self.stopped = plan, False
        self._carried = Counter[str]() if carried is None else carried
        self._tally: _Tally | None = None
        self._task: asyncio.Task[Any] | None = None
        self._flock = _Flock()

    async def run(self, requests: Iterator[Request], send: Send) -> LoadReport:
        """As run_load(); after stop() the report of what was answered until then."""
        self._task = asyncio.current_task()
        try:
            for n in range(self.plan.warmup):
                with contextlib.suppress(DeadlineExceededError):  # of --timeout, which is for what is measured
                    await send(next(requests), n)
            self._carried.clear()
            self._tally = tally = _Tally(asyncio.get_running_loop().time)
            async with self._flock:
                if not self.plan.open:
                    _start_callers(self.plan, requests, send, tally, self._flock)
                else:
                    await _depart(self.plan, requests, send, tally, self._flock)
        except asyncio.CancelledError:
            if not self.stopped:
                raise
        finally:
            self._task = None
        return (self._tally or _Tally(asyncio.get_running_loop().time)).report(self._carried)

    def stop(self) -> None:
        """Ends it now, what is in flight as well; from its loop."""
        self.stopped = True
        if self._task is not None:
            self._task.cancel()

    @property
    def now(self) -> Now:
        """How it stands."""
        tally = self._tally
        return Now() if tally is None else tally.now(self._flock.size)


def _start_callers(plan: LoadPlan, requests: Iterator[Request], send: Send, tally: _Tally, flock: _Flock) -> None:
    numbers = iter(range(plan.requests)) if plan.requests is not None else count()

    async def caller(connection: int) -> None:
        for _ in numbers:
            begin_s = tally.elapsed_s()
            if plan.duration_s is not None and begin_s >= plan.duration_s:
                return
            request = next(requests)
            if not await tally.measure(send(request, connection), begin_s, request.tokens):
                await asyncio.sleep(_FAILURE_PAUSE_S)

    for n in range(plan.concurrency):
        flock.start(caller(n))


async def _depart(plan: LoadPlan, requests: Iterator[Request], send: Send, tally: _Tally, flock: _Flock) -> None:
    end_s = math.inf if plan.duration_s is None else plan.duration_s + _GRACE_S
    for number, at_s in enumerate(departures(plan)):
        await asyncio.sleep(max(0.0, at_s - tally.elapsed_s()))  # 0: the answers get their turn, too
        now_s = tally.elapsed_s()
        if flock.fault is not None or now_s > end_s:
            return
        tally.departed(at_s, now_s)
        request = next(requests)
        flock.start(tally.measure(send(request, number), at_s, request.tokens))


@dataclass(frozen=True, slots=True)
class Now:
    """Of a run that goes on: seconds since it began; latencies of the answers since the last look."""

    elapsed_s: float = 0.0
    answered: int = 0
    failed: int = 0
    in_flight: int = 0
    since_last: Summary = field(default_factory=Summary)


class _Flock:
    """Tasks that are waited for together: until all are done, or until one raises; then the rest is cancelled."""

    def __init__(self) -> None:
        self.fault: BaseException | None = None
        self._tasks: set[asyncio.Task[object]] = set()

    def start(self, work: Coroutine[object, object, object]) -> None:
        task: asyncio.Task[object] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    @property
    def size(self) -> int:
        return len(self._tasks)

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and self.fault is None:
            self.fault = task.exception()

    async def __aenter__(self) -> _Flock:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            while self._tasks and self.fault is None and kind is None:
                await asyncio.wait(list(self._tasks), return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in list(self._tasks):
                task.cancel()
        if self.fault is not None and kind is None:
            raise self.fault


class _Tally:
    """Counts and times while the run goes on."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.lateness = Durations()
        self._clock = clock
        self._start_s = clock()
        self._last_s = 0.0
        self._planned_s = self._left_s = 0.0
        self._first_failure: FirstFailure | None = None
        self._latency = Durations()
        self._ends_s, self._failures_s = array("d"), array("d")
        self._seen = 0
        self._errors: Counter[str] = Counter()
        self._backends: Counter[str] = Counter()
        self._by_server = ByServer()
        self._routes = self._tokens = 0
        self._sums = dict.fromkeys(_SERVER_FIELDS, 0)

    def elapsed_s(self) -> float:
        return self._clock() - self._start_s

    def departed(self, planned_s: float, now_s: float) -> None:
        """Open loop: a request leaves now that was meant to leave at planned_s."""
        self.lateness.add(now_s - planned_s)
        self._planned_s, self._left_s = planned_s, now_s

    @property
    def _behind(self) -> Behind | None:
        planned_s, left_s, n = self._planned_s, self._left_s, len(self.lateness)
        if not planned_s or left_s < max(planned_s * _BEHIND, planned_s + _BEHIND_S):
            return None
        return Behind((n - 1) / planned_s, (n - 1) / left_s)

    async def measure(self, answer: Awaitable[ForwardResult], begin_s: float, tokens: int) -> bool:
        """Waits for the answer to a request that left, or was meant to leave, at begin_s; whether there was one."""
        try:
            result = await answer
        except ExpertdError as error:
            self._errors[error.reason] += 1
            self._last_s = self.elapsed_s()
            self._failures_s.append(self._last_s)
            if self._first_failure is None:
                self._first_failure = FirstFailure(self._last_s, f"{error.reason}: {error.message}")
            return False
        self._last_s = self.elapsed_s()
        self._ends_s.append(self._last_s)
        self._latency.add(self._last_s - begin_s)
        self._tokens += tokens
        self._routes += result.routes_computed
        self._backends[result.timing.backend] += 1
        if isinstance(result, ClusterResult):
            self._by_server.add(result.parts)
        for name in _SERVER_FIELDS:
            self._sums[name] += getattr(result.timing, name)
        return True

    def now(self, in_flight: int) -> Now:
        fresh, self._seen = self._latency.summary(self._seen), len(self._latency)
        return Now(self.elapsed_s(), self._seen, len(self._failures_s), in_flight, fresh)

    def report(self, carried: Counter[str]) -> LoadReport:
        n = len(self._latency)
        return LoadReport(
            wall_s=self._last_s,
            answered=n,
            errors=dict(self._errors.most_common()),
            tokens=self._tokens,
            routes_computed=self._routes,
            latency=self._latency.summary(),
            lateness=self.lateness.summary(),
            server=ServerSide(**{name: total / n for name, total in self._sums.items()} if n else {}),
            backends=dict(self._backends.most_common()),
            raw=Raw(self._ends_s, self._latency.values(), self._failures_s),
            by_server=self._by_server.report(),
            transports=dict(carried.most_common()),
            behind=self._behind,
            first_failure=self._first_failure,
        )
