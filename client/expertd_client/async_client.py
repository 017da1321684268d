"""AsyncExpertClient: one server, called from one event loop.

async with AsyncExpertClient("127.0.0.1:50051") as experts:
    answers = await asyncio.gather(*(experts.forward(n, x, ids, weights) for n in layers))
"""

from __future__ import annotations

import asyncio
import itertools
from types import TracebackType
from typing import Any, Generic, TypeVar

from expertd.errors import ExpertdError
from expertd.v1 import expert_service_pb2 as pb
from expertd.wire import ForwardResponseView
from expertd_client.call import Call, ForwardResult, Grouped, crowded, expired, make_call, numbered, result_of
from expertd_client.exchange import Exchange
from expertd_client.grpc_aio import AioGrpcTransport
from expertd_client.retry import NEVER, Retry, pause_s
from expertd_client.transport import Transport

__all__ = ["AsyncExpertClient"]

_T = TypeVar("_T")
_Self = TypeVar("_Self", bound="AsyncExpertClient")


class AsyncExpertClient:
    """ExpertClient's twin in an event loop; the arguments are the same.

    A forward() whose task is cancelled takes its request back: the server drops it if its kernel has not begun.
    """

    def __init__(
        self,
        server: str | Transport,
        *,
        timeout_s: float | None = None,
        max_in_flight: int = 256,
        retry: Retry = NEVER,
        unary: bool = False,
    ) -> None:
        self._server = server
        self._unary = unary
        self._timeout_s = timeout_s
        self._retry = retry
        self._ids = itertools.count(1)
        self._slots = asyncio.Semaphore(max_in_flight)
        self._opened: tuple[Transport, Exchange] | None = None

    @property
    def target(self) -> str:
        """The server's address."""
        return self._server if isinstance(self._server, str) else self._server.target

    @property
    def load(self) -> pb.Load | None:
        """What the server last said about its load; None until it did."""
        return self._opened[1].load if self._opened else None

    @property
    def in_flight(self) -> int:
        """Requests that wait for their answer."""
        return self._opened[1].in_flight if self._opened else 0

    async def forward(
        self,
        layer: int,
        hidden_states: Any,
        topk_ids: Any = None,
        topk_weights: Any = None,
        *,
        timeout_s: float | None = None,
        output_dtype: Any = None,
        router_weight_on_input: bool = False,
        digest: bool = False,
        grouped: Grouped | None = None,
        traceparent: str = "",
    ) -> ForwardResult:
        """The routed experts of one layer for one batch: ExpertClient.forward says what each argument is."""
        call = make_call(
            layer,
            hidden_states,
            topk_ids,
            topk_weights,
            timeout_s=self._timeout_s if timeout_s is None else timeout_s,
            output_dtype=output_dtype,
            router_weight_on_input=router_weight_on_input,
            digest=digest,
            grouped=grouped,
            traceparent=traceparent,
        )
        for attempt in itertools.count(1):
            try:
                return await self._once(call)
            except ExpertdError as error:
                pause = pause_s(self._retry, error, attempt, call.left_s())
                if pause is None:
                    raise
            await asyncio.sleep(pause)
        raise AssertionError("unreachable: pause_s ends the loop")

    async def describe(
        self, *, include_decisions: bool = False, timeout_s: float = 10.0, wait_for_ready: bool = False
    ) -> pb.DescribeResponse:
        """What the server holds, accepts and chose.  wait_for_ready: keep trying to connect until the time is over."""
        answer: _Promise[pb.DescribeResponse] = _Promise()
        request = pb.DescribeRequest(include_decisions=include_decisions)
        self._open()[0].describe(request, timeout_s, wait_for_ready, answer)
        return await answer.future

    async def close(self) -> None:
        """Fails what is in flight with RequestCancelledError and gives back the connection."""
        if self._opened is None:
            return
        transport, exchange = self._opened
        exchange.close()
        transport.close()
        if isinstance(transport, AioGrpcTransport):
            await transport.wait_closed()

    async def __aenter__(self: _Self) -> _Self:
        self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _open(self) -> tuple[Transport, Exchange]:
        """Transport and exchange; made in the loop that uses them, not where the client was."""
        if self._opened is None:
            server = self._server
            transport = AioGrpcTransport(server, unary=self._unary) if isinstance(server, str) else server
            self._opened = (transport, Exchange(transport))
        return self._opened

    async def _once(self, call: Call) -> ForwardResult:
        _, exchange = self._open()
        await self._take_slot(call)
        answer: _Promise[ForwardResponseView] = _Promise()
        timer: asyncio.TimerHandle | None = None
        request = numbered(call, next(self._ids))
        try:
            exchange.submit(request, answer)
            left_s = call.left_s()
            if left_s is not None:
                late = expired(call, request.request_id)
                timer = asyncio.get_running_loop().call_later(left_s, answer.fail, late)
            return result_of(await answer.future, call)
        finally:
            if timer is not None:
                timer.cancel()
            self._slots.release()
            exchange.cancel(request.request_id)  # expired or abandoned; it does nothing to a request that has ended

    async def _take_slot(self, call: Call) -> None:
        left_s = call.left_s()
        if left_s is None or not self._slots.locked():
            await self._slots.acquire()
            return
        try:
            await asyncio.wait_for(self._slots.acquire(), left_s)
        except asyncio.TimeoutError:
            raise crowded(call) from None


class _Promise(Generic[_T]):
    """A future of the running loop that a transport can fill; what comes after its end is dropped."""

    def __init__(self) -> None:
        self.future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()

    def answer(self, value: _T) -> None:
        if not self.future.done():
            self.future.set_result(value)

    def fail(self, error: ExpertdError) -> None:
        if not self.future.done():
            self.future.set_exception(error)
