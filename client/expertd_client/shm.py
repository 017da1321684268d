"""Requests through memory that client and server share (expertd.shm): for servers on this host.

Tensors are copied into a block of the region, or lie there already where the caller made them in a slot; the server
writes the output into the same block, which is lent to the caller until the last array over it is gone.  What does not
fit (rows grouped by expert, values that the server draws, digests, more bytes than the region has free) travels inline.

    ShmChannel       ExpertClient: a caller waits for its own answer; a thread reads those that nobody waits for
    AioShmChannel    AsyncExpertClient: everything in its event loop
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from expertd.dtypes import DTYPE_BYTES
from expertd.errors import ExpertdError, RequestCancelledError, UnavailableError
from expertd.shm.client import SPIN_NS, Client, NoRoomError, SessionEndedError
from expertd.shm.layout import FORWARD, Completion, Submission
from expertd.shm.library import LibraryMissingError
from expertd.shm.region import Region, RegionError, supported
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.deadline import Deadline
from expertd_client.lent import Lent
from expertd_client.request import Request
from expertd_client.result import ForwardResult
from expertd_client.shm_message import ALIGN, Sent, refusal, response, result, sendable, submission_of, timing_of
from expertd_client.tensors import over_memory
from expertd_client.transport import ChannelFullError, Closed, Deliver, Ready

__all__ = ["AioShmChannel", "AioShmConnection", "ShmChannel", "ShmConnection", "enter_session"]

_CONNECT_S = 2.0
_SLICE_NS = 100_000_000
"""How long a call may keep the interpreter from looking at signals."""
_LOOK_NS = 500_000_000


class ShmChannel:
    """For ExpertClient."""

    name = "shm"

    def __init__(self) -> None:
        self._readers: list[threading.Thread] = []

    def open(self, answer: pb.SessionAnswer, deliver: Deliver, closed: Closed, ready: Ready) -> None:
        def live() -> None:
            try:
                connection = ShmConnection(enter_session(answer), deliver, closed)
            except UnavailableError as e:
                ready(e)
            else:
                ready(connection)
                connection.read()

        self._readers = [t for t in self._readers if t.is_alive()]
        self._readers.append(threading.Thread(target=live, name="expertd-shm-read", daemon=True))
        self._readers[-1].start()

    def close(self) -> None:
        for reader in self._readers:
            if reader is not threading.current_thread():
                reader.join(2 * _CONNECT_S)


class AioShmChannel:
    """For AsyncExpertClient, whose event loop opens it."""

    name = "shm"

    def __init__(self) -> None:
        self._opening: set[asyncio.Task[None]] = set()

    def open(self, answer: pb.SessionAnswer, deliver: Deliver, closed: Closed, ready: Ready) -> None:
        loop = asyncio.get_running_loop()

        async def enter() -> None:
            entering = _Entering(answer)
            try:
                entered = await loop.run_in_executor(None, entering.run)
            except UnavailableError as e:
                ready(e)
            except asyncio.CancelledError:  # the loop ends; the thread may be about to come back with a session
                entering.abandon()
                raise
            else:
                ready(AioShmConnection(entered, deliver, closed, loop))

        task = loop.create_task(enter())
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def close(self) -> None:
        """What is still opening closes itself."""


class _Entering:
    """enter_session() on a thread, whose result somebody takes, or nobody: then it is closed."""

    def __init__(self, answer: pb.SessionAnswer) -> None:
        self._answer = answer
        self._lock = threading.Lock()
        self._entered: tuple[socket.socket, Client] | None = None
        self._abandoned = False

    def run(self) -> tuple[socket.socket, Client]:
        """Raises UnavailableError."""
        entered = enter_session(self._answer)
        with self._lock:
            self._entered = entered
            if self._abandoned:
                self._close()
        return entered

    def abandon(self) -> None:
        """Close what has come, or is to come."""
        with self._lock:
            self._abandoned = True
            self._close()

    def _close(self) -> None:
        if self._entered is not None:
            sock, client = self._entered
            sock.close()
            client.close()


def enter_session(answer: pb.SessionAnswer) -> tuple[socket.socket, Client]:
    """The session's socket and region.  Raises UnavailableError."""
    missing = supported()
    if missing or not answer.endpoint.startswith("unix-abstract:"):
        raise UnavailableError(f"shared memory: {missing or 'the server names an endpoint of another kind'}")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(_CONNECT_S)
        sock.connect("\0" + answer.endpoint.removeprefix("unix-abstract:"))
        sock.sendall(answer.token.encode())
        client = Client(Region.receive(sock))
        sock.setblocking(False)
        return sock, client
    except (OSError, RegionError, LibraryMissingError) as e:
        sock.close()
        raise UnavailableError(f"shared memory: {e}") from e


