"""Virtual time, and servers in it."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable

from expertctl.simulation.service import Service
from expertd.errors import DeadlineExceededError, ExpertdError, UnavailableError
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.cluster.sub_request import Attempt
from expertd_client.requests.deadline import Deadline
from expertd_client.requests.request import Request
from expertd_client.requests.result import ForwardResult

__all__ = ["SimulatedExchange", "SimulatedServer", "World"]


class World:
    """A clock that stands while functions run, and then goes to the next one's time.  A cluster's timer, too."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()

    def clock(self) -> float:
        return self.now_s

    def at(self, when_s: float, call: Callable[[], object]) -> None:
        """Calls it then; infinite = never."""
        if when_s < float("inf"):
            heapq.heappush(self._due, (when_s, next(self._numbers), call))

    def close(self) -> None:
        """Nothing happens any more."""
        self._due.clear()

    def run(self, over: Callable[[], bool]) -> None:
        """Until it is over, or nothing is left to happen."""
        while self._due and not over():
            self.now_s, _, call = heapq.heappop(self._due)
            call()


class _Part:
    """A request at one server."""

    __slots__ = ("arrived_s", "exchange", "number", "recalled_s", "routes", "tokens")

    def __init__(self, exchange: SimulatedExchange, number: int, tokens: int, routes: int) -> None:
        self.exchange = exchange
        self.number = number
        self.tokens = tokens
        self.routes = routes
        self.arrived_s = 0.0
        self.recalled_s = float("inf")


class SimulatedServer:
    """Takes all that waits for one batch, up to max_tokens, computes it, and takes what came meanwhile.

    computed   parts that were begun
    """

    def __init__(self, world: World, service: Service, describes: pb.DescribeResponse, rng: random.Random) -> None:
        self.up = True
        self.computed = 0
        self._world = world
        self._service = service
        self._describes = describes
        self._rng = rng
        self._queue: deque[_Part] = deque()
        self._batch: list[_Part] = []
        self._life = 0
        self._hung_until_s = 0.0
        self._token_s = 0.0

    @property
    def hangs(self) -> bool:
        return self._world.now_s < self._hung_until_s

    def describe(self) -> pb.DescribeResponse:
        """What it says of itself."""
        answer = pb.DescribeResponse()
        answer.CopyFrom(self._describes)
        answer.load.CopyFrom(self._load())
        return answer

    def arrive(self, part: _Part) -> None:
        """The part has come."""
        if not self.up:
            self._later(part.exchange.fail, part, UnavailableError("connection refused"))
            return
        part.arrived_s = self._world.now_s
        self._queue.append(part)
        if not self._batch and not self.hangs:
            self._begin()

    def die(self, seconds: float) -> None:
        """With all that it has; it is started again, and up after that time."""
        lost = [*self._batch, *self._queue]
        self._queue.clear()
        self._batch = []
        self._life += 1
        self.up = False
        for part in lost:
            self._later(part.exchange.fail, part, UnavailableError("connection reset"))
        life = self._life
        self._world.at(self._world.now_s + seconds, lambda: self._rise(life))

    def hang(self, seconds: float) -> None:
        """Does nothing for that time, and then what it has."""
        self._hung_until_s = max(self._hung_until_s, self._world.now_s + seconds)
        self._world.at(self._hung_until_s, self._go_on)

    def _rise(self, life: int) -> None:
        if life == self._life:
            self.up, self._hung_until_s = True, 0.0

    def _go_on(self) -> None:
        if self.up and not self.hangs and not self._batch:
            self._begin()

    def _begin(self) -> None:
        batch: list[_Part] = []
        tokens, now_s = 0, self._world.now_s
        while self._queue and (not batch or tokens + self._queue[0].tokens <= self._service.max_tokens):
            part = self._queue.popleft()
            if part.recalled_s > now_s:
                batch.append(part)
                tokens += part.tokens
        self._batch = batch
        if batch:
            self.computed += len(batch)
            late_s = self._service.late_s
            took_s = self._service.batch_s(tokens) + late_s[int(self._rng.random() * len(late_s))]
            life = self._life
            self._world.at(now_s + took_s, lambda: self._finish(life, tokens, now_s, took_s))

    def _finish(self, life: int, tokens: int, begun_s: float, took_s: float) -> None:
        if life != self._life:
            return
        if self.hangs:
            self._world.at(self._hung_until_s, lambda: self._finish(life, tokens, begun_s, took_s))
            return
        batch, self._batch = self._batch, []
        each_s = took_s / tokens
        self._token_s += (each_s - self._token_s) * (0.2 if self._token_s else 1.0)
        load = self._load()
        for part in batch:
            timing = pb.Timing(queue_ns=int(1e9 * (begun_s - part.arrived_s)), kernel_ns=int(1e9 * took_s))
            result = ForwardResult(None, None, part.routes, timing, load)
            self._later(part.exchange.deliver, part, result)
        if self._queue:
            self._begin()

    def _load(self) -> pb.Load:
        queued = sum(part.tokens for part in self._queue)
        return pb.Load(queued_tokens=queued, queued_requests=len(self._queue), token_ns=1e9 * self._token_s)

    def half_s(self) -> float:
        """One way, this time."""
        ways = self._service.ways_s
        return ways[int(self._rng.random() * len(ways))] / 2

    def _later(self, call: Callable[..., None], *arguments: object) -> None:
        """When it has come to the client."""
        self._world.at(self._world.now_s + self.half_s(), lambda: call(*arguments))


class SimulatedExchange:
    """The way to one server, as a cluster's member has it (expertd_client.exchange.exchange).

    A part knows its number alone, not who waits for it: its deadline is remembered until it comes, and would keep a
    call that was answered long ago."""

    def __init__(self, world: World, server: SimulatedServer) -> None:
        self.load: pb.Load | None = None
        self.alive = True  # what comes to a server that is away is refused
        self._world = world
        self._server = server
        self._numbers = itertools.count(1)
        self._pending: dict[int, tuple[_Part, Attempt]] = {}

    def submit(self, request: Request, deadline: Deadline | None, waiter: Attempt) -> int:
        part = _Part(self, next(self._numbers), request.tokens, waiter.sub.part.routes)
        self._pending[part.number] = part, waiter
        self._world.at(self._world.now_s + self._server.half_s(), lambda: self._server.arrive(part))
        if deadline is not None:
            self._world.at(deadline.end_s, lambda: self.fail(part, DeadlineExceededError("no answer in time")))
        return part.number

    def cancel(self, number: int) -> bool:
        pending = self._pending.pop(number, None)
        if pending is None:
            return False
        pending[0].recalled_s = self._world.now_s + self._server.half_s()
        return True

    def deliver(self, part: _Part, result: ForwardResult) -> None:
        if (pending := self._pending.pop(part.number, None)) is not None:
            self.load = result.load
            pending[1].answer(result)

    def fail(self, part: _Part, error: ExpertdError) -> None:
        if (pending := self._pending.pop(part.number, None)) is not None:
            pending[1].fail(error)

    def close(self) -> None:
        """Nothing to give back."""
