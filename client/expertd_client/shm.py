"""Requests through memory that client and server share (expertd.shm): for servers on this host.

Tensors are copied into a block of the region, or lie there already where the caller made them in a slot; the server
writes the output into the same block, which is lent to the caller until the last array over it is gone.  What does not
fit (rows grouped by expert, values that the server draws, digests, more bytes than the region has free) travels inline.
"""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

from expertd.errors import TABLE, ExpertdError, RequestCancelledError, UnavailableError
from expertd.shm.client import Client
from expertd.shm.layout import FORWARD, ROUTER_WEIGHT_ON_INPUT, Completion, Submission
from expertd.shm.library import LibraryMissingError
from expertd.shm.region import Region, RegionError, supported
from expertd.v1 import expert_service_pb2 as pb
from expertd.wire import ForwardResponseView, Spelling, TensorView
from expertd_client.lent import Lent
from expertd_client.request import Request
from expertd_client.transport import Closed, Connection, Deliver

__all__ = ["ShmChannel", "ShmConnection"]

_CONNECT_S = 2.0
_ALIGN = 256
_WAIT_NS = 500_000_000
_SIZES = {
    pb.DATA_TYPE_F32: 4,
    pb.DATA_TYPE_F16: 2,
    pb.DATA_TYPE_BF16: 2,
    pb.DATA_TYPE_I32: 4,
    pb.DATA_TYPE_I64: 8,
}


class ShmChannel:
    """Read by a thread, for ExpertClient."""

    name = "shm"

    def open(self, answer: pb.SessionAnswer, deliver: Deliver, closed: Closed) -> Connection:
        return ShmConnection(_enter(answer), deliver, closed)


def _enter(answer: pb.SessionAnswer) -> tuple[socket.socket, Client]:
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


