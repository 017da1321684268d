"""One StreamForward call: any number of requests in flight, answered as they finish.

Two coroutines a stream and none a message: one reads and submits, one writes what has been answered.  A request counts
as in flight until its answer is written, so a caller that does not read its answers is bounded, too.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any, NamedTuple

import grpc

from expertd.errors import (
    DrainingError,
    DuplicateRequestIdError,
    ExpertdError,
    MalformedMessageError,
    MissingRequestIdError,
    RequestCancelledError,
    TooManyRequestsError,
)
from expertd.v1 import expert_service_pb2 as pb
from expertd.wire import ForwardRequestView, decode_stream_request, encode_stream_response, peek_request_id
from expertd_server.engine.request import Outcome, Request
from expertd_server.service.service import Service, State, error_of, response_view
from expertd_server.views.metrics import Rpc

__all__ = ["Stream"]

_INLINE_ONLY = "this server answers inline only"


class _Tag(NamedTuple):
    """Of a request of this stream."""

    request_id: int
    hidden_size: int
    decode_ns: int


class Stream:
    """`run()` is the call's life.  context: grpc.aio's, with read() and write() of bytes."""

    def __init__(self, service: Service, rpc: Rpc, context: Any) -> None:
        self._service, self._rpc, self._context = service, rpc, context
        self._in_flight: dict[int, Request] = {}
        self._outbox: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._ended = False
        self._fault: Exception | None = None

    async def run(self) -> None:
        """Until the caller has sent everything and everything is answered; DrainingError ends it before."""
        reader = asyncio.create_task(self._read())
        self._service.on_drain.add(self._on_drain)
        try:
            await self._write()
        finally:
            self._service.on_drain.discard(self._on_drain)
            reader.cancel()
            for request in self._in_flight.values():
                request.cancelled = True
            await asyncio.gather(reader, return_exceptions=True)

    async def _write(self) -> None:
        write, outbox = self._context.write, self._outbox
        while True:
            while outbox:
                data = outbox[0]
                await write(data)
                outbox.popleft()
                self._rpc.sent()
                self._service.metrics.bytes_out(len(data))
            if self._fault is not None:
                raise self._fault
            if not self._in_flight:
                if self._ended:
                    return
                if self._service.state is State.DRAINING:
                    raise DrainingError(
                        "server: it drains, and every request that it had taken from this stream is answered"
                    )
            self._wake.clear()
            await self._wake.wait()

    async def _read(self) -> None:
        read, eof = self._context.read, grpc.aio.EOF
        try:
            while (data := await read()) is not eof:
                self._rpc.received()
                try:
                    await self._take(data)
                except ExpertdError as e:
                    self._refuse(e, peek_request_id(data, stream=True))
        except Exception as e:
            self._fault = error_of(e, "StreamForward")
        finally:
            self._ended = True
            self._wake.set()

    async def _take(self, data: bytes) -> None:
        """One message of the caller.  Raises the row that answers it."""
        start_ns = time.monotonic_ns()
        self._service.check_size(data)
        message = decode_stream_request(data)
        if isinstance(message, ForwardRequestView):
            try:
                await self._forward(message, start_ns)
            except Exception as e:
                self._refuse(error_of(e, "StreamForward"), message.request_id)
        elif isinstance(message, pb.CancelRequest):
            self._cancel(message.request_id)
        elif isinstance(message, pb.SessionOffer):
            verdicts = [pb.TransportVerdict(transport=t, reason=_INLINE_ONLY) for t in message.transports]
            self._send(encode_stream_response(pb.SessionAnswer(verdicts=verdicts)))
        else:
            raise MalformedMessageError("message: holds nothing, want forward, cancel or session")

    async def _forward(self, v: ForwardRequestView, start_ns: int) -> None:
        service, number = self._service, v.request_id
        engine, intake = service.admit()
        if number == 0:
            raise MissingRequestIdError("request_id: got 0, want a number that is unique among those in flight")
        if number in self._in_flight:
            raise DuplicateRequestIdError.about(
                "request_id", got=number, want="one that is not in flight on this stream"
            )
        if len(self._in_flight) + len(self._outbox) >= service.limits.max_in_flight:
            raise TooManyRequestsError.about(
                "stream",
                got=f"{len(self._in_flight)} requests in flight, {len(self._outbox)} answers unread, and one more",
                want=f"at most {service.limits.max_in_flight} together",
                remedy="wait for an answer first",
            )
        # While much is drawn this stream reads nothing more; others do.
        p = await service.check_drawn(v) if service.draws_much(v) else intake.check(v)
        if p.tokens == 0:
            service.metrics.answered()
            self._send(encode_stream_response(service.empty_response(p, number)))
            return
        tag = _Tag(number, intake.layers[p.layer].hidden_size, time.monotonic_ns() - start_ns)
        request = service.request(p, start_ns, v.timeout_us * 1000, self._reply, tag)
        self._in_flight[number] = request
        try:
            engine.submit(request)
        except ExpertdError:
            del self._in_flight[number]
            raise

    def _reply(self, r: Request, outcome: Outcome) -> None:
        """On the engine's thread, where the output still stands."""
        tag: _Tag = r.tag
        if isinstance(outcome, ExpertdError):
            self._service.mailbox.post(self._deliver, r, outcome)
        elif not r.cancelled:
            load = self._service.load_message()
            view = response_view(r, outcome, tag.request_id, tag.hidden_size, tag.decode_ns, load)
            self._service.mailbox.post(self._deliver, r, encode_stream_response(view))

    def _deliver(self, r: Request, answer: bytes | ExpertdError) -> None:
        number = r.tag.request_id
        if self._in_flight.get(number) is not r:
            return  # cancelled meanwhile, and answered as such
        del self._in_flight[number]
        if isinstance(answer, ExpertdError):
            self._refuse(answer, number)
        else:
            self._service.metrics.answered()
            self._send(answer)

    def _cancel(self, number: int) -> None:
        request = self._in_flight.get(number)
        if request is None:
            return  # answered before the cancel came
        del self._in_flight[number]
        request.cancelled = True
        self._refuse(RequestCancelledError("request: cancelled by its caller"), number)

    def _refuse(self, e: ExpertdError, request_id: int) -> None:
        self._service.metrics.answered(e.code.name, e.reason)
        self._send(encode_stream_response(e.to_request_error(request_id)))

    def _send(self, data: bytes) -> None:
        self._outbox.append(data)
        self._wake.set()

    def _on_drain(self) -> None:
        self._send(encode_stream_response(self._service.load_message()))
