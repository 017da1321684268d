"""Connections whose other half is the server's C++ core: what shared memory and TCP have in common.

Requests travel as submissions (expertd.shm.layout).  What has no such form (rows grouped by expert, synthetic tensors,
checksums) goes over the main connection.  The output of an answer is lent to the client until the last array over it is
gone.

    BlockingConnection    ExpertClient: a calling thread waits for its own answer; one thread reads all other answers
    AsyncConnection       AsyncExpertClient: everything in its event loop
"""

from __future__ import annotations

import asyncio
import ctypes as C
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from expertd.errors import ExpertdError, RequestCancelledError, UnavailableError
from expertd.shm.in_flight import SPIN_NS, NoRoomError, RequestsInFlight, SessionEndedError
from expertd.shm.layout import Completion
from expertd_client.requests.deadline import Deadline
from expertd_client.requests.request import Request
from expertd_client.requests.result import ForwardResult
from expertd_client.tracing import TracedCall
from expertd_client.transports.message import Sent, refusal, response, result, sendable, submission_of
from expertd_client.transports.protocol import Closed, ConnectionFullError, Deliver

__all__ = ["SLICE_S", "CoreConnection", "BlockingConnection", "AsyncConnection", "end_ns"]

SLICE_S = 0.1
"""How long a call may keep the interpreter from looking at signals."""
_SLICE_NS = int(SLICE_S * 1e9)
_SPINS_WORTH = 4
"""Answers that usually take longer than so many times the spinning are slept for at once."""
_IDLE_TURN_NS = 40_000
"""A turn of an event loop that takes longer has done something else."""
_LOOK_NS = 500_000_000
"""How long a reading thread waits before it looks whether the session is over."""


class CoreConnection:
    """Requests that are announced, and memory that is lent."""

    what: str
    """In texts of errors."""

    def __init__(self, client: RequestsInFlight, deliver: Deliver, closed: Closed) -> None:
        self._client = client
        self._deliver, self._closed = deliver, closed
        self._lock = threading.RLock()  # an answer may be collected, and give its memory back, at any moment
        self._tickets: dict[int, int] = {}  # by request id
        self._waiting: dict[int, tuple[int, Sent]] = {}  # by ticket
        self._users = 1  # of the memory: this session, calls under way, slots, and answers that are lent
        self._closing = self._over = False
        self._broken: ExpertdError | None = None  # why it was closed; None = this client wanted it
        self._answer = Completion()

    def takes(self, request: Request) -> bool:
        """Whether it can travel here."""
        return not self._over and sendable(request)

    def forward(self, request_id: int, timeout_us: int, request: Request) -> None:
        sent = submission_of(request)
        sent.submission.deadline_ns = time.monotonic_ns() + timeout_us * 1000 if timeout_us else 0
        with self._lock:
            if self._over:
                raise ConnectionFullError(f"{self.what}: the session is over")
            try:
                ticket = self._client.send(sent.submission, sent.tensors, announced=True)
            except NoRoomError as e:
                raise ConnectionFullError(f"{self.what}: {e}") from None
            self._tickets[request_id] = ticket
            self._waiting[ticket] = (request_id, sent)

    def cancel(self, request_id: int) -> None:
        with self._lock:
            ticket = self._tickets.pop(request_id, None)
            if ticket is not None and self._waiting.pop(ticket, None) is not None and not self._over:
                self._client.abandon(ticket)

    @property
    def blocking(self) -> BlockingConnection | None:
        """None: see SessionConnection."""
        return None

    def broke(self, error: ExpertdError) -> None:
        """close(), because the connection beside it ended with `error`."""
        self._broken = error
        self.close()

    def close(self) -> None:
        raise NotImplementedError

    def _gone(self) -> bool:
        """Whether either side has ended the session."""
        return bool(self._closing or self._client.over)

    def _release(self) -> None:
        """The session is over; memory that is lent stays."""

    def _hand_over(self, tickets: Sequence[int], answer: Completion) -> None:
        for ticket in list(tickets):
            self._client.answer(ticket, answer)
            with self._lock:
                found = self._waiting.pop(ticket, None)
                if found is None:  # cancelled meanwhile
                    self._client.release(ticket)
                    continue
                self._tickets.pop(found[0], None)
            if answer.refused:
                self._client.release(ticket)
                self._deliver(refusal(answer).to_request_error(found[0]))
            else:
                with self._lock:  # whoever is here keeps the memory, also where the session has just ended
                    self._users += 1
                self._deliver(
                    response(answer, found[0], found[1], self._output(ticket, found[1]), partial(self._back, ticket))
                )

    def _output(self, ticket: int, sent: Sent) -> int:
        return int(self._client.output(ticket, sent.submission))

    def lost(self) -> ExpertdError:
        """What becomes of requests in flight when the session is over."""
        if self._broken is not None:
            return self._broken.copy()
        if self._closing:
            return RequestCancelledError("session: closed by this client")
        return UnavailableError(f"{self.what}: the server ended the session; requests can be sent again")

    def _back(self, ticket: int) -> None:
        """The memory of an answer is not read any more."""
        with self._lock:
            if not self._over:
                self._client.release(ticket)
            self._users -= 1
            last = self._users == 0
        if last:
            self._close()

    def use(self) -> None:
        """Raises ConnectionFullError where the session is over: its memory may be gone."""
        with self._lock:
            if self._over:
                raise ConnectionFullError(f"{self.what}: the session is over")
            self._users += 1

    def unuse(self) -> None:
        """Once for each use()."""
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            self._close()

    def _close(self) -> None:
        """Nobody uses the memory any more."""
        self._client.close()

    def _end(self) -> None:
        """The session is over: tell, and let go of the memory."""
        with self._lock:
            self._over = True
        error = self.lost()
        self._release()
        self._client.end()
        self.unuse()
        self._closed(error)


