"""One StreamForward call: the messages of a session as bytes of a gRPC stream.

A coroutine reads.  An answer is encoded where the output still stands, and written at once: on the event loop, where
that hands the outcomes out (engine/delivery.py), without another turn of it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import grpc

from expertd.codec import decode_stream_request, encode_stream_response, peek_request_id
from expertd.common.begun import begin
from expertd.errors import ExpertdError
from expertd.v1 import expert_service_pb2 as pb
from expertd_server.engine.admission import State
from expertd_server.engine.request import Answer, EngineRequest
from expertd_server.service.connection import ClientConnection
from expertd_server.service.refusals import request_id_of, traceparent_of
from expertd_server.service.response import response_view

if TYPE_CHECKING:
    from expertd_server.service.service import Service
    from expertd_server.transports.grpc.loop_thread import OnLoop
    from expertd_server.views.call_metrics import Rpc

__all__ = ["Stream"]

_MOST_UNREAD = 256
"""Messages that a caller may leave unread before he is read no further."""


class Stream:
    """`run()` is the call's life.  context: grpc.aio's, with read() and write() of bytes.  An Outlet."""

    def __init__(self, service: Service, on_loop: OnLoop, rpc: Rpc, context: Any, caller: str) -> None:
        self._service, self._on_loop, self._rpc, self._context = service, on_loop, rpc, context
        self.caller = caller
        self.bytes_in = self.bytes_out = 0
        told = context.invocation_metadata()
        self._session = ClientConnection(service, self, caller, request_id_of(told), traceparent_of(told))
        self._outbox: deque[tuple[bytes, int]] = deque()  # answers, with the answer_bytes of their requests
        self._small: deque[bytes] = deque()  # refusals and what else is no answer
        self._wake, self._room = asyncio.Event(), asyncio.Event()
        self._writing_since, self._last_s = 0.0, time.monotonic()
        self._fault: BaseException | None = None
        self._writing = self._ended = False
        self._task = asyncio.current_task()

    def unread_s(self, now_s: float) -> float:
        """For how long the caller has not read a message that is being written."""
        return now_s - self._writing_since if self._writing_since else 0.0

    def idle_s(self, now_s: float) -> float:
        """For how long nothing has come or gone."""
        return 0.0 if self._waiting or self._writing_since or self._session.busy else now_s - self._last_s

    def retire(self, why: ExpertdError) -> None:
        """End the call with `why`, as soon as what is answered is written."""
        self._fault = why
        self._wake.set()

    def cut_off(self) -> None:
        """End the call without another word: its caller does not read."""
        if self._task is not None:
            self._task.cancel()

    async def run(self) -> None:
        """Until the caller has sent everything and everything is answered; DrainingError ends it before."""
        reader = asyncio.create_task(self._read())
        try:
            while not self._over():
                self._wake.clear()
                await self._wake.wait()
        finally:
            reader.cancel()
            self._session.close()
            await asyncio.gather(reader, return_exceptions=True)

    def _over(self) -> bool:
        """Whether nothing is left to be done.  Raises what ends the call."""
        if self._writing or self._waiting:
            return False
        if self._fault is not None:
            raise self._fault
        return self._session.finished()

    @property
    def _waiting(self) -> int:
        """Messages that are to be written."""
        return len(self._outbox) + len(self._small)

    def _flush(self) -> None:
        """Write what stands in the outbox, beginning now.  On the loop."""
        if not self._writing:
            self._writing = True
            begin(self._write())

    async def _write(self) -> None:
        write, outbox, small, session = self._context.write, self._outbox, self._small, self._session
        answer_next = False
        try:
            while outbox or small:
                # In turns: a refusal waits behind no whole batch of answers, nor an answer behind a flood of refusals.
                if small and not (answer_next and outbox):
                    data, answer_bytes, answer_next = small.popleft(), 0, True
                else:
                    (data, answer_bytes), answer_next = outbox.popleft(), False
                self._writing_since = self._last_s = time.monotonic()
                await write(data)
                self._writing_since = 0.0
                session.written(answer_bytes)
                self._rpc.sent()
                self._service.metrics.bytes_out(len(data))
                self.bytes_out += len(data)
        except (Exception, asyncio.CancelledError) as e:  # the call is over, and run() is told so, or is to be
            outbox.clear()
            small.clear()
            self._fault = self._fault or e
        finally:
            self._writing = False
        self._room.set()
        if self._fault is not None or self._ended or self._service.engine.state is not State.SERVING:
            self._wake.set()

    async def _read(self) -> None:
        read, eof = self._context.read, grpc.aio.EOF
        try:
            while (data := await read()) is not eof:
                self._rpc.received()
                self.bytes_in += len(data)
                self._last_s = time.monotonic()
                wait = self._take(data)
                if wait is not None:
                    await asyncio.wrap_future(wait)
                if self._waiting > _MOST_UNREAD:  # he does not read: read no more of his until he does
                    self._room.clear()
                    await self._room.wait()
        except Exception as e:
            self._fault = e
        finally:
            self._ended = True
            self._session.end()
            self._wake.set()

    def _take(self, data: bytes) -> Future[None] | None:
        """One message of the caller.  A Future: read no further until it is done."""
        arrival_ns, session = time.monotonic_ns(), self._session
        try:
            self._service.check_size(len(data))
            taken = session.take_message(data, arrival_ns)
            if taken is not False:
                if taken is not True:
                    self._outbox.append(taken)
                    self._flush()
                return None
            if session.turn_away(data, arrival_ns):
                return None
            message = decode_stream_request(data)
        except ExpertdError as e:
            session.refuse(e, peek_request_id(data, stream=True))
            return None
        return session.take(message, arrival_ns)

    # ---- Outlet ------------------------------------------------------------------------------------------------------

    def answer(self, request: EngineRequest, answer: Answer) -> None:
        """Encoded on the thread that hands it out."""
        view = response_view(request, answer, self._service.load_message())
        self._outbox.append((encode_stream_response(view), request.answer_bytes))
        self._on_loop(self._flush)

    def ready(self, message: bytes, answer_bytes: int) -> None:
        """Encoded by the core."""
        self._outbox.append((message, answer_bytes))
        self._on_loop(self._flush)

    def send(self, message: pb.RequestError | pb.SessionAnswer | pb.Load) -> None:
        """Encoded at once."""
        self._small.append(encode_stream_response(message))
        self._on_loop(self._flush)
