"""ExpertClient: one server, called from any thread.

with ExpertClient("127.0.0.1:50051") as experts:
    answer = experts.forward(0, hidden_states, topk_ids, topk_weights, timeout_s=0.5)
    later = experts.submit(1, hidden_states, topk_ids, topk_weights)    # a concurrent.futures.Future
    answer = later.result()
"""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from types import TracebackType
from typing import Any, TypeVar

from expertd.errors import ExpertdError
from expertd.v1 import expert_service_pb2 as pb
from expertd.wire import ForwardResponseView
from expertd_client.call import Call, ForwardResult, Grouped, crowded, expired, make_call, numbered, result_of
from expertd_client.exchange import Exchange
from expertd_client.grpc_sync import GrpcTransport
from expertd_client.retry import NEVER, Retry, pause_s
from expertd_client.transport import Transport

__all__ = ["ExpertClient", "ForwardFuture"]

_T = TypeVar("_T")
_Self = TypeVar("_Self", bound="ExpertClient")


class ForwardFuture(Future[ForwardResult]):
    """The answer to one request that is under way; made by ExpertClient.submit.

    result()   waits for the answer, no longer than the request's own timeout
    cancel()   takes the request back: the server drops it if its kernel has not begun
    """

    def __init__(self, exchange: Exchange, slots: threading.Semaphore, call: Call, request_id: int) -> None:
        super().__init__()
        self._exchange = exchange
        self._slots = slots
        self._call = call
        self._request_id = request_id

    def result(self, timeout: float | None = None) -> ForwardResult:
        """The answer.  Raises the request's error; DeadlineExceededError when its own time is over first (and takes it
        back); concurrent.futures.TimeoutError when `timeout` seconds are over first (and leaves it under way)."""
        if self._call.end_s is None:
            return super().result(timeout)
        left_s = max(0.0, self._call.end_s - time.monotonic())
        if timeout is not None and timeout < left_s:
            return super().result(timeout)
        try:
            return super().result(left_s)
        except FutureTimeoutError:
            if self.cancel():
                raise expired(self._call, self._request_id) from None
            return super().result()  # it came at the last moment

    def cancel(self) -> bool:
        if not super().cancel():
            return False
        if self._exchange.cancel(self._request_id):
            self._slots.release()
        return True

    def answer(self, value: ForwardResponseView) -> None:
        """For the exchange, once."""
        self._slots.release()
        try:
            result = result_of(value, self._call)
        except ExpertdError as error:
            if self.set_running_or_notify_cancel():
                self.set_exception(error)
        else:
            if self.set_running_or_notify_cancel():
                self.set_result(result)

    def fail(self, error: ExpertdError) -> None:
        """For the exchange, once, instead of answer()."""
        self._slots.release()
        if self.set_running_or_notify_cancel():
            self.set_exception(error)


class ExpertClient:
    """One server.  Thread-safe; connects with the first call, and again after the connection broke.

    server          a gRPC target ("host:port"), or any transport (see expertd_client.transport)
    timeout_s       of a forward that names none; None = no limit
    max_in_flight   requests under way at once; one more waits, inside its own timeout, until another is answered.  The
                    server's own limit stands in Describe; above it requests fail with TooManyRequestsError
    retry           what forward() sends again; by default nothing.  submit() never does
    unary           a gRPC call for each request instead of one stream for all
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
        self._transport: Transport = GrpcTransport(server, unary=unary) if isinstance(server, str) else server
        self._exchange = Exchange(self._transport)
        self._timeout_s = timeout_s
        self._retry = retry
        self._ids = itertools.count(1)
        self._slots = threading.Semaphore(max_in_flight)

    @property
    def target(self) -> str:
        """The server's address."""
        return self._transport.target

    @property
    def load(self) -> pb.Load | None:
        """What the server last said about its load; None until it did."""
        return self._exchange.load

    @property
    def in_flight(self) -> int:
        """Requests that wait for their answer."""
        return self._exchange.in_flight

    def forward(
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
        """The routed experts of one layer for one batch of M tokens.

        hidden_states   [M, H] f32, f16 or bf16: numpy, torch on any device, or Synthetic
        topk_ids        [M, top_k] i32 or i64, global expert ids, -1 = nobody's
        topk_weights    [M, top_k] f32 or bf16
        grouped         instead of topk_*: rows sorted by expert, answered row by row
        timeout_s       for all of it, here and at the server; None = the client's
        output_dtype    "f32", "f16", "bf16", or a numpy or torch dtype; None = that of hidden_states
        digest          answer with sum, sum of squares and CRC-32 instead of the output
        traceparent     W3C trace context of this request
        router_weight_on_input   weights multiply the experts' inputs; top_k must be 1

        Raises the rows of expertd.errors.
        """
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
                return self._once(call)
            except ExpertdError as error:
                pause = pause_s(self._retry, error, attempt, call.left_s())
                if pause is None:
                    raise
            time.sleep(pause)
        raise AssertionError("unreachable: pause_s ends the loop")

    def submit(
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
    ) -> ForwardFuture:
        """forward() without waiting for the answer; the arguments are the same.  The tensors may be overwritten as soon
        as this returns.  Where nobody calls result(), the server alone watches the timeout."""
        return self._start(
            make_call(
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
        )

    def describe(
        self, *, include_decisions: bool = False, timeout_s: float = 10.0, wait_for_ready: bool = False
    ) -> pb.DescribeResponse:
        """What the server holds, accepts and chose.  wait_for_ready: keep trying to connect until the time is over."""
        answer: _Promise[pb.DescribeResponse] = _Promise()
        request = pb.DescribeRequest(include_decisions=include_decisions)
        self._transport.describe(request, timeout_s, wait_for_ready, answer)
        return answer.result()

    def close(self) -> None:
        """Fails what is in flight with RequestCancelledError and gives back the connection."""
        self._exchange.close()
        self._transport.close()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, call: Call) -> ForwardFuture:
        if not self._slots.acquire(timeout=call.left_s()):
            raise crowded(call)
        request = numbered(call, next(self._ids))
        future = ForwardFuture(self._exchange, self._slots, call, request.request_id)
        try:
            self._exchange.submit(request, future)
        except BaseException:
            self._slots.release()
            raise
        return future

    def _once(self, call: Call) -> ForwardResult:
        future = self._start(call)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # abandoned, by an interrupt for one; it does nothing to a request that has ended
            raise


class _Promise(Future[_T]):
    """A future that a transport can fill."""

    def answer(self, value: _T) -> None:
        self.set_result(value)

    def fail(self, error: ExpertdError) -> None:
        self.set_exception(error)