class ShmConnection:
    """One session.  Thread-safe."""

    def __init__(self, entered: tuple[socket.socket, Client], deliver: Deliver, closed: Closed) -> None:
        self._sock, self._client = entered
        self._deliver, self._closed = deliver, closed
        self._lock = threading.Lock()
        self._tickets: dict[int, int] = {}  # by request id
        self._waiting: dict[int, tuple[int, Submission, int, int, int]] = {}  # by ticket
        self._lent = 0
        self._closing = self._over = False
        self._answer = Completion()
        self._reader = threading.Thread(target=self._read, name="expertd-shm-read", daemon=True)
        self._reader.start()

    def takes(self, request: Request) -> bool:
        """Whether it can travel here."""
        if self._over or request.digest or len(request.dtypes) != 4 or any(d not in _SIZES for d in request.dtypes):
            return False
        if request.tokens == 0 or not hasattr(request.hidden_states, "dtype"):
            return False
        return not any(
            type(x).__name__ == "Synthetic" for x in (request.hidden_states, request.topk_ids, request.topk_weights)
        )

    def forward(self, request_id: int, timeout_us: int, request: Request) -> None:
        view = request.view(request_id, timeout_us)
        tensors = (view.hidden_states, view.topk_ids, view.topk_weights)
        M, H = request.tokens, int(request.hidden_states.shape[1])
        out_bytes = M * H * _SIZES[request.dtypes[0]]  # type: ignore[index]
        sizes = [t.raw.nbytes if isinstance(t.raw, memoryview) else len(t.raw) for t in tensors if t is not None]
        offsets, end = [], 0
        for size in (*sizes, out_bytes):
            offsets.append(end)
            end += -(-size // _ALIGN) * _ALIGN
        with self._lock:
            if self._over:
                raise UnavailableError("shared memory: the session is over")
            block = self._client.take(end)
            if block is None:
                raise UnavailableError(
                    f"shared memory: a request of {end} bytes finds no room; release answers, or send it inline"
                )
            for t, offset, size in zip(tensors, offsets, sizes, strict=False):
                assert t is not None
                self._client.region.view(block + offset, size)[:] = t.raw
            s = Submission(
                deadline_ns=time.monotonic_ns() + timeout_us * 1000 if timeout_us else 0,
                hidden=block + offsets[0],
                ids=block + offsets[1],
                weights=block + offsets[2],
                out=block + offsets[3],
                layer=request.layer,
                tokens=M,
                top_k=request.topk_ids.shape[1],
                kind=FORWARD,
                hidden_dtype=request.dtypes[1],
                ids_dtype=request.dtypes[2],
                weights_dtype=request.dtypes[3],
                out_dtype=request.dtypes[0],
                flags=ROUTER_WEIGHT_ON_INPUT if request.router_weight_on_input else 0,
            )
            ticket = self._client.submit(s, block)
            if not ticket:
                self._client.give(block)
                raise UnavailableError("shared memory: as many requests are in flight as a session holds; try again")
            self._tickets[request_id] = ticket
            self._waiting[ticket] = (request_id, s, request.dtypes[0], M, H)

    def cancel(self, request_id: int) -> None:
        with self._lock:
            ticket = self._tickets.pop(request_id, None)
            if ticket is not None and self._waiting.pop(ticket, None) is not None and not self._over:
                self._client.abandon(ticket)

    def offer(self, offer: pb.SessionOffer) -> None:
        raise AssertionError("a channel is not asked for another one")

    def close(self) -> None:
        self._closing = True
        self._client.end()
        if threading.current_thread() is not self._reader:
            self._reader.join()

    # ---- the reader's thread -----------------------------------------------------------------------------------------

    def _read(self) -> None:
        while not self._gone():
            for ticket in list(self._client.next(_WAIT_NS)):
                self._hand_over(ticket)
        with self._lock:
            self._over = True
        if self._closing:
            error: ExpertdError = RequestCancelledError("session: closed by this client")
        else:
            error = UnavailableError("shared memory: the server ended the session; requests can be sent again")
        self._sock.close()
        self._client.end()
        self._give_back_the_region()
        self._closed(error)

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

    def _hand_over(self, ticket: int) -> None:
        self._client.answer(ticket, self._answer)
        with self._lock:
            found = self._waiting.pop(ticket, None)
            if found is None:  # cancelled meanwhile
                self._client.release(ticket)
                return
            self._tickets.pop(found[0], None)
        if self._answer.refused:
            self._client.release(ticket)
            self._deliver(_error(self._answer, found[0]))
        else:
            self._deliver(self._response(ticket, *found))

    def _response(self, ticket: int, request_id: int, s: Submission, dtype: int, M: int, H: int) -> ForwardResponseView:
        a = self._answer
        memory = self._client.region.view(s.out, M * H * _SIZES[dtype])  # type: ignore[index]
        with self._lock:
            self._lent += 1
        lent = Lent(memory, lambda: self._back(ticket))
        v = ForwardResponseView(
            request_id,
            TensorView(dtype, (M, H), Spelling.RAW, lent.array().data),
            routes_computed=a.routes_computed,
            timing=pb.Timing(
                queue_ns=a.queue_ns,
                copy_in_ns=a.collect_ns,
                kernel_ns=a.kernel_ns,
                copy_out_ns=a.deliver_ns,
                batch_tokens=a.batch_tokens,
                batch_requests=a.batch_requests,
            ),
            load=pb.Load(queued_tokens=a.queued_tokens, queued_requests=a.queued_requests, token_ns=a.token_ns),
        )
        v.give_back = lent.release
        return v

    def _back(self, ticket: int) -> None:
        with self._lock:
            self._lent -= 1
            over = self._over
            if not over:
                self._client.release(ticket)
        if over:
            self._give_back_the_region()

    def _give_back_the_region(self) -> None:
        """When the session is over and no answer of it is in use."""
        with self._lock:
            if not self._over or self._lent:
                return
        self._client.close()


def _error(a: Completion, request_id: int) -> pb.RequestError:
    row: Any = TABLE.get(a.reason.decode(errors="replace"), ExpertdError)
    error: ExpertdError = row(a.text.decode(errors="replace"), retry_after_us=a.retry_after_us)
    return error.to_request_error(request_id)
