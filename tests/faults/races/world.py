"""Servers, their gRPC streams and their shared memory, in virtual time: the transport that a real ExpertCluster uses.

What is modelled begins at the seams of the client: Transport and Connection (a stream with a thread that reads it),
Channel and Tickets (a session in shared memory, whose C++ is left out).
"""

from __future__ import annotations

import ctypes as C
import math
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import virtual
from virtual import Scheduler, point

from expertd.codec import ForwardResponseView, TensorView
from expertd.errors import DeadlineExceededError, ExpertdError, RequestCancelledError, UnavailableError
from expertd.shm.in_flight import NoRoomError, SessionEndedError
from expertd.shm.layout import Completion, Submission, Tensors
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.transports.core_connection import BlockingConnection
from expertd_client.transports.core_transport import BlockingTransport

H, E, K = 4, 8, 2
HOLDINGS = {"a": range(4), "b": range(4), "c": range(4, 8)}

FREE, IN_FLIGHT, ABANDONED, DONE = range(4)


class ViolationError(Exception):
    """Something was used that must not be used any more."""


def answer_to(x: Any, ids: Any, weights: Any, held: Any) -> tuple[Any, int]:
    """[m, H] f32, and the routes that were computed: x * the sum of weights * (expert + 1)."""
    mine = np.isin(ids, list(held))
    factor = np.where(mine, (ids + 1) * weights, 0).sum(1, keepdims=True)
    return (x * factor).astype(np.float32), int(mine.sum())


class Server:
    """Answers each request after a while, unless it is down or hangs.

    service_s   of a request, about; late: share of the requests that take 40 times as long
    spread_s    between the end of its stream and of its session when it is killed, at most
    """

    def __init__(self, scheduler: Scheduler, name: str, service_s: float, spread_s: float, late: float) -> None:
        self.scheduler, self.name, self.held = scheduler, name, HOLDINGS[name]
        self.up, self.life = True, 0
        self.hangs_until_s = 0.0
        self.streams: list[Stream] = []
        self.sessions: list[Memory] = []
        self._service_s, self._spread_s, self._late = service_s, spread_s, late

    def random_s(self, most_s: float) -> float:
        return self.scheduler.rng.random() * most_s

    def serve(self, answer: Callable[[], object]) -> None:
        """Calls answer() when a request that came now is answered."""
        life, scheduler = self.life, self.scheduler

        def done() -> None:
            if self.life != life:
                return
            if scheduler.now_s < self.hangs_until_s:
                scheduler.at(self.hangs_until_s + self.random_s(1e-4), done)
            else:
                answer()

        late = 40 if scheduler.rng.random() < self._late else 1
        scheduler.later(late * (self._service_s + self.random_s(self._service_s)), done)

    def kill(self) -> None:
        """Its stream and its session end at about the same time, in any order."""
        self.scheduler.note(f"kill {self.name}")
        self.up, self.life = False, self.life + 1
        streams, self.streams, sessions, self.sessions = self.streams, [], self.sessions, []
        for stream in streams:
            self.scheduler.later(self.random_s(self._spread_s), stream.reset)
        for session in sessions:
            self.scheduler.later(self.random_s(self._spread_s), session.lose)

    def rise(self) -> None:
        self.scheduler.note(f"{self.name} is back")
        self.up = True

    def hang(self, seconds: float) -> None:
        self.scheduler.note(f"{self.name} hangs for {seconds:.3f} s")
        self.hangs_until_s = self.scheduler.now_s + seconds

    def describe(self) -> pb.DescribeResponse:
        layer = pb.Layer(
            layer=0,
            num_experts=E,
            held=[pb.ExpertRange(first=self.held[0], count=len(self.held))],
            top_k=K,
            intermediate_size=8,
            backend="sums",
        )
        model = pb.Model(family="sums", hidden_size=H)
        return pb.DescribeResponse(model=model, layers=[layer], limits=pb.Limits(max_tokens=64))


class Transport:
    """To one server.  sessions: whether it offers shared memory."""

    def __init__(self, server: Server, sessions: bool) -> None:
        self.target, self._server = server.name, server
        self.offers = [MemoryChannel(server)] if sessions else []

    def connect(self, deliver: Any, closed: Any) -> Stream:
        return Stream(self._server, deliver, closed)

    def unary(
        self, method: str, request: Any, answer: Any, timeout_s: float, wait_for_ready: bool, waiter: Any
    ) -> None:
        server = self._server
        life = server.life
        virtual.sleep(5e-5 + server.random_s(2e-4))
        if not server.up or server.life != life:
            waiter.fail(UnavailableError(f"{server.name}: got connection refused, want a server"))
        elif server.scheduler.now_s < server.hangs_until_s:
            virtual.sleep(timeout_s)
            waiter.fail(DeadlineExceededError("got no answer in time"))
        else:
            waiter.answer(server.describe())

    def close(self) -> None:
        for channel in self.offers:
            channel.close()

    async def wait_closed(self) -> None:
        """close() has waited."""


