"""What all ways in share: the server's state, and the way of a request to the engine.

    service.forward(view, reply, ...)    one request by itself: a unary call, a facade of another protocol
    service.session(outlet, caller)      one connection: any number in flight, cancels, draining

Both may be used from any thread, and neither waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from expertd.errors import MessageTooLargeError, NotReadyError, RequestCancelledError
from expertd.v1 import expert_service_pb2 as pb
from expertd.wire import ForwardRequestView
from expertd_server.engine.admission import Limits, State, shut
from expertd_server.engine.request import STORAGE, Answer, Reply, Request, Stages
from expertd_server.service.intake import Drawing, Intake
from expertd_server.service.response import error_of
from expertd_server.service.session import Outlet, Session

if TYPE_CHECKING:
    from expertd_server.engine.engine import Engine
    from expertd_server.views.metrics import Metrics

__all__ = ["Service"]

_DRAW_AT_ONCE = 1 << 14
"""Elements that may be drawn on the transport's thread: about 0.2 ms."""


class Service:
    """One server's state and the way of a request through it.  From any thread."""

    def __init__(self, engine: Engine, metrics: Metrics, limits: Limits) -> None:
        self.engine, self.metrics, self.limits = engine, metrics, limits
        self._intake = Intake(lambda: engine.holding, limits.max_tokens)
        self._describe: Callable[[bool], pb.DescribeResponse] | None = None
        self._sessions: set[Session] = set()
        self._lock = threading.Lock()
        self._draw = ThreadPoolExecutor(1, "expertd-draw")

    # ---- life --------------------------------------------------------------------------------------------------------

    def open(self, describe: Callable[[bool], pb.DescribeResponse]) -> None:
        """Take requests, unless it drains already.  describe: the answer of Describe, without or with decisions."""
        self._describe = describe
        self.engine.open()
        self.metrics.serving(self.engine.state is State.SERVING)

    def drain(self) -> None:
        """Take nothing new; finish what was admitted."""
        self.engine.drain()
        self.metrics.serving(False)
        with self._lock:
            sessions = list(self._sessions)
        for session in sessions:
            session.drain()

    def close(self) -> None:
        """Draw nothing any more."""
        self._draw.shutdown(wait=False, cancel_futures=True)

    # ---- requests ----------------------------------------------------------------------------------------------------

    def session(self, outlet: Outlet, caller: str) -> Session:
        """For one connection of `caller`, a peer's address or a name.  It lives until its close()."""
        session = Session(self, outlet, caller)
        with self._lock:
            self._sessions.add(session)
        return session

    def forget(self, session: Session) -> None:
        """`session` is closed."""
        with self._lock:
            self._sessions.discard(session)

    def ensure_open(self) -> None:
        """Raises NotReadyError or DrainingError."""
        refusal = shut(self.engine.state)
        if refusal is not None:
            raise refusal

    def check_size(self, nbytes: int) -> None:
        """Of a received message.  Raises MessageTooLargeError."""
        self.metrics.bytes_in(nbytes)
        if nbytes > self.limits.max_message_bytes:
            raise MessageTooLargeError.about(
                "message",
                got=f"{nbytes} bytes",
                want=f"at most {self.limits.max_message_bytes}",
                remedy="split the batch, or start the server with a larger --max-message-bytes",
            )

    def forward(
        self, view: ForwardRequestView, reply: Reply, *, caller: str, arrival_ns: int, timeout_ns: int = 0, **more: Any
    ) -> Request:
        """Take one request; reply gets its outcome, maybe before this returns.  Raises the row that refuses it.

        timeout_ns: from arrival_ns, 0 = none.  more: `into` and `tag` of the Request.
        """
        self.ensure_open()
        request, drawing = self.check(view, reply, caller, arrival_ns, timeout_ns, **more)
        self.submit(request, drawing)
        return request

    def check(
        self, view: ForwardRequestView, reply: Reply, caller: str, arrival_ns: int, timeout_ns: int, **more: Any
    ) -> tuple[Request, Drawing | None]:
        """The first half of forward()."""
        deadline_ns = arrival_ns + timeout_ns if timeout_ns else 0
        return self._intake.request(view, reply, caller=caller, arrival_ns=arrival_ns, deadline_ns=deadline_ns, **more)

    def submit(self, r: Request, drawing: Drawing | None) -> Future[None] | None:
        """The second half.  A Future while much is drawn: whoever reads requests of this caller waits for it first."""
        if r.tokens == 0:
            _answer_empty(r)
        elif drawing is None:
            self.engine.submit(r)
        elif drawing.elements <= _DRAW_AT_ONCE:
            drawing.fill(r)
            self.engine.submit(r)
        else:
            return self._draw.submit(self._drawn, r, drawing)
        return None

    def _drawn(self, r: Request, drawing: Drawing) -> None:
        """submit() of a request for which much is to be drawn.  On the thread that draws."""
        try:
            if r.cancelled:
                raise RequestCancelledError("request: cancelled by its caller")
            drawing.fill(r)
            self.engine.submit(r)
        except Exception as e:
            r.reply(r, error_of(e, "drawing a request's tensors"))

    # ---- what it says of itself --------------------------------------------------------------------------------------

    def describe(self, decisions: bool) -> pb.DescribeResponse:
        """The answer of Describe.  Raises NotReadyError."""
        if self._describe is None:
            raise NotReadyError("server: it loads and checks its weights; wait until its health is SERVING")
        return self._describe(decisions)

    def load_message(self) -> pb.Load:
        """The load now."""
        n = self.engine.load()
        return pb.Load(
            queued_tokens=n.queued_tokens,
            queued_requests=n.queued_requests,
            token_ns=n.token_ns,
            draining=n.draining,
        )


def _answer_empty(r: Request) -> None:
    """The answer to a batch of no tokens, for which the engine is not needed."""
    r.queued_ns = time.monotonic_ns()
    nothing = np.empty(0, STORAGE[r.output_dtype])
    r.reply(r, Answer(nothing, (0.0, 0.0, 0) if r.digest else None, 0, 0, 0, Stages(0, 0, 0), 0, 0, ""))
