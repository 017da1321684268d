"""Clients of one server, in one event loop: a connection each, below the clients, which watch deadlines themselves.

Here a late answer is to be seen, and its time taken: nothing is given up, and nothing is sent twice.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Iterator, Mapping
from typing import Any

from expertctl.bench.overload.loop import LoopClock
from expertctl.bench.overload.tally import OverloadTally
from expertctl.common.percentiles import Durations
from expertd.errors import ExpertdError, UnavailableError
from expertd_client.exchange.link import Link
from expertd_client.exchange.session import Session
from expertd_client.requests.deadline import Deadline
from expertd_client.requests.request import Request
from expertd_client.requests.result import ForwardResult
from expertd_client.transports.credentials import Credentials
from expertd_client.transports.grpc.aio import AioGrpcTransport
from expertd_client.transports.table import TRANSPORTS

__all__ = ["WAYS", "OverloadClients"]

WAYS: Mapping[str, str] = {
    "streams": "a stream for each caller",
    "one-stream": "all callers on one stream",
    "synthetic": "messages of 60 bytes: the server draws the tensors, and answers with a digest",
    "shm": "shared memory, a session for each caller",
    "tcp": "a framed TCP session for each caller",
    "unary": "a call for each request",
}
_OPEN_S = 30.0
_GRACE_S = 2.0


class OverloadClients:
    """open() before anything else; close() at the end."""

    def __init__(
        self, address: str, way: str, callers: int, clock: LoopClock, credentials: Credentials | None = None
    ) -> None:
        self._clock = clock
        offered = [entry for entry in TRANSPORTS if entry.name == way]
        self._channel = way if offered else ""
        self._transports = [
            AioGrpcTransport(
                address,
                unary=way == "unary",
                credentials=credentials,
                offers=[entry.loop(address, None) for entry in offered],
            )
            for _ in range(1 if way == "one-stream" else callers)
        ]
        self._links: list[Link] = []
        self._ids = itertools.count(1)

    async def open(self) -> None:
        """Raises UnavailableError where the way is not to be had."""
        self._links = [Link(t, lambda load: None) for t in self._transports]
        for link in self._links:
            asked: asyncio.Future[Session] = asyncio.get_running_loop().create_future()
            link.session(_Future(asked))
            agreed = await asyncio.wait_for(asked, _OPEN_S)
            if self._channel and agreed.transport != self._channel:
                why = agreed.refused.get(self._channel, "the session is inline")
                raise UnavailableError(f"{WAYS[self._channel]}: {why}")

    async def close(self) -> None:
        for link in self._links:
            link.close()
        for transport in self._transports:
            transport.close()
            await transport.wait_closed()

    async def closed_loop(
        self, requests: Iterator[Request], in_flight: int, seconds: float, deadline_s: float | None = None
    ) -> tuple[float, Durations]:
        """Answers a second, and how long each took, while so many requests are always under way, over the later three
        quarters of the time."""
        begin_s, took = time.monotonic(), Durations()
        counted_s, end_s = begin_s + seconds / 4, begin_s + seconds

        async def caller(link: Link) -> None:
            while (left_s := time.monotonic()) < end_s:
                done: asyncio.Future[ForwardResult] = asyncio.get_running_loop().create_future()
                deadline = None if deadline_s is None else Deadline(deadline_s, left_s + deadline_s)
                link.forward(next(self._ids), next(requests), deadline, _Future(done))
                (await done).release()
                if counted_s <= (now_s := time.monotonic()) < end_s:
                    took.add(now_s - left_s)

        await asyncio.gather(*(caller(self._links[n % len(self._links)]) for n in range(in_flight)))
        return len(took) / (end_s - counted_s), took

    async def open_loop(
        self, requests: Iterator[Request], rate: float, seconds: float, deadline_s: float | None, seed: int = 0
    ) -> tuple[OverloadTally, float]:
        """Requests leave at the times of a Poisson process, from each caller in turn, whatever became of earlier ones:
        the tally, and for how long they left.  deadline_s: of each, from its leaving; None = none."""
        tally, rng = OverloadTally(), random.Random(seed)
        begin_s, due_s = time.monotonic(), 0.0
        for n in itertools.count():
            due_s += rng.expovariate(rate)
            if due_s >= seconds:
                break
            await asyncio.sleep(max(0.0, begin_s + due_s - time.monotonic()))  # 0: the answers get their turn, too
            if time.monotonic() - begin_s >= seconds:
                break  # this process is behind by so much
            link = self._links[n % len(self._links)]
            left_s = time.monotonic()
            deadline = None if deadline_s is None else Deadline(deadline_s, left_s + deadline_s)
            tally.left(begin_s + due_s, left_s)
            link.forward(next(self._ids), next(requests), deadline, _Sent(tally, self._clock, left_s, deadline))
        wall_s = time.monotonic() - begin_s
        end_s = time.monotonic() + (deadline_s or 0.0) + _GRACE_S
        while tally.open and time.monotonic() < end_s:
            await asyncio.sleep(0.005)
        return tally, wall_s


class _Sent:
    """A Waiter: one request under way."""

    __slots__ = ("_clock", "_end_s", "_left_s", "_tally")

    def __init__(self, tally: OverloadTally, clock: LoopClock, left_s: float, deadline: Deadline | None) -> None:
        self._tally, self._clock, self._left_s = tally, clock, left_s
        self._end_s = float("inf") if deadline is None else deadline.end_s

    def answer(self, value: ForwardResult) -> None:
        value.release()
        self._tally.answered(self._left_s, self._end_s, time.monotonic(), self._clock.since_s)

    def fail(self, error: ExpertdError) -> None:
        self._tally.ended(self._left_s, time.monotonic(), error)


class _Future:
    """A Waiter that an await stands for."""

    __slots__ = ("_future",)

    def __init__(self, future: asyncio.Future[Any]) -> None:
        self._future = future

    def answer(self, value: Any) -> None:
        self._future.set_result(value)

    def fail(self, error: ExpertdError) -> None:
        self._future.set_exception(error)
