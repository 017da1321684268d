"""gRPC for AsyncExpertClient: grpc.aio, a task that reads the stream, another while there is something to write.

Everything here runs in the event loop that made it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import grpc
import grpc.aio

from expertd.codec import (
    AnswerReader,
    decode_forward_response,
    encode_forward_request,
    encode_stream_request,
)
from expertd.common.begun import begin
from expertd.errors import ExpertdError, InternalError, InvalidRequestError, UnavailableError
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.requests.request import Request
from expertd_client.transports.address import reach
from expertd_client.transports.credentials import Credentials, Rotating
from expertd_client.transports.grpc import common
from expertd_client.transports.protocol import Closed, Deliver, MainConnection, SessionTransport, Waiter, no_session

__all__ = ["AioGrpcTransport"]


class AioGrpcTransport:
    """GrpcTransport's twin in an event loop; the arguments are the same."""

    def __init__(
        self,
        target: str,
        *,
        unary: bool = False,
        credentials: Credentials | None = None,
        options: common.ChannelOptions = (),
        offers: Sequence[SessionTransport] = (),
    ) -> None:
        target, credentials = reach(target, credentials)
        self.target = target
        self.offers = () if unary else offers
        self._unary = unary
        self._tasks = _Tasks()

        def open_(secure: grpc.ChannelCredentials | None, more: list[tuple[str, Any]]) -> Any:
            opts = common.channel_options((*more, *options))
            if secure is None:
                return grpc.aio.insecure_channel(target, opts)
            return grpc.aio.secure_channel(target, secure, opts)

        self._channels = Rotating(credentials, open_, self._close)

    def connect(self, deliver: Deliver, closed: Closed) -> MainConnection:
        if self._unary:
            return _Calls(lambda: self._channels.now().forward, self.target, self._tasks, deliver, closed)
        methods = self._channels.now()
        methods.streams += 1

        def over(error: ExpertdError) -> None:
            methods.streams -= 1
            closed(error)

        return _Stream(methods.stream_forward(), self.target, self._tasks, deliver, over)

    def unary(
        self, method: str, request: Any, answer: Any, timeout_s: float, wait_for_ready: bool, waiter: Waiter[Any]
    ) -> None:
        async def ask() -> None:
            call = self._channels.now().unary(common.path(method), request, answer)
            try:
                got = await call(request, timeout=timeout_s, wait_for_ready=wait_for_ready)
            except grpc.RpcError as error:
                waiter.fail(common.call_failed(error, self.target))
            else:
                waiter.answer(got)

        self._tasks.start(ask())

    def close(self) -> None:
        self._channels.close()

    def _close(self, channel: Any) -> None:
        self._tasks.start(channel.close())

    async def wait_closed(self) -> None:
        """Returns when channel and tasks are gone."""
        await self._tasks.wait()


class _Tasks:
    """The tasks of one transport: kept from the garbage collector, and waited for at its end."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def wait(self) -> None:
        while self._running:
            await asyncio.wait(list(self._running))


class _Stream:
    """StreamForward.  gRPC takes one write at a time, so messages wait in an outbox while one is under way."""

    def __init__(self, call: Any, target: str, tasks: _Tasks, deliver: Deliver, closed: Closed) -> None:
        self._call = call
        self._target = target
        self._tasks = tasks
        self._deliver = deliver
        self._closed = closed
        self._closing = False
        self._writing = False
        self._outbox: deque[bytes] = deque()
        tasks.start(self._read())

    def takes(self, request: Request) -> bool:
        return True

    def forward(self, request_id: int, timeout_us: int, request: Request) -> None:
        self._send(request.message(request_id, timeout_us, common.now_us()))

    def cancel(self, request_id: int) -> None:
        self._send(encode_stream_request(pb.CancelRequest(request_id=request_id)))

    def offer(self, offer: pb.SessionOffer) -> None:
        self._send(encode_stream_request(offer))

    def _send(self, data: bytes) -> None:
        self._outbox.append(data)
        if not self._writing:
            self._writing = True
            begin(self._write())

    def close(self) -> None:
        self._closing = True
        self._call.cancel()

    async def _write(self) -> None:
        try:
            while self._outbox:
                await self._call.write(self._outbox.popleft())
        except (grpc.RpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            self._outbox.clear()  # the stream is over: the reader gets to know why, and says so
        finally:
            self._writing = False

    async def _read(self) -> None:
        error: ExpertdError = InternalError(f"{self._target}: the task that reads the stream died")
        answers = AnswerReader()
        try:
            while (data := await self._call.read()) is not grpc.aio.EOF:
                message = answers.read(data)
                if message is not None:  # None: of a kind that only a newer client asks for
                    self._deliver(message)
            error = common.stream_ended(None, self._target, self._closing)
        except grpc.RpcError as broken:  # also where the status is not OK at the end
            error = common.stream_ended(broken, self._target, self._closing)
            if common.hidden_status(broken):
                error = UnavailableError(f"{self._target}: the stream ended while a message was written; send again")
        except asyncio.CancelledError:
            error = common.stream_ended(None, self._target, closing=True)
        except InvalidRequestError as bad:
            self._call.cancel()
            error = common.bad_answer(bad, self._target)
        finally:
            self._closed(error)


class _Calls:
    """Forward: a unary call for each request, as many at once as there are."""

    def __init__(
        self, forward: Callable[[], Any], target: str, tasks: _Tasks, deliver: Deliver, closed: Closed
    ) -> None:
        self._forward = forward
        self._target = target
        self._tasks = tasks
        self._deliver = deliver
        self._closed = closed
        self._calls: dict[int, Any] = {}

    def takes(self, request: Request) -> bool:
        return True

    def forward(self, request_id: int, timeout_us: int, request: Request) -> None:
        data = encode_forward_request(request.view(request_id, timeout_us))
        call = self._forward()(data, timeout=common.unary_timeout_s(timeout_us))
        self._calls[request_id] = call
        self._tasks.start(self._finish(request_id, call))

    def cancel(self, request_id: int) -> None:
        call = self._calls.get(request_id)
        if call is not None:
            call.cancel()

    def offer(self, offer: pb.SessionOffer) -> None:
        self._deliver(no_session(offer, common.UNARY))

    def close(self) -> None:
        for call in list(self._calls.values()):
            call.cancel()
        self._closed(common.stream_ended(None, self._target, closing=True))

    async def _finish(self, request_id: int, call: Any) -> None:
        try:
            answer = decode_forward_response(await call)
            answer.request_id = request_id
            self._deliver(answer)
        except asyncio.CancelledError:
            return  # by this client, which waits for no answer
        except grpc.RpcError as error:
            self._deliver(common.call_failed(error, self._target).to_request_error(request_id))
        except InvalidRequestError as error:
            self._deliver(common.bad_answer(error, self._target).to_request_error(request_id))
        finally:
            self._calls.pop(request_id, None)
