"""ExpertClient: one server, called from any thread.

with ExpertClient("127.0.0.1:50051") as experts:
    answer = experts.forward(0, hidden_states, topk_ids, topk_weights, timeout_s=0.5)
    later = experts.submit(1, hidden_states, topk_ids, topk_weights)    # a concurrent.futures.Future
    answer = later.result()
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any, TypeVar

from expertd.errors import ExpertdError
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.clients.forwarder import Forwarder
from expertd_client.clients.slot import Slot
from expertd_client.clients.turns import Turns
from expertd_client.requests.deadline import Deadline, deadline_in
from expertd_client.requests.e4m3 import asked_for, taken
from expertd_client.requests.request import Request
from expertd_client.requests.result import ForwardResult
from expertd_client.requests.retry import NEVER, Retry, pause_s
from expertd_client.requests.tensors import wire_dtype
from expertd_client.tracing import TracedCall, recorder
from expertd_client.transports.protocol import Transport

if TYPE_CHECKING:
    from expertd_client.device.session import DeviceSession
    from expertd_client.device.transport import DeviceTransport
    from expertd_client.exchange.exchange import Exchange
    from expertd_client.exchange.session import Session
    from expertd_client.transports.credentials import Credentials

__all__ = ["ExpertClient", "ForwardFuture"]

_T = TypeVar("_T")
_DESCRIBE_S = 10.0


class ForwardFuture(Future[ForwardResult]):
    """The answer to one request that is under way; made by ExpertClient.submit.

    result()   waits for the answer, or for the end of the request's own time
    cancel()   takes the request back: the server drops it if its kernel has not begun
    """

    def __init__(self, exchange: Exchange, turns: Turns) -> None:
        super().__init__()
        self._exchange = exchange
        self._turns = turns
        self._request_id = 0

    def cancel(self) -> bool:
        if not super().cancel():
            return False
        if self._exchange.cancel(self._request_id):
            self._turns.release()
        return True

    def sent(self, request_id: int) -> None:
        """For the client, once."""
        self._request_id = request_id

    def answer(self, value: ForwardResult) -> None:
        """For the exchange, once."""
        self._turns.release()
        if self.set_running_or_notify_cancel():
            self.set_result(value)
        else:
            value.release()

    def fail(self, error: ExpertdError) -> None:
        """For the exchange, once, instead of answer()."""
        self._turns.release()
        if self.set_running_or_notify_cancel():
            self.set_exception(error)


class ExpertClient(Forwarder):
    """One server.  Thread-safe; connects with the first call, and again after the connection broke.

    server          its address ("host", "host:port", "https://host", "unix:/path": transports/address.py), or any
                    transport (see transports/protocol.py)
    timeout_s       of a forward that names none; None = no limit
    max_in_flight   requests under way at once; one more waits, inside its own timeout, until another is answered.  The
                    server's own limit stands in Describe; above it requests fail with TooManyRequestsError
    retry           what forward() sends again; by default nothing.  submit() never does
    unary           a gRPC call for each request instead of one stream for all
    credentials     TLS and a token, where `server` is an address; None = plain text, but for https
    wire_dtype      "e4m3": hidden states are quantized before they are sent (requests/e4m3.py: within 2^-4 of each
                    value, 0.516 of bf16's bytes) where the server takes that, which the first call asks it by
                    Describe; None = they travel as they are given
    """

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
        from expertd_client.clients.connect import ENTRIES, connect

        self._transport, self._exchange = connect(server, unary, credentials)
        self._timeout_s = timeout_s
        self._retry = retry
        self._device_transports: dict[int, DeviceTransport] = {}
        self._ways_lock = threading.Lock()
        self._quantizes = asked_for(wire_dtype)
        self._taken: bool | None = None
        self._turns = Turns(max_in_flight)
        self._bounded = max_in_flight < ENTRIES  # else a session in shared memory bounds itself

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

    def forward_request(self, request: Request, *, timeout_s: float | None = None) -> ForwardResult:
        deadline = deadline_in(self._timeout_s if timeout_s is None else timeout_s)
        attempt = 0
        while True:
            attempt += 1
            try:
                return self._once(self._as_it_travels(request, deadline) if self._quantizes else request, deadline)
            except ExpertdError as error:
                pause = pause_s(self._retry, error, attempt, None if deadline is None else deadline.left_s())
                if pause is None:
                    raise
            time.sleep(pause)

    def submit_request(self, request: Request, *, timeout_s: float | None = None) -> ForwardFuture:
        deadline = deadline_in(self._timeout_s if timeout_s is None else timeout_s)
        request = self._as_it_travels(request, deadline)
        return self._start(request, deadline, (now := recorder.active) and now.single(request, self.target))

    def describe(
        self, *, include_decisions: bool = False, timeout_s: float = 10.0, wait_for_ready: bool = False
    ) -> pb.DescribeResponse:
        """What the server holds, accepts and chose.  wait_for_ready: keep trying to connect until the time is over."""
        answer: _Reply[pb.DescribeResponse] = _Reply()
        request = pb.DescribeRequest(include_decisions=include_decisions)
        self._transport.unary("Describe", request, pb.DescribeResponse, timeout_s, wait_for_ready, answer)
        described = answer.result()
        self._exchange.most_tokens = described.limits.max_tokens
        return described

    def session(self, *, timeout_s: float = 10.0) -> Session:
        """How messages travel: the transport that this client and the server agreed on, and why not another one.
        Connects if need be, and waits for the agreement."""
        answer: _Reply[Session] = _Reply()
        self._exchange.session(answer)
        try:
            return answer.result(timeout_s)
        except FutureTimeoutError:
            from expertd_client.exchange.session import unanswered

            raise unanswered(self.target, timeout_s) from None

    def device_session(
        self, device: int | str = "cuda", *, same_gpu: bool = False, timeout_s: float = 10.0
    ) -> DeviceSession:
        """A session of its own for a caller on a GPU of the server's host (expertd_client.device): tensors travel from
        GPU to GPU, and calls are ordered on the caller's stream.  Needs torch.

        Raises UnavailableError with the reason where it cannot be had: another host, a server on a CPU, GPUs that do
        not reach each other's memory, the server's own GPU (unless same_gpu: where MPS lets both processes run)."""
        from expertd_client.device.cuda_ipc import ask_for_session, device_index

        return ask_for_session(self._transport, device_index(device), same_gpu=same_gpu, timeout_s=timeout_s)

    def device_transport(self, device: int) -> DeviceTransport | None:
        from expertd_client.device.transport import DeviceTransport

        with self._ways_lock:
            if device not in self._device_transports:
                self._device_transports[device] = DeviceTransport(
                    lambda: self.device_session(device), self.describe, self._timeout_s
                )
            return self._device_transports[device]

    def expect(self) -> None:
        self._exchange.expect()

    def close(self) -> None:
        for transport in self._device_transports.values():
            transport.close()
        self._exchange.close()
        self._transport.close()

    def _as_it_travels(self, request: Request, deadline: Deadline | None) -> Request:
        """Quantized where that was asked for and the server takes it."""
        if not self._quantizes:
            return request
        if self._taken is None:
            self._taken = taken(self.describe(timeout_s=_DESCRIBE_S if deadline is None else deadline.left_s()))
        return request.quantized() if self._taken else request

    def _take_turn(self, request: Request, deadline: Deadline | None) -> None:
        """Wait until fewer than max_in_flight requests are under way."""
        if not self._turns.acquire(None if deadline is None else deadline.left_s()):
            assert deadline is not None
            raise deadline.crowded(request.layer)

    def slot(self, tokens: int, hidden_size: int, top_k: int, dtype: Any = "bf16") -> Slot:
        """Tensors of one batch that are sent again and again with new values: over shared memory they lie where the
        server reads and writes, and a forward copies nothing.  dtype: of hidden states and output, which are not
        quantized there."""
        number = wire_dtype(dtype)
        made = self._exchange.slot(tokens, hidden_size, top_k, number)
        return Slot(self, made, tokens, hidden_size, top_k, number)

    def _start(self, request: Request, deadline: Deadline | None, traced: TracedCall | None) -> ForwardFuture:
        self._take_turn(request, deadline)
        future = ForwardFuture(self._exchange, self._turns)
        if traced is not None:
            future.add_done_callback(traced.landed)
        try:
            future.sent(self._exchange.submit(request, deadline, future))
            if traced is not None:
                traced.parts[-1].sent(self._exchange.transport_name)
        except BaseException:
            self._turns.release()
            raise
        return future

    def _once(self, request: Request, deadline: Deadline | None) -> ForwardResult:
        traced = (now := recorder.active) and now.single(request, self.target)
        if self._bounded:
            self._take_turn(request, deadline)
        try:
            answer = self._exchange.call(request, deadline, traced)
            if answer is None and self._bounded:
                return self._wait(request, deadline, traced)
        finally:
            if self._bounded:
                self._turns.release()
        if answer is None:
            self._take_turn(request, deadline)
            try:
                return self._wait(request, deadline, traced)
            finally:
                self._turns.release()
        if traced is not None:
            traced.end()
        return answer

    def _wait(self, request: Request, deadline: Deadline | None, traced: TracedCall | None) -> ForwardResult:
        """The answer of a request that somebody else reads."""
        answer = _Answer()
        request_id = self._exchange.submit(request, deadline, answer)
        if traced is not None:
            traced.parts[-1].sent(self._exchange.transport_name)
        try:
            result = answer.wait()
        except BaseException:
            self._exchange.cancel(
                request_id
            )  # abandoned, by an interrupt for one; to one that has ended it does nothing
            raise
        if traced is not None:
            traced.parts[-1].answered(result.timing)
            traced.end()
        return result


class _Answer:
    """One thread's wait for one answer: what a Future is, without what nobody here asks of one."""

    __slots__ = ("_came", "_error", "_value")

    def __init__(self) -> None:
        self._value: ForwardResult | None = None
        self._error: ExpertdError | None = None
        self._came = threading.Lock()
        self._came.acquire()

    def wait(self) -> ForwardResult:
        """Raises what came instead."""
        self._came.acquire()
        if self._value is None:
            assert self._error is not None
            raise self._error
        return self._value

    def answer(self, value: ForwardResult) -> None:
        self._value = value
        self._came.release()

    def fail(self, error: ExpertdError) -> None:
        self._error = error
        self._came.release()


class _Reply(Future[_T]):
    """A future that a transport can fill."""

    def answer(self, value: _T) -> None:
        self.set_result(value)

    def fail(self, error: ExpertdError) -> None:
        self.set_exception(error)