class _Connection:
    """What both have in common: requests that are announced, and memory that is lent."""

    def __init__(self, entered: tuple[socket.socket, Client], deliver: Deliver, closed: Closed) -> None:
        self._sock, self._client = entered
        self._deliver, self._closed = deliver, closed
        self._lock = threading.RLock()  # an answer may be collected, and give its memory back, at any moment
        self._tickets: dict[int, int] = {}  # by request id
        self._waiting: dict[int, tuple[int, Sent]] = {}  # by ticket
        self._users = 1  # of the region: this session, calls under way, slots, and answers that are lent
        self._closing = self._over = False
        self._answer = Completion()
        self._held: set[int] = set()  # tickets whose sender waits for them itself

    def takes(self, request: Request) -> bool:
        """Whether it can travel here."""
        return not self._over and sendable(request)

    def forward(self, request_id: int, timeout_us: int, request: Request) -> None:
        self._send(request_id, timeout_us, request, held=False)

    def _send(self, request_id: int, timeout_us: int, request: Request, held: bool) -> None:
        sent = submission_of(request)
        sent.submission.deadline_ns = time.monotonic_ns() + timeout_us * 1000 if timeout_us else 0
        with self._lock:
            if self._over:
                raise ChannelFullError("shared memory: the session is over")
            try:
                ticket = self._client.send(sent.submission, sent.tensors, announced=not held)
            except NoRoomError as e:
                raise ChannelFullError(f"shared memory: {e}") from None
            self._tickets[request_id] = ticket
            self._waiting[ticket] = (request_id, sent)
            if held:
                self._held.add(ticket)

    def cancel(self, request_id: int) -> None:
        with self._lock:
            ticket = self._tickets.pop(request_id, None)
            self._held.discard(ticket or 0)
            if ticket is not None and self._waiting.pop(ticket, None) is not None and not self._over:
                self._client.abandon(ticket)

    def offer(self, offer: pb.SessionOffer) -> None:
        raise AssertionError("a channel is not asked for another one")

    def _gone(self) -> bool:
        """Whether either side has ended the session.  The socket tells when the server's process is gone."""
        if self._closing or self._client.over:
            return True
        try:
            return self._sock.recv(1) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

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
                self._use()
                self._deliver(response(answer, found[0], found[1], self._client, partial(self._back, ticket)))

    def _back(self, ticket: int) -> None:
        """The memory of an answer is not read any more."""
        with self._lock:
            if not self._over:
                self._client.release(ticket)
        self._unuse()

    def _use(self) -> None:
        """Raises ChannelFullError where the session is over: the region may be gone."""
        with self._lock:
            if self._over:
                raise ChannelFullError("shared memory: the session is over")
            self._users += 1

    def _unuse(self) -> None:
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            self._client.close()

    def _end(self) -> None:
        """The session is over: tell, and let go of the region."""
        with self._lock:
            self._over = True
        if self._closing:
            error: ExpertdError = RequestCancelledError("session: closed by this client")
        else:
            error = _ended()
        self._sock.close()
        self._client.end()
        self._unuse()
        self._closed(error)