class Stream:
    """As grpc_sync's: a thread delivers what came, and says at the end why."""

    def __init__(self, server: Server, deliver: Any, closed: Any) -> None:
        self._server, self._deliver, self._closed = server, deliver, closed
        self._closing = self._over = False
        self._came: deque[Any] = deque()
        self._cancelled: set[int] = set()
        self._reader = virtual.Thread(target=self._read, name=f"stream-{server.name}")
        self._reader.start()
        if server.up:
            server.streams.append(self)
        else:
            server.scheduler.later(server.random_s(1e-3), self.reset)

    def put(self, message: Any) -> None:
        self._came.append(message)
        self._server.scheduler.wake(self._reader)

    def reset(self) -> None:
        self.put(UnavailableError(f"{self._server.name}: connection reset"))

    def takes(self, request: Any) -> bool:
        return True

    def forward(self, request_id: int, timeout_us: int, request: Any) -> None:
        view = request.view(request_id, timeout_us)
        x, ids, weights = view.hidden_states, view.topk_ids, view.topk_weights
        tokens = x.shape[0]
        output, routes = answer_to(
            np.frombuffer(x.raw, np.float32).reshape(tokens, H),
            np.frombuffer(ids.raw, np.int32).reshape(tokens, K),
            np.frombuffer(weights.raw, np.float32).reshape(tokens, K),
            self._server.held,
        )

        def answer() -> None:
            if request_id not in self._cancelled:
                values = TensorView.of_raw(x.dtype, x.shape, output.tobytes())
                self.put(ForwardResponseView(request_id, values, routes_computed=routes, load=pb.Load()))

        if self._server.up:
            self._server.serve(answer)

    def cancel(self, request_id: int) -> None:
        self._cancelled.add(request_id)

    def offer(self, offer: Any) -> None:
        verdicts = [pb.TransportVerdict(transport="shm", accepted=True)]
        answer = pb.SessionAnswer(verdicts=verdicts, token="token", endpoint="here")
        if self._server.up:
            self._server.serve(lambda: self.put(answer))

    def close(self) -> None:
        self._closing = True
        self.put(RequestCancelledError("cancelled"))
        if virtual.current_thread() is not self._reader:
            self._reader.join()

    def _read(self) -> None:
        while True:
            while not self._came:
                self._server.scheduler.block()
            point()
            message = self._came.popleft()
            if isinstance(message, ExpertdError):
                break
            self._deliver(message)
        if self._closing:
            message = RequestCancelledError(f"{self._server.name}: this client was closed before the answer came")
        point()
        self._closed(message)


class MemoryChannel(BlockingTransport["Memory"]):
    name = "shm"

    def __init__(self, server: Server) -> None:
        super().__init__()
        self._server = server

    def _enter(self, answer: Any) -> Memory:
        life = self._server.life
        virtual.sleep(self._server.random_s(3e-4))
        if not self._server.up or life != self._server.life:
            raise UnavailableError("shared memory: connection refused")
        return Memory(self._server)

    def _connection(self, entered: Memory, deliver: Any, closed: Any) -> BlockingConnection:
        return _MemoryConnection(entered, deliver, closed)


class _MemoryConnection(BlockingConnection):
    what = "shared memory"

    def _gone(self) -> bool:
        return super()._gone() or self._client.lost


class _Ticket:
    def __init__(self, memory: Any, routes: int, output: Any, announced: bool) -> None:
        self.state, self.announced = IN_FLIGHT, announced
        self.memory, self.output, self.routes = memory, output, routes
        self.waiter: Any = None