class BlockingConnection(CoreConnection):
    """One session, from any thread.  read(): for the thread that made it, until the session ends.

    session      address of its expertd.shm.layout.ConnectionHandle, of use between use() and unuse()
    most_bytes   of a message; 0 = no bound
    """

    most_bytes = 0

    def __init__(self, client: RequestsInFlight, deliver: Deliver, closed: Closed) -> None:
        super().__init__(client, deliver, closed)
        self._reader = threading.current_thread()
        self.session = C.addressof(client.session)

    @property
    def blocking(self) -> BlockingConnection:
        """Itself."""
        return self

    def call(self, request: Request, deadline: Deadline | None, traced: TracedCall | None = None) -> ForwardResult:
        """See CallingConnection."""
        self.use()
        try:
            sent, answer = submission_of(request), Completion()
            if traced is None:
                ticket = self._send_and_wait(request, sent, answer, deadline)
            else:
                ticket = self._send_then_wait(request, sent, answer, deadline, traced)
        except BaseException:
            self.unuse()
            raise
        if answer.refused:
            raise self._refused(ticket, answer)
        output = self._client.output(ticket, sent.submission)
        return result(answer, sent, request, output, partial(self._back, ticket))

    def _refused(self, ticket: int, answer: Completion) -> ExpertdError:
        """Why, of a call that is over with that."""
        self._back(ticket)
        return refusal(answer)

    def expect(self) -> None:
        """A call comes soon: the server may wake up meanwhile."""

    def _send_and_wait(
        self,
        request: Request,
        sent: Sent,
        answer: Completion,
        deadline: Deadline | None,
        beside: Callable[[], object] | None = None,
    ) -> int:
        """The ticket; answer is filled.  beside: called when the request was sent."""
        wait_ns = _SLICE_NS
        if deadline is not None:
            sent.submission.deadline_ns, wait_ns = end_ns(deadline), _slice_ns(deadline)
        try:
            if beside is None:
                ticket = self._client.call(sent.submission, sent.tensors, answer, wait_ns, SPIN_NS)
            else:
                ticket = self._client.call_beside(sent.submission, sent.tensors, answer, wait_ns, SPIN_NS, beside)
        except (NoRoomError, SessionEndedError) as e:
            raise self._ours(e) from None
        if ticket < 0:
            ticket = -ticket
            self._wait(ticket, request.layer, answer, deadline)
        return ticket

    def _send_then_wait(
        self, request: Request, sent: Sent, answer: Completion, deadline: Deadline | None, traced: TracedCall
    ) -> int:
        """_send_and_wait() in two steps, to know when the first was over."""
        sent.submission.deadline_ns = end_ns(deadline)
        ticket = self._guard(
            lambda wait_ns: self._client.send(sent.submission, sent.tensors, announced=False), deadline
        )
        traced.parts[-1].sent()
        self._wait(ticket, request.layer, answer, deadline, SPIN_NS)
        return ticket

    def _wait(self, ticket: int, layer: int, answer: Completion, deadline: Deadline | None, spin_ns: int = 0) -> None:
        """Until the answer of a ticket in flight has come; a request that is given up is taken back."""
        try:
            while not self._guard(lambda wait_ns: self._client.wait(ticket, answer, wait_ns, spin_ns), deadline):
                if deadline is not None and deadline.left_s() == 0.0:
                    raise deadline.expired(layer, 0)
        except BaseException:  # too late, interrupted, or the session is over
            self._client.abandon(ticket)
            raise

    def _guard(self, wait: Callable[[int], int], deadline: Deadline | None) -> int:
        """wait(nanoseconds), a slice at most; its exceptions as ours."""
        try:
            return wait(_slice_ns(deadline))
        except (NoRoomError, SessionEndedError) as e:
            raise self._ours(e) from None

    def _ours(self, error: NoRoomError | SessionEndedError) -> Exception:
        """What a client knows it as."""
        return ConnectionFullError(f"{self.what}: {error}") if isinstance(error, NoRoomError) else self.lost()

    # ---- for a cluster's C++, which sends and waits by `session` -----------------------------------------------------

    def lend(self, ticket: int, sent: Sent, request: Request, answer: Completion) -> ForwardResult:
        """An answer that was not refused.  A use() goes with it."""
        return result(answer, sent, request, self._output(ticket, sent), partial(self._back, ticket))

    def release(self, ticket: int) -> None:
        """Of an answer that is not read any more."""
        self._client.release(ticket)

    def abandon(self, ticket: int) -> None:
        """Of a request in flight that nobody wants any more."""
        self._client.abandon(ticket)

    def adopt(self, request_id: int, ticket: int, sent: Sent) -> None:
        """A request in flight that nobody waits for any more: it is delivered as if forward() had sent it.  Raises
        ConnectionFullError where the session is over."""
        with self._lock:
            if self._over:
                raise ConnectionFullError(f"{self.what}: the session is over")
            self._tickets[request_id] = ticket
            self._waiting[ticket] = (request_id, sent)
            there = self._client.announce(ticket)
        if there:
            self._hand_over([ticket], Completion())

    def close(self) -> None:
        with self._lock:
            self._closing = True
            if not self._over:
                self._client.end()
        if threading.current_thread() is not self._reader:
            self._reader.join()

    def read(self) -> None:
        """Reads what nobody waits for, and looks whether the server is there."""
        while not self._gone():
            self._hand_over(self._client.watch(_LOOK_NS), self._answer)
        self._end()

    def slot(self, tokens: int, hidden_size: int, top_k: int, dtype: int) -> Any:
        """A batch's tensors where the server reads them; None: there is no such place."""
        del tokens, hidden_size, top_k, dtype
        return None


