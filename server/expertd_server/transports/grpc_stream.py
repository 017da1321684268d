"""One StreamForward call: the messages of a session as bytes of a gRPC stream.

Two coroutines a stream and none a message: one reads, one writes what has been answered.  Answers are encoded on the
engine's thread, where the output still stands.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import grpc

from expertd.errors import ExpertdError
from expertd.v1 import expert_service_pb2 as pb
from expertd.wire import decode_stream_request, encode_stream_response, peek_request_id
from expertd_server.engine.request import Answer, Request
from expertd_server.service.response import error_of, response_view

if TYPE_CHECKING:
    from expertd_server.service.service import Service
    from expertd_server.transports.mailbox import Mailbox
    from expertd_server.views.metrics import Rpc

__all__ = ["Stream"]


class Stream:
    """`run()` is the call's life.  context: grpc.aio's, with read() and write() of bytes.  An Outlet."""

    def __init__(self, service: Service, mailbox: Mailbox, rpc: Rpc, context: Any) -> None:
        self._service, self._mailbox, self._rpc, self._context = service, mailbox, rpc, context
        self._session = service.session(self, context.peer())
        self._outbox: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._fault: Exception | None = None

    async def run(self) -> None:
        """Until the caller has sent everything and everything is answered; DrainingError ends it before."""
        reader = asyncio.create_task(self._read())
        try:
            await self._write()
        finally:
            reader.cancel()
            self._session.close()
            await asyncio.gather(reader, return_exceptions=True)

    async def _write(self) -> None:
        write, outbox, session = self._context.write, self._outbox, self._session
        while True:
            while outbox:
                data = outbox.popleft()
                await write(data)
                session.written()
                self._rpc.sent()
                self._service.metrics.bytes_out(len(data))
            if self._fault is not None:
                raise self._fault
            if session.finished():
                return
            self._wake.clear()
            await self._wake.wait()

    async def _read(self) -> None:
        read, eof = self._context.read, grpc.aio.EOF
        try:
            while (data := await read()) is not eof:
                self._rpc.received()
                await self._take(data)
        except Exception as e:
            self._fault = error_of(e, "StreamForward")
        finally:
            self._session.end()
            self._wake.set()

    async def _take(self, data: bytes) -> None:
        """One message of the caller."""
        arrival_ns = time.monotonic_ns()
        try:
            self._service.check_size(len(data))
            message = decode_stream_request(data)
        except ExpertdError as e:
            self._session.refuse(e, peek_request_id(data, stream=True))
            return
        wait = self._session.take(message, arrival_ns)
        if wait is not None:
            await asyncio.wrap_future(wait)

    # ---- Outlet ------------------------------------------------------------------------------------------------------

    def answer(self, request: Request, answer: Answer) -> None:
        """Encoded on the engine's thread."""
        view = response_view(request, answer, self._service.load_message())
        self._outbox.append(encode_stream_response(view))
        self._mailbox.post(self._wake.set)

    def send(self, message: pb.RequestError | pb.SessionAnswer | pb.Load) -> None:
        """Encoded at once."""
        self._outbox.append(encode_stream_response(message))
        self._mailbox.post(self._wake.set)

    def released(self, memory: Any) -> None:
        """Received bytes go when nothing refers to them."""
