"""expertd.v1.ExpertService on grpc.aio: bytes in, bytes out, without the generated servicer."""

from __future__ import annotations

import asyncio
import time
from typing import Any, NoReturn

import grpc

from expertd.errors import ExpertdError
from expertd.v1 import expert_service_pb2 as pb
from expertd.wire import ForwardRequestView, decode_forward_request, encode_forward_response
from expertd_server.engine.request import Outcome, Request
from expertd_server.service.service import Service, error_of, response_view
from expertd_server.transports.grpc_stream import Stream
from expertd_server.views.metrics import SERVICE, Rpc

__all__ = ["Servicer"]

_Future = asyncio.Future  # of bytes


class Servicer:
    """The three methods; `handler()` registers them."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._forward = Rpc(service.metrics, "unary", "Forward")
        self._stream = Rpc(service.metrics, "bidi_stream", "StreamForward")
        self._describe = Rpc(service.metrics, "unary", "Describe")

    def handler(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Forward": grpc.unary_unary_rpc_method_handler(self.forward),
                "StreamForward": grpc.stream_stream_rpc_method_handler(self.stream_forward),
                "Describe": grpc.unary_unary_rpc_method_handler(self.describe),
            },
        )

    async def forward(self, data: bytes, context: Any) -> bytes:
        """ForwardRequest -> ForwardResponse."""
        start_ns = time.monotonic_ns()
        with _Call(self._service, self._forward) as call:
            self._forward.received()
            try:
                out = await self._compute(data, start_ns, context.time_remaining())
            except Exception as e:
                error = error_of(e, "Forward")
                self._service.metrics.answered(error.code.name, error.reason)
                await call.abort(context, error)
            self._service.metrics.answered()
            self._service.metrics.bytes_out(len(out))
            self._forward.sent()
            return out

    async def stream_forward(self, _: Any, context: Any) -> None:
        """stream StreamForwardRequest -> stream StreamForwardResponse."""
        with _Call(self._service, self._stream) as call:
            try:
                await Stream(self._service, self._stream, context).run()
            except Exception as e:
                await call.abort(context, error_of(e, "StreamForward"))

    async def describe(self, data: bytes, context: Any) -> bytes:
        """DescribeRequest -> DescribeResponse."""
        with _Call(self._service, self._describe) as call:
            self._describe.received()
            try:
                out = self._answer_describe(data)
            except Exception as e:
                await call.abort(context, error_of(e, "Describe"))
            self._describe.sent()
            return out

    def _answer_describe(self, data: bytes) -> bytes:
        from google.protobuf.message import DecodeError

        from expertd.errors import MalformedMessageError, NotReadyError

        try:
            request = pb.DescribeRequest.FromString(data)
        except DecodeError as e:
            raise MalformedMessageError(f"message: {e}; want a DescribeRequest") from e
        if self._service.describe is None:
            raise NotReadyError("server: it loads and checks its weights; wait until its health is SERVING")
        return self._service.describe(request.include_decisions).SerializeToString()

    async def _compute(self, data: bytes, start_ns: int, remaining_s: float | None) -> bytes:
        service = self._service
        service.check_size(data)
        engine, intake = service.admit()
        v = decode_forward_request(data)
        p = await service.check_drawn(v) if service.draws_much(v) else intake.check(v)
        if p.tokens == 0:
            return encode_forward_response(service.empty_response(p, v.request_id))
        done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        hidden_size = intake.layers[p.layer].hidden_size
        decode_ns = time.monotonic_ns() - start_ns

        def reply(r: Request, outcome: Outcome) -> None:  # on the engine's thread, where the output still stands
            if isinstance(outcome, ExpertdError):
                service.mailbox.post(_fail, done, outcome)
            else:
                view = response_view(r, outcome, v.request_id, hidden_size, decode_ns, service.load_message())
                service.mailbox.post(_finish, done, encode_forward_response(view))

        request = service.request(p, start_ns, _timeout_ns(v, remaining_s), reply, None)
        try:
            engine.submit(request)
            return await done
        finally:
            request.cancelled = True  # tells the engine when the caller went away; after an answer nobody looks


def _timeout_ns(v: ForwardRequestView, remaining_s: float | None) -> int:
    """The nearer of the call's deadline and the message's timeout; 0 = none of both."""
    limits = [v.timeout_us * 1000] if v.timeout_us else []
    if remaining_s is not None:
        limits.append(max(1, int(remaining_s * 1e9)))
    return min(limits, default=0)


def _finish(done: asyncio.Future[bytes], data: bytes) -> None:
    if not done.done():
        done.set_result(data)


def _fail(done: asyncio.Future[bytes], error: ExpertdError) -> None:
    if not done.done():
        done.set_exception(error)


class _Call:
    """Counts one RPC, from begin to end."""

    def __init__(self, service: Service, rpc: Rpc) -> None:
        self._service, self._rpc = service, rpc
        self._code = "OK"

    def __enter__(self) -> _Call:
        self._service.open_calls += 1
        self._service.calls_begun += 1
        self._start = time.perf_counter()
        self._rpc.started()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._service.open_calls -= 1
        if kind is not None and self._code == "OK":
            self._code = "CANCELLED" if issubclass(kind, asyncio.CancelledError) else "UNKNOWN"
        self._rpc.finished(self._code)
        self._rpc.seconds(time.perf_counter() - self._start)

    async def abort(self, context: Any, error: ExpertdError) -> NoReturn:
        """End the RPC with `error`."""
        self._code = error.code.name
        await context.abort(error.code.grpc, error.message, error.to_trailing_metadata())
        raise AssertionError("abort() raises")