class AsyncConnection(CoreConnection):
    """One session, in an event loop.  bell: becomes readable when answers have come; others: when the session ends."""

    def __init__(
        self,
        client: RequestsInFlight,
        deliver: Deliver,
        closed: Closed,
        loop: asyncio.AbstractEventLoop,
        bell: int,
        *others: int,
    ) -> None:
        super().__init__(client, deliver, closed)
        self._loop, self._fds = loop, (bell, *others)
        self._spins, self._spin_end_ns, self._turn_ns, self._usual_ns = False, 0, 0, 0
        loop.add_reader(bell, self._come)
        for fd in others:
            loop.add_reader(fd, self._look)
        self._come()  # arms the bell

    def forward(self, request_id: int, timeout_us: int, request: Request) -> None:
        super().forward(request_id, timeout_us, request)
        if self._usual_ns < _SPINS_WORTH * SPIN_NS:
            self._turn_ns = time.monotonic_ns()
            self._spin_end_ns = self._turn_ns + SPIN_NS
            if not self._spins:
                self._spins = True
                self._loop.call_soon(self._spin)

    def close(self) -> None:
        if not self._over:
            self._closing = True
            self._look()

    def _spin(self) -> None:
        """Look in each turn of the loop for a while: an answer that comes soon costs no bell, and its server, which
        looks for the next request as long, no sleep.  A loop that has other things to do does not sleep either."""
        if self._over:
            return
        now_ns = time.monotonic_ns()
        idle, self._turn_ns = now_ns - self._turn_ns < _IDLE_TURN_NS, now_ns
        if tickets := self._client.poll():
            self._hand_over(tickets, self._answer)
            self._learn()
        if self._waiting and idle and now_ns < self._spin_end_ns:
            self._loop.call_soon(self._spin)
        else:
            self._spins = False
            self._come()

    def _learn(self) -> None:
        """How long an answer takes, by the last one."""
        took_ns = self._answer.queue_ns + self._answer.collect_ns + self._answer.kernel_ns
        self._usual_ns += (took_ns - self._usual_ns) // 8

    def _come(self) -> None:
        while not self._over and (tickets := self._client.drain()):
            self._hand_over(tickets, self._answer)
            self._learn()
        if not self._over and self._client.over:
            self._look()

    def _look(self) -> None:
        if not self._over and self._gone():
            for fd in self._fds:
                self._loop.remove_reader(fd)
            self._end()


def end_ns(deadline: Deadline | None) -> int:
    """On the monotonic clock of this host; 0: none."""
    return 0 if deadline is None else int(deadline.end_s * 1e9)


def _slice_ns(deadline: Deadline | None) -> int:
    """How long to wait before the interpreter looks at signals, or until the deadline."""
    left_s = SLICE_S if deadline is None else deadline.end_s - time.monotonic()
    return _SLICE_NS if left_s >= SLICE_S else max(0, int(left_s * 1e9))
