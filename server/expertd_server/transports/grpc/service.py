"""expertd.v1.ExpertService on grpc.aio: bytes in, bytes out, without the generated servicer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from expertd.codec import ForwardRequestView, decode_forward_request, encode_forward_response
from expertd.common import bounds
from expertd.errors import ExpertdError, MalformedMessageError, TooManyRequestsError, UnavailableError
from expertd.v1 import expert_service_pb2 as pb
from expertd_server.engine.admission import fits
from expertd_server.engine.report import RequestReport
from expertd_server.engine.request import Answer, EngineRequest, Outcome
from expertd_server.service.access import CALL, DESCRIBE
from expertd_server.service.refusals import REQUEST_ID, request_id_of, traceparent_of
from expertd_server.service.response import error_of, response_view
from expertd_server.transports.grpc.disconnects import has_left
from expertd_server.transports.grpc.loop_thread import OnLoop
from expertd_server.transports.grpc.stream import Stream
from expertd_server.transports.security import Gate
from expertd_server.views.call_metrics import SERVICE, Rpc

if TYPE_CHECKING:
    from expertd_server.service.service import Service

__all__ = ["Servicer"]

log = logging.getLogger(__name__)


class Servicer:
    """The three methods; `handler()` registers them.  Made on the event loop that calls them.

    open_calls, calls_begun: RPCs now and ever; max_unary: open Forward calls of one caller where nobody else has any
    """

    def __init__(self, service: Service, gate: Gate | None = None) -> None:
        self._service, self._gate = service, gate or Gate(None)
        self._on_loop = OnLoop()
        self.open_calls = 0
        self.calls_begun = 0
        self._streams: set[Stream] = set()
        self._unary: Counter[str] = Counter()
        self.max_unary = 1024
        self._forward = Rpc(service.metrics.calls, "unary", "Forward")
        self._stream = Rpc(service.metrics.calls, "bidi_stream", "StreamForward")
        self._describe = Rpc(service.metrics.calls, "unary", "Describe")

    def cut_off_the_silent(self, unread_s: float, idle_s: float) -> None:
        """End the streams whose caller has read nothing for unread_s although there is something to read, and those on
        which nothing has come or gone for idle_s, and whatever belongs to a caller who is let in no more."""
        now = time.monotonic()
        for stream in list(self._streams):
            if stream.unread_s(now) > unread_s:
                log.warning("closing a stream: its client has read nothing for %.0f s", stream.unread_s(now))
                stream.cut_off()
            elif (refusal := self._gate.refusal(stream.caller)) is not None:
                stream.retire(refusal)
            elif stream.idle_s(now) > idle_s:
                stream.retire(UnavailableError("stream: nothing came for long, so it was closed; open another one"))
        if self._gate.guards:
            for listener in self._service.offered.values():
                if not isinstance(listener, str):
                    listener.dismiss(lambda caller: self._gate.refusal(caller) is not None)

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
        load = self._service.load_message

        def encode(r: EngineRequest, a: Answer) -> bytes:
            return encode_forward_response(response_view(r, a, load()))

        return await self.compute(self._forward, data, context, CALL, decode_forward_request, encode)

    async def compute(
        self,
        rpc: Rpc,
        data: bytes,
        context: Any,
        right: str,
        decode: Callable[[bytes], ForwardRequestView],
        encode: Callable[[EngineRequest, Answer], bytes],
    ) -> bytes:
        """One request as a call of its own, in whatever protocol.  decode raises what refuses it; encode: on the
        thread that hands the answer out."""
        with _Counted(self, rpc) as call:
            rpc.received()
            call.bytes_in = len(data)
            caller = ""
            try:
                caller = self._gate.admit(context, right)
                self._enter(caller)
                try:
                    out = await self._compute(call, data, context, caller, decode, encode)
                finally:
                    self._unary[caller] -= 1
                    if not self._unary[caller]:
                        del self._unary[caller]
            except Exception as e:
                error = error_of(e, rpc.method)
                given = request_id_of(context.invocation_metadata())
                told = self._service.refused(error, caller or self._gate.name_of(context), given)
                await call.abort(context, error, told or given)
            self._service.metrics.answered()
            self._service.metrics.bytes_out(len(out))
            rpc.sent()
            call.bytes_out = len(out)
            return out

    async def stream_forward(self, _: Any, context: Any) -> None:
        """stream StreamForwardRequest -> stream StreamForwardResponse."""
        with _Counted(self, self._stream) as call:
            try:
                caller = self._gate.admit(context, CALL)
                stream = Stream(self._service, self._on_loop, self._stream, context, caller)
                self._streams.add(stream)
                try:
                    await stream.run()
                finally:
                    self._streams.discard(stream)
                    call.bytes_in, call.bytes_out = stream.bytes_in, stream.bytes_out
            except Exception as e:
                if has_left(e):
                    raise  # to gRPC, as where an answer cannot be sent
                await call.abort(context, self._ended(error_of(e, "StreamForward"), context))

    async def describe(self, data: bytes, context: Any) -> bytes:
        """DescribeRequest -> DescribeResponse."""
        return await self.tell(self._describe, data, context, DESCRIBE, self._answer_describe)

    async def tell(self, rpc: Rpc, data: bytes, context: Any, right: str, answer: Callable[[bytes], bytes]) -> bytes:
        """A call that is no request: answer(), for those who may.  right: "" = everybody."""
        with _Counted(self, rpc) as call:
            rpc.received()
            call.bytes_in = len(data)
            try:
                if right:
                    self._gate.admit(context, right)
                out = answer(data)
            except Exception as e:
                await call.abort(context, self._ended(error_of(e, rpc.method), context))
            rpc.sent()
            call.bytes_out = len(out)
            return out

    def tell_of(self, report: RequestReport) -> None:
        """Of a request that its caller traces."""
        self._service.tell(report)

    def _ended(self, error: ExpertdError, context: Any) -> ExpertdError:
        """A call that is no request by itself ends with `error`, which the log is told."""
        given = request_id_of(context.invocation_metadata())
        self._service.refusals.tell(error, self._gate.name_of(context), given)
        return error

    def _answer_describe(self, data: bytes) -> bytes:
        try:
            request = bounds.read(pb.DescribeRequest, data)
        except DecodeError as e:
            raise MalformedMessageError(f"message: {e}; want a DescribeRequest") from e
        return self._service.describe(request.include_decisions).SerializeToString()

    def _enter(self, caller: str) -> None:
        """One more unary call of `caller`.  Raises TooManyRequestsError."""
        own, all_ = self._unary[caller] + 1, self._unary.total() + 1
        if not fits(own, all_, self.max_unary):
            raise TooManyRequestsError.about(
                "unary calls",
                got=f"{own} open of this caller, {all_} in all",
                want=f"at most {self.max_unary} of one caller, and room for others",
                remedy="wait for an answer first, or use a stream",
            )
        self._unary[caller] = own

    async def _compute(
        self,
        call: _Counted,
        data: bytes,
        context: Any,
        caller: str,
        decode: Callable[[bytes], ForwardRequestView],
        encode: Callable[[EngineRequest, Answer], bytes],
    ) -> bytes:
        service, on_loop, arrival_ns = self._service, self._on_loop, time.monotonic_ns()
        service.check_size(len(data))
        service.ensure_open()
        view = decode(data)
        done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def reply(r: EngineRequest, outcome: Outcome) -> None:
            if isinstance(outcome, ExpertdError):
                answer = partial(_fail, done, outcome)
            else:
                answer = partial(_finish, done, encode(r, outcome))
            if (report := service.report(r, outcome)) is not None:  # before the answer, which ends the call
                on_loop(partial(call.answers, report))
            on_loop(answer)

        more: dict[str, Any] = {"transport": "unary"}
        if service.traced is not None:
            more["traceparent"] = traceparent_of(context.invocation_metadata())
        timeout_ns = _timeout_ns(view, context.time_remaining())
        request = service.forward(view, reply, caller=caller, arrival_ns=arrival_ns, timeout_ns=timeout_ns, **more)
        try:
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


class _Counted:
    """One RPC, counted from begin to end."""

    def __init__(self, servicer: Servicer, rpc: Rpc) -> None:
        self._servicer, self._rpc = servicer, rpc
        self._code = "OK"
        self._seconds: float | None = None
        self._report: RequestReport | None = None
        self.bytes_in = self.bytes_out = 0

    def answers(self, report: RequestReport) -> None:
        """It is for one request, which its caller traces: that is told of when both have ended.  On the loop."""
        self._report = report
        if self._seconds is not None:
            self._tell(report, self._seconds)

    def __enter__(self) -> _Counted:
        self._servicer.open_calls += 1
        self._servicer.calls_begun += 1
        self._start = time.perf_counter()
        self._rpc.started()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, _: object) -> None:
        self._servicer.open_calls -= 1
        if kind is asyncio.CancelledError:
            log.debug("%s: its caller left", self._rpc.method)
        if kind is not None and self._code == "OK":
            left = issubclass(kind, asyncio.CancelledError) or has_left(e)
            self._code = "CANCELLED" if left else "UNKNOWN"
        self._seconds = time.perf_counter() - self._start
        self._rpc.ended(self._code, self._seconds, self.bytes_in, self.bytes_out)
        if self._report is not None:
            self._tell(self._report, self._seconds)

    def _tell(self, report: RequestReport, seconds: float) -> None:
        call = self._rpc.report(self._code, seconds, self.bytes_in, self.bytes_out)
        self._servicer.tell_of(report._replace(call=call))

    async def abort(self, context: Any, error: ExpertdError, request: str = "") -> NoReturn:
        """End the RPC with `error`.  request: the id under which the log tells of it, "" = none."""
        self._code = error.code.name
        error.__traceback__ = None  # which has the function that has `error`: a circle, with the message in it
        named = ((REQUEST_ID, request),) if request else ()
        await context.abort(error.code.grpc, error.message, (*error.to_trailing_metadata(), *named))
        raise AssertionError("abort() raises")