class ShmConnection(_Connection):
    """One session, from any thread.  read(): for the thread that made it, until the session ends."""

    def __init__(self, entered: tuple[socket.socket, Client], deliver: Deliver, closed: Closed) -> None:
        super().__init__(entered, deliver, closed)
        self._reader = threading.current_thread()

    def call(self, request: Request, deadline: Deadline | None) -> ForwardResult:
        """Sends a request and waits for its answer.  Raises ChannelFullError, and then nothing was sent; else the
        server's error, or DeadlineExceededError."""
        self._use()
        try:
            sent, answer = submission_of(request), Completion()
            ticket = self._send_and_wait(request, sent, answer, deadline)
        except BaseException:
            self._unuse()
            raise
        if not answer.refused:
            return result(answer, sent, request, self._client, partial(self._back, ticket))
        self._back(ticket)
        raise refusal(answer)

    def _send_and_wait(self, request: Request, sent: Sent, answer: Completion, deadline: Deadline | None) -> int:
        """The ticket; answer is filled."""
        sent.submission.deadline_ns = _end_ns(deadline)
        ticket = self._guard(
            lambda wait_ns: self._client.call(sent.submission, sent.tensors, answer, wait_ns, SPIN_NS), deadline
        )
        if ticket < 0:
            ticket = -ticket
            self._wait(ticket, request.layer, answer, deadline)
        return ticket

    def _wait(self, ticket: int, layer: int, answer: Completion, deadline: Deadline | None) -> None:
        """Until the answer of a ticket in flight has come; a request that is given up is taken back."""
        try:
            while not self._guard(lambda wait_ns: self._client.wait(ticket, answer, wait_ns, 0), deadline):
                if deadline is not None and deadline.left_s() == 0.0:
                    raise deadline.expired(layer, 0)
        except BaseException:  # too late, interrupted, or the session is over
            self._client.abandon(ticket)
            raise

    def _guard(self, wait: Callable[[int], int], deadline: Deadline | None) -> int:
        """wait(nanoseconds), a slice at most; its exceptions as ours."""
        wait_ns = _SLICE_NS
        if deadline is not None:
            wait_ns = max(0, min(wait_ns, int(deadline.left_s() * 1e9)))
        try:
            return wait(wait_ns)
        except NoRoomError as e:
            raise ChannelFullError(f"shared memory: {e}") from None
        except SessionEndedError:
            raise RequestCancelledError("session: closed by this client") if self._closing else _ended() from None

    def hold(self, request_id: int, timeout_us: int, request: Request) -> None:
        """forward() for one whose sender waits for it by collect(), and says announce() when he no longer does."""
        self._send(request_id, timeout_us, request, held=True)

    def collect(self, request_id: int, wait_ns: int) -> bool | None:
        """Waits for the answer and delivers it, on this thread.  True: that is done, or the request was taken back;
        False: the time was over first; None: another thread delivers it."""
        with self._lock:
            ticket = self._tickets.get(request_id)
            if ticket is None:
                return True
            if ticket not in self._held or self._over:
                return None
            self._users += 1
        answer = Completion()
        try:
            if not self._client.wait(ticket, answer, wait_ns):
                return False
            with self._lock:
                self._held.discard(ticket)
            self._hand_over([ticket], answer)
            return True
        except SessionEndedError:  # the reading thread tells
            return None
        finally:
            self._unuse()

    def announce(self, request_id: int) -> None:
        """The reading thread delivers it."""
        with self._lock:
            ticket = self._tickets.get(request_id)
            if ticket is None or ticket not in self._held or self._over:
                return
            self._held.discard(ticket)
            self._users += 1
            there = self._client.announce(ticket)
        if there:
            self._hand_over([ticket], Completion())
        self._unuse()

    def slot(self, tokens: int, hidden_size: int, top_k: int, dtype: int) -> _Slot | None:
        """A batch's tensors in the arena; None: there is no room."""
        try:
            return _Slot(self, tokens, hidden_size, top_k, dtype)
        except ChannelFullError:
            return None

    def exchange(self, s: Submission, answer: Completion, layer: int, deadline: Deadline | None) -> None:
        """Sends a submission whose tensors lie in the arena, and fills `answer`.  Raises as call() does."""
        self._use()
        try:
            s.layer, s.deadline_ns = layer, _end_ns(deadline)
            ticket = self._guard(lambda wait_ns: self._client.exchange(s, answer, wait_ns), deadline)
            if ticket:
                self._wait(ticket, layer, answer, deadline)
                self._client.release(ticket)
        finally:
            self._unuse()
        if answer.refused:
            raise refusal(answer)

    def take(self, nbytes: int) -> tuple[int, Lent]:
        """A block of the arena: its offset, and the memory, which goes back by itself.  Raises ChannelFullError."""
        self._use()
        offset = self._client.take(nbytes)
        if offset is None:
            self._unuse()
            raise ChannelFullError("shared memory: the session's memory is in use")

        def give_back() -> None:
            self._client.give(offset)
            self._unuse()

        return offset, Lent.at(self._client.region.arena + offset, nbytes, give_back)

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
            self._hand_over(self._client.watch(self._sock.fileno(), _LOOK_NS), self._answer)
        self._end()


