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
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, fields
from itertools import count
from typing import TypeVar

from expertd.errors import ExpertdError
from expertd_client.percentiles import Durations, Summary
from expertd_client.request import Request
from expertd_client.result import ForwardResult

__all__ = ["LoadPlan", "LoadReport", "Send", "ServerSide", "departures", "run_load"]

_T = TypeVar("_T")

Send = Callable[[Request, int], Awaitable[ForwardResult]]
"""Sends a request; the number spreads requests over connections (modulo how many there are)."""

_FAILURE_PAUSE_S = 0.01
"""After a failed request a caller of the closed loop waits this long: a server that is gone is not asked at full
speed."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What to send, and when to stop; `requests` and `duration_s` bound the run together, and one must be given.

    tokens        M of each request
    concurrency   closed loop: callers
    rate          open loop: requests a second; None = closed loop
    poisson       open loop: exponential gaps instead of equal ones
    requests      most requests to send
    duration_s    no request leaves later than this
    warmup        requests sent before, one after the other, and not counted
    seed          of the Poisson process
    """

    tokens: int
    concurrency: int = 1
    rate: float | None = None
    poisson: bool = True
    requests: int | None = None
    duration_s: float | None = None
    warmup: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (("rate", self.rate), ("requests", self.requests), ("duration_s", self.duration_s)):
            if value is not None and not value > 0:
                raise ValueError(f"{name}: got {value}, want > 0")
        if self.requests is None and self.duration_s is None:
            raise ValueError("load: got no bound, want requests, duration_s or both")
        if self.concurrency < 1 or self.tokens < 0 or self.warmup < 0:
            got = f"concurrency {self.concurrency}, tokens {self.tokens}, warmup {self.warmup}"
            raise ValueError(f"load: got {got}, want concurrency >= 1 and the others >= 0")


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
class LoadReport:
    """What came of a run.

    wall_s            from the first departure to the last answer
    answered, failed  requests; errors: failed ones by reason
    routes_computed   over all answers
    latency           of the answered ones
    lateness          open loop: how long after its time a request left this generator
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

    @property
    def failed(self) -> int:
        return sum(self.errors.values())

    @property
    def requests_per_s(self) -> float:
        return self.answered / self.wall_s if self.wall_s else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s if self.wall_s else 0.0


def departures(plan: LoadPlan) -> Iterator[float]:
    """Open loop: seconds after the start at which each request is meant to leave, as many as the plan allows."""
    assert plan.rate is not None
    rng = random.Random(plan.seed)
    at_s = 0.0
    for n in count():
        if plan.requests is not None and n >= plan.requests:
            return
        if plan.duration_s is not None and at_s >= plan.duration_s:
            return
        yield at_s
        at_s = at_s + rng.expovariate(plan.rate) if plan.poisson else (n + 1) / plan.rate


async def run_load(plan: LoadPlan, requests: Iterator[Request], send: Send) -> LoadReport:
    """Runs the plan.  Errors of the table are counted; any other exception ends the run and is raised."""
    for n in range(plan.warmup):
        await send(next(requests), n)
    tally = _Tally(asyncio.get_running_loop().time)
    async with _Flock() as flock:
        if plan.rate is None:
            _start_callers(plan, requests, send, tally, flock)
        else:
            await _depart(plan, requests, send, tally, flock)
    return tally.report(plan)


def _start_callers(plan: LoadPlan, requests: Iterator[Request], send: Send, tally: _Tally, flock: _Flock) -> None:
    numbers = iter(range(plan.requests)) if plan.requests is not None else count()

    async def caller(connection: int) -> None:
        for _ in numbers:
            begin_s = tally.elapsed_s()
            if plan.duration_s is not None and begin_s >= plan.duration_s:
                return
            if not await tally.measure(send(next(requests), connection), begin_s):
                await asyncio.sleep(_FAILURE_PAUSE_S)

    for n in range(plan.concurrency):
        flock.start(caller(n))


async def _depart(plan: LoadPlan, requests: Iterator[Request], send: Send, tally: _Tally, flock: _Flock) -> None:
    for number, at_s in enumerate(departures(plan)):
        await asyncio.sleep(max(0.0, at_s - tally.elapsed_s()))  # 0: the answers get their turn, too
        if flock.fault is not None:
            return
        tally.lateness.add(tally.elapsed_s() - at_s)
        flock.start(tally.measure(send(next(requests), number), at_s))


class _Flock:
    """Tasks that are waited for together: until all are done, or until one raises; then the rest is cancelled."""

    def __init__(self) -> None:
        self.fault: BaseException | None = None
        self._tasks: set[asyncio.Task[object]] = set()

    def start(self, work: Coroutine[object, object, object]) -> None:
        task: asyncio.Task[object] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

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
        self._latency = Durations()
        self._errors: Counter[str] = Counter()
        self._backends: Counter[str] = Counter()
        self._routes = 0
        self._sums = dict.fromkeys(_SERVER_FIELDS, 0)

    def elapsed_s(self) -> float:
        return self._clock() - self._start_s

    async def measure(self, answer: Awaitable[ForwardResult], begin_s: float) -> bool:
        """Waits for the answer to a request that left, or was meant to leave, at begin_s; whether there was one."""
        try:
            result = await answer
        except ExpertdError as error:
            self._errors[error.reason] += 1
            return False
        finally:
            self._last_s = self.elapsed_s()
        self._latency.add(self._last_s - begin_s)
        self._routes += result.routes_computed
        self._backends[result.timing.backend] += 1
        for name in _SERVER_FIELDS:
            self._sums[name] += getattr(result.timing, name)
        return True

    def report(self, plan: LoadPlan) -> LoadReport:
        n = len(self._latency)
        return LoadReport(
            wall_s=self._last_s,
            answered=n,
            errors=dict(self._errors.most_common()),
            tokens=n * plan.tokens,
            routes_computed=self._routes,
            latency=self._latency.summary(),
            lateness=self.lateness.summary(),
            server=ServerSide(**{name: total / n for name, total in self._sums.items()} if n else {}),
            backends=dict(self._backends.most_common()),
        )
