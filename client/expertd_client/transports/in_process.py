"""A servicer in this process behind the client's seam: no socket, no gRPC, the same bytes.

For tests that run one body over both, and for a worker that holds some experts itself.  The servicer is anything with
the two methods that grpc.aio would call with bytes; everything here runs in the event loop that made it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine, Sequence
from typing import Any, NoReturn, Protocol

import grpc
import grpc.aio

from expertd.codec import decode_stream_response, encode_stream_request
from expertd.errors import ExpertdError, InternalError, MalformedMessageError, RequestCancelledError, from_status
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.requests.request import Request
from expertd_client.transports.grpc import common
from expertd_client.transports.protocol import Closed, Deliver, MainConnection, SessionTransport, Waiter

__all__ = ["BytesServicer", "ServicerTransport"]


class BytesServicer(Protocol):
    """ExpertService as grpc.aio calls it when no generated class stands between."""

    async def stream_forward(self, request_iterator: Any, context: Any, /) -> None:
        """Reads StreamForwardRequests with `await context.read()`, writes answers with `await context.write(data)`."""
        ...

    async def describe(self, data: bytes, context: Any, /) -> bytes:
        """DescribeRequest -> DescribeResponse.  Every unary RPC is such a method, with the RPC's name in snake_case."""
        ...


class ServicerTransport:
    """`servicer` as a server of AsyncExpertClient, which is then an AsyncForwarder over experts of this process."""

    def __init__(
        self,
        servicer: BytesServicer,
        target: str = "in-process",
        *,
        offers: Sequence[SessionTransport] = (),
    ) -> None:
        self.target = target
        self.offers = offers
        self._servicer = servicer
        self._tasks: set[asyncio.Task[None]] = set()

    def connect(self, deliver: Deliver, closed: Closed) -> MainConnection:
        stream = _Stream(self.target, deliver, closed)
        stream.task = self._start(stream.run(self._servicer))
        return stream

    def unary(
        self, method: str, request: Any, answer: Any, timeout_s: float, wait_for_ready: bool, waiter: Waiter[Any]
    ) -> None:
        del wait_for_ready  # it is there
        call = getattr(self._servicer, re.sub(r"(?<!^)(?=[A-Z])", "_", method).lower())

        async def ask() -> None:
            context = _Context(timeout_s)
            try:
                data = await asyncio.wait_for(call(request.SerializeToString(), context), timeout_s)
                waiter.answer(answer.FromString(data))
            except _AbortError as abort:
                waiter.fail(abort.error)
            except asyncio.TimeoutError:
                waiter.fail(
                    from_status(grpc.StatusCode.DEADLINE_EXCEEDED, f"{self.target}: {method} took too long", ())
                )

        self._start(ask())

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def wait_closed(self) -> None:
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class _AbortError(Exception):
    """The servicer ended the call with a row of the error table."""

    def __init__(self, error: ExpertdError) -> None:
        super().__init__(error.message)
        self.error = error


class _Context:
    """What a servicer uses of grpc.aio.ServicerContext."""

    def __init__(self, timeout_s: float | None = None) -> None:
        self._end_s = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s

    def time_remaining(self) -> float | None:
        return None if self._end_s is None else max(0.0, self._end_s - asyncio.get_running_loop().time())

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def peer(self) -> str:
        return "in-process"

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        raise _AbortError(from_status(code, details, trailing_metadata))


class _Stream(_Context):
    """Both ends of one StreamForward: the context that the servicer reads and writes, the connection that sends."""

    task: asyncio.Task[None]

    def __init__(self, target: str, deliver: Deliver, closed: Closed) -> None:
        super().__init__()
        self._target = target
        self._deliver = deliver
        self._closed = closed
        self._inbox: asyncio.Queue[bytes] = asyncio.Queue()

    def takes(self, request: Request) -> bool:
        return True

    def forward(self, request_id: int, timeout_us: int, request: Request) -> None:
        self._inbox.put_nowait(encode_stream_request(request.view(request_id, timeout_us)))

    def cancel(self, request_id: int) -> None:
        self._inbox.put_nowait(encode_stream_request(pb.CancelRequest(request_id=request_id)))

    def offer(self, offer: pb.SessionOffer) -> None:
        self._inbox.put_nowait(encode_stream_request(offer))

    def close(self) -> None:
        self.task.cancel()

    async def read(self) -> bytes:
        return await self._inbox.get()

    async def write(self, data: bytes) -> None:
        message = decode_stream_response(data)
        if message is not None:
            self._deliver(message)

    async def run(self, servicer: BytesServicer) -> None:
        error: ExpertdError = common.stream_ended(None, self._target, closing=False)
        try:
            await servicer.stream_forward(None, self)
        except _AbortError as abort:
            error = abort.error
        except asyncio.CancelledError:
            error = RequestCancelledError(f"{self._target}: this client was closed before the answer came")
        except MalformedMessageError as bad:
            error = common.bad_answer(bad, self._target)
        except Exception as fault:
            error = InternalError(f"{self._target}: the servicer raised {type(fault).__name__}: {fault}")
            error.__cause__ = fault
        finally:
            self._closed(error)