class _Slot:
    """A ChannelSlot."""

    def __init__(self, connection: ShmConnection, tokens: int, hidden_size: int, top_k: int, dtype: int) -> None:
        self._connection, self._answer = connection, Completion()
        tensor, routes = tokens * hidden_size * DTYPE_BYTES[dtype], 4 * tokens * top_k
        sizes = [tensor, routes, routes, tensor]
        room = [-(-n // ALIGN) * ALIGN for n in sizes]
        block, lent = connection.take(sum(room))
        at = [sum(room[:i]) for i in range(4)]
        memory = lent.array()
        parts = [memory[a : a + n] for a, n in zip(at, sizes, strict=True)]
        self.hidden_states = over_memory(parts[0], dtype, (tokens, hidden_size), None)
        self.topk_ids = over_memory(parts[1], pb.DATA_TYPE_I32, (tokens, top_k), None)
        self.topk_weights = over_memory(parts[2], pb.DATA_TYPE_F32, (tokens, top_k), None)
        self.output = over_memory(parts[3], dtype, (tokens, hidden_size), None)
        self.topk_ids[:], self.topk_weights[:] = -1, 0
        s = self._submission = Submission(kind=FORWARD, tokens=tokens, top_k=top_k, hidden_size=hidden_size)
        s.hidden, s.ids, s.weights, s.out = (block + a for a in at)
        s.hidden_dtype = s.out_dtype = dtype
        s.ids_dtype, s.weights_dtype = pb.DATA_TYPE_I32, pb.DATA_TYPE_F32

    def forward(self, layer: int, deadline: Deadline | None) -> tuple[int, Callable[[], pb.Timing]]:
        answer = self._answer
        self._connection.exchange(self._submission, answer, layer, deadline)
        return answer.routes_computed, partial(timing_of, answer)


class AioShmConnection(_Connection):
    """One session, in an event loop."""

    def __init__(
        self,
        entered: tuple[socket.socket, Client],
        deliver: Deliver,
        closed: Closed,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(entered, deliver, closed)
        self._loop = loop
        self._bell = self._client.region.client_bell
        loop.add_reader(self._bell, self._answered)
        loop.add_reader(self._sock, self._look)
        self._answered()  # arms the bell

    def close(self) -> None:
        if not self._over:
            self._closing = True
            self._look()

    def _answered(self) -> None:
        while not self._over and (tickets := self._client.drain()):
            self._hand_over(tickets, self._answer)
        if not self._over and self._client.over:
            self._look()

    def _look(self) -> None:
        if not self._over and self._gone():
            self._loop.remove_reader(self._bell)
            self._loop.remove_reader(self._sock)
            self._end()


def _end_ns(deadline: Deadline | None) -> int:
    """On the monotonic clock, which both sides of a region have in common; 0: none."""
    return 0 if deadline is None else int(deadline.end_s * 1e9)


def _ended() -> UnavailableError:
    return UnavailableError("shared memory: the server ended the session; requests can be sent again")
