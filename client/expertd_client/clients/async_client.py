"""AsyncExpertClient: one server, called from one event loop.

async with AsyncExpertClient("127.0.0.1:50051") as experts:
    answers = await asyncio.gather(*(experts.forward(n, x, ids, weights) for n in layers))
"""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Generic, TypeVar

from expertd.errors import ExpertdError
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.clients.forwarder import AsyncForwarder
from expertd_client.clients.turns import LoopTurns
from expertd_client.exchange.exchange import Exchange
from expertd_client.exchange.session import Session, unanswered
from expertd_client.requests.deadline import Deadline, LoopAlarm, deadline_in
from expertd_client.requests.e4m3 import asked_for, taken
from expertd_client.requests.request import Request
from expertd_client.requests.result import ForwardResult
from expertd_client.requests.retry import NEVER, Retry, pause_s
from expertd_client.tracing import recorder
from expertd_client.transports.address import parse_address
from expertd_client.transports.credentials import Credentials
from expertd_client.transports.grpc.aio import AioGrpcTransport
from expertd_client.transports.protocol import Transport
from expertd_client.transports.table import loop_transports

if TYPE_CHECKING:
    from expertd_client.device.session import DeviceSession

__all__ = ["AsyncExpertClient"]

_T = TypeVar("_T")
_DESCRIBE_S = 10.0
_Self = TypeVar("_Self", bound="AsyncExpertClient")


class AsyncExpertClient(AsyncForwarder):
    """ExpertClient's twin in an event loop; the arguments are the same."""

    def __init__(
        self,
        server: str | Transport,
        *,
        timeout_s: float | None = None,
        max_in_flight: int = 256,
        retry: Retry = NEVER,
        unary: bool = False,
        credentials: Credentials | None = None,
        wire_dtype: str | None = None,
    ) -> None:
        self._server = server
        self._target = parse_address(server).target if isinstance(server, str) else server.target
        self._unary, self._credentials = unary, credentials
        self._timeout_s = timeout_s
        self._retry = retry
        self._quantizes = asked_for(wire_dtype)
        self._taken: bool | None = None
        self._turns = LoopTurns(max_in_flight)
        self._opened: tuple[Transport, Exchange] | None = None

    @property
    def target(self) -> str:
        """The server's address."""
        return self._target

    @property
    def load(self) -> pb.Load | None:
        """What the server last said about its load; None until it did."""
        return self._opened[1].load if self._opened else None

    @property
    def in_flight(self) -> int:
        """Requests that wait for their answer."""
        return self._opened[1].in_flight if self._opened else 0

    async def forward_request(self, request: Request, *, timeout_s: float | None = None) -> ForwardResult:
        deadline = deadline_in(self._timeout_s if timeout_s is None else timeout_s)
        for attempt in itertools.count(1):
            try:
                if self._quantizes:
                    request = await self._as_it_travels(request, deadline)
                return await self._once(request, deadline)
            except ExpertdError as error:
                pause = pause_s(self._retry, error, attempt, None if deadline is None else deadline.left_s())
                if pause is None:
                    raise
            await asyncio.sleep(pause)
        raise AssertionError("unreachable: pause_s ends the loop")

    async def describe(
        self, *, include_decisions: bool = False, timeout_s: float = 10.0, wait_for_ready: bool = False
    ) -> pb.DescribeResponse:
        """What the server holds, accepts and chose.  wait_for_ready: keep trying to connect until the time is over."""
        answer: _Reply[pb.DescribeResponse] = _Reply()
        request = pb.DescribeRequest(include_decisions=include_decisions)
        transport, exchange = self._open()
        transport.unary("Describe", request, pb.DescribeResponse, timeout_s, wait_for_ready, answer)
        described = await answer.future
        exchange.most_tokens = described.limits.max_tokens
        return described

    async def session(self, *, timeout_s: float = 10.0) -> Session:
        """How messages travel: the transport that this client and the server agreed on, and why not another one.
        Connects if need be, and waits for the agreement."""
        answer: _Reply[Session] = _Reply()
        self._open()[1].session(answer)
        try:
            return await asyncio.wait_for(answer.future, timeout_s)
        except asyncio.TimeoutError:
            raise unanswered(self.target, timeout_s) from None

    async def device_session(
        self, device: int | str = "cuda", *, same_gpu: bool = False, timeout_s: float = 10.0
    ) -> DeviceSession:
        """As ExpertClient's: what it gives is called without waiting, so it has no twin.  (Its first call of a layer, a
        shape and types asks the server, a few hundred microseconds.)"""
        from expertd_client.device.cuda_ipc import await_session, device_index

        return await await_session(self._open()[0], device_index(device), same_gpu=same_gpu, timeout_s=timeout_s)

    async def close(self) -> None:
        if self._opened is None:
            return
        transport, exchange = self._opened
        exchange.close()
        transport.close()
        await transport.wait_closed()

    async def __aenter__(self: _Self) -> _Self:
        self._open()
        return self

    def _open(self) -> tuple[Transport, Exchange]:
        """Transport and exchange; made in the loop that uses them, not where the client was."""
        if self._opened is None:
            server = self._server
            transport: Transport = (
                AioGrpcTransport(
                    server,
                    unary=self._unary,
                    credentials=self._credentials,
                    offers=loop_transports(server, self._credentials),
                )
                if isinstance(server, str)
                else server
            )
            self._opened = (transport, Exchange(transport, LoopAlarm))
        return self._opened

    async def _as_it_travels(self, request: Request, deadline: Deadline | None) -> Request:
        """As ExpertClient's."""
        if self._taken is None:
            self._taken = taken(await self.describe(timeout_s=_DESCRIBE_S if deadline is None else deadline.left_s()))
        return request.quantized() if self._taken else request

    async def _once(self, request: Request, deadline: Deadline | None) -> ForwardResult:
        _, exchange = self._opened or self._open()
        traced = (now := recorder.active) and now.single(request, self.target)
        if self._turns.free:
            self._turns.free -= 1
        else:
            await self._wait_for_turn(request, deadline)
        answer = _Answer()
        request_id = 0
        try:
            request_id = exchange.submit(request, deadline, answer)
            if traced is None:
                return await answer.future
            traced.parts[-1].sent(exchange.transport_name)
            result = await answer.future
            traced.parts[-1].answered(result.timing)
            traced.end()
            return result
        except BaseException:
            exchange.cancel(request_id)  # abandoned; it does nothing to a request that has ended
            raise
        finally:
            self._turns.release()

    async def _wait_for_turn(self, request: Request, deadline: Deadline | None) -> None:
        try:
            await asyncio.wait_for(self._turns.wait(), None if deadline is None else deadline.left_s())
        except asyncio.TimeoutError:
            assert deadline is not None
            raise deadline.crowded(request.layer) from None


class _Reply(Generic[_T]):
    """A future of the running loop that a transport can fill; what comes after its end is dropped."""

    __slots__ = ("future",)

    def __init__(self) -> None:
        self.future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()

    def answer(self, value: _T) -> None:
        if not self.future.done():
            self.future.set_result(value)

    def fail(self, error: ExpertdError) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class _Answer(_Reply[ForwardResult]):
    """That of a forward, whose memory goes back where nobody waits any more."""

    __slots__ = ()

    def answer(self, value: ForwardResult) -> None:
        if self.future.done():
            value.release()
        else:
            self.future.set_result(value)