class Memory:
    """What expertd.shm.client.Client is: tickets, and the memory of their outputs.  lost: the server is gone, which the
    session's socket tells."""

    by_session: ClassVar[dict[int, Memory]] = {}
    MOST = 16

    def __init__(self, server: Server) -> None:
        self.session = C.c_uint64()
        self.lost = self._ended = self._freed = False
        self._server, self._scheduler = server, server.scheduler
        self._tickets: dict[int, _Ticket] = {}
        self._numbers = iter(range(1, 1 << 30))
        self._ready: list[int] = []
        self._watcher: Any = None
        self.by_session[C.addressof(self.session)] = self
        server.sessions.append(self)

    # ---- what Tickets has --------------------------------------------------------------------------------------------

    def send(self, request: Submission, tensors: Tensors, announced: bool = True) -> int:
        self._used()
        m, where = request.tokens, _Addresses.from_buffer(tensors)
        x = array_at(where.hidden, (m, H), np.float32)
        ids, weights = array_at(where.ids, (m, K), np.int32), array_at(where.weights, (m, K), np.float32)
        return self.put(x, ids, weights, announced)

    def put(self, x: Any, ids: Any, weights: Any, announced: bool) -> int:
        point()
        if self._ended or len(self._tickets) >= self.MOST or self._scheduler.rng.random() < 0.01:
            raise NoRoomError("crowded")
        output, routes = answer_to(x, ids, weights, self._server.held)
        number, ticket = (
            next(self._numbers),
            _Ticket(np.full(output.shape, np.nan, np.float32), routes, output, announced),
        )
        self._tickets[number] = ticket
        if self._server.up and not self.lost:
            self._server.serve(lambda: self._done(number))
        point()
        return number

    def call(self, request: Submission, tensors: Tensors, answer: Completion, timeout_ns: int, spin_ns: int) -> int:
        number = self.send(request, tensors, announced=False)
        try:
            return number if self.wait(number, answer, timeout_ns) else -number
        except BaseException:
            self.abandon(number)
            raise

    def wait(self, number: int, answer: Completion, timeout_ns: int = -1, spin_ns: int = 0) -> bool:
        self._used()
        scheduler = self._scheduler
        end_s = math.inf if timeout_ns < 0 else scheduler.now_s + timeout_ns * 1e-9
        while not self._came(number):
            if self._ended:
                raise SessionEndedError
            if scheduler.now_s >= end_s:
                point()
                return False
            self.sleep(number, end_s)
            self._used()
        self.answer(number, answer)
        point()
        return True

    def sleep(self, number: int, end_s: float) -> None:
        """Until something happens to the ticket."""
        ticket = self._tickets[number]
        ticket.waiter = self._scheduler.current
        self._scheduler.block(min(end_s - self._scheduler.now_s, 0.1))
        ticket.waiter = None

    def see(self, number: int) -> int:
        self._used()
        return 1 if self._came(number) else -1 if self._ended else 0

    def announce(self, number: int) -> bool:
        self._used()
        point()
        ticket = self._tickets.get(number)
        if ticket is None:
            return False
        if ticket.state == DONE:
            return True
        ticket.announced = True
        return False

    def watch(self, timeout_ns: int, other: int = -1) -> list[int]:
        end_s = self._scheduler.now_s + timeout_ns * 1e-9
        while True:
            self._used()
            if self._ready:
                ready, self._ready = self._ready, []
                return ready
            if self._ended or self.lost or self._scheduler.now_s >= end_s:
                return []
            self._watcher = self._scheduler.current
            self._scheduler.block(end_s - self._scheduler.now_s)
            self._watcher = None
            point()

    def answer(self, number: int, answer: Completion) -> None:
        self._used()
        if (ticket := self._tickets.get(number)) is None:
            return  # given back meanwhile: whoever asks drops what he reads
        answer.refused, answer.routes_computed = 0, ticket.routes
        answer.queue_ns, answer.kernel_ns, answer.token_ns, answer.name = 1000, 50_000, 1000.0, b"sums"

    def output(self, number: int, request: Any) -> int:
        self._used()
        return int(self._tickets[number].memory.__array_interface__["data"][0])

    def release(self, number: int) -> None:
        self._used()
        if (ticket := self._tickets.get(number)) is not None and ticket.state == DONE:
            self._free(number)
        point()

    def abandon(self, number: int) -> None:
        self._used()
        ticket = self._tickets.get(number)
        if ticket is not None and ticket.state == IN_FLIGHT:
            ticket.state = ABANDONED
        elif ticket is not None and ticket.state == DONE:
            self._free(number)
        point()

    def end(self) -> None:
        self._used()
        self._ended = True
        self._wake_all()
        point()

    @property
    def over(self) -> bool:
        self._used()
        return self._ended

    @property
    def taken(self) -> int:
        return len(self._tickets)

    def close(self) -> None:
        self._used()
        point()
        if not self._ended:
            raise ViolationError("the session's memory is given back, and end() was not called")
        self._freed = True

    # ---- the world ---------------------------------------------------------------------------------------------------

    def lose(self) -> None:
        """The server's process has ended."""
        self.lost = True
        if self._watcher is not None:
            self._scheduler.wake(self._watcher)

    def _done(self, number: int) -> None:
        ticket = self._tickets.get(number)
        if ticket is None or self._freed:
            return
        if ticket.state == ABANDONED:
            self._free(number)
            return
        ticket.state = DONE
        ticket.memory[:] = ticket.output
        if ticket.announced:
            self._ready.append(number)
            if self._watcher is not None:
                self._scheduler.wake(self._watcher)
        elif ticket.waiter is not None:
            self._scheduler.wake(ticket.waiter)

    def _wake_all(self) -> None:
        for thread in [self._watcher, *(ticket.waiter for ticket in self._tickets.values())]:
            if thread is not None:
                self._scheduler.wake(thread)

    def _free(self, number: int) -> None:
        ticket = self._tickets.pop(number)
        ticket.state = FREE
        ticket.memory[:] = np.nan  # whoever reads it now reads what is not his

    def _came(self, number: int) -> bool:
        ticket = self._tickets.get(number)
        return ticket is not None and ticket.state == DONE

    def _used(self) -> None:
        if self._freed:
            raise ViolationError("the session's memory was given back")


class _Addresses(C.Structure):
    _fields_ = [(name, C.c_void_p) for name in ("hidden", "scales", "ids", "weights")]


def array_at(address: int, shape: tuple[int, int], dtype: Any) -> Any:
    return np.frombuffer(C.string_at(address, 4 * shape[0] * shape[1]), dtype).reshape(shape)
