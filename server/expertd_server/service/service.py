"""What all transports share: the server's state, and how a request reaches the engine.

    service.forward(view, reply, ...)            one request by itself: a unary call, a facade of another protocol
    ClientConnection(service, outlet, caller)    one connection: any number in flight, cancels, draining (connection.py)

Both may be used from any thread, and neither waits.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from expertd.codec import ForwardRequestView
from expertd.common.trace_context import context_of
from expertd.errors import (
    ExpertdError,
    MessageTooLargeError,
    NotReadyError,
    QueueFullError,
    RequestCancelledError,
)
from expertd.v1 import expert_service_pb2 as pb
from expertd_server.engine.admission import Limits, State, fits, shut
from expertd_server.engine.refusal_texts import refusal
from expertd_server.engine.report import RequestReport
from expertd_server.engine.request import STORAGE, Answer, EngineRequest, Outcome, Reply, Stages
from expertd_server.service.intake import Intake, SyntheticTensors
from expertd_server.service.offers import OfferedTransport, answer_offer
from expertd_server.service.refusals import Refusals
from expertd_server.service.response import error_of, report_of

if TYPE_CHECKING:
    from expertd_server.engine.engine import Engine
    from expertd_server.views.metrics import Metrics

__all__ = ["OpenConnection", "Service"]

_DRAW_AT_ONCE = 1 << 14
"""Elements that may be drawn on the transport's thread: about 0.2 ms."""
_DRAW_LATER = 1 << 25
"""Elements of one caller that may wait to be drawn where no other's do: about half a second."""


class OpenConnection(Protocol):
    """What a Service knows of a ClientConnection."""

    def drain(self) -> None:
        """The server drains from now on."""


class Service:
    """One server's state and the way of a request through it.  From any thread.

    offered: the transports that a session can ask for, or why not; filled before anything listens
    traced: told of requests that their callers trace, None: nobody looks for them; set before anything listens
    """

    def __init__(self, engine: Engine, metrics: Metrics, limits: Limits) -> None:
        self.engine, self.metrics, self.limits = engine, metrics, limits
        self._intake = Intake(engine)
        self._describe: Callable[[bool], pb.DescribeResponse] | None = None
        self.offered: dict[str, OfferedTransport | str] = {}
        self.refusals = Refusals()
        self.traced: Callable[[RequestReport], None] | None = None
        self._connections: set[OpenConnection] = set()
        self._lock = threading.Lock()
        self._unread_bytes = 0
        self._draw = ThreadPoolExecutor(1, "expertd-draw")
        self._to_draw: Counter[str] = Counter()  # elements, by caller

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
            connections = list(self._connections)
        for connection in connections:
            connection.drain()

    def close(self) -> None:
        """Draw nothing any more."""
        self._draw.shutdown(wait=False, cancel_futures=True)

    # ---- requests ----------------------------------------------------------------------------------------------------

    def offer(self, offer: pb.SessionOffer, caller: str) -> pb.SessionAnswer:
        """The answer to an offer of transports."""
        return answer_offer(self.offered, offer, caller)

    def remember(self, connection: OpenConnection) -> None:
        """`connection` is open, and told when the server drains."""
        with self._lock:
            self._connections.add(connection)

    def forget(self, connection: OpenConnection) -> None:
        """`connection` is closed."""
        with self._lock:
            self._connections.discard(connection)

    def refused(self, error: ExpertdError, caller: str, request: str = "") -> str:
        """Count and log a request that is answered with `error`.  request: its id, "" = none.  The id that the log
        has, "" = it has no line of it."""
        self.metrics.answered(error.code.name, error.reason)
        return self.refusals.tell(error, caller, request)

    def reserve(self, own: int, nbytes: int) -> None:
        """Room for an answer of a session that has `own` bytes of answers.  Raises TooManyRequestsError."""
        limit = self.limits.max_unread_bytes
        with self._lock:
            all_ = self._unread_bytes
            if own and not fits(own + nbytes, all_ + nbytes, limit):
                raise refusal("unread_bytes", own=own, all=all_, more=nbytes, most=limit)
            self._unread_bytes += nbytes

    def give_back(self, nbytes: int) -> None:
        """What reserve() gave."""
        with self._lock:
            self._unread_bytes -= nbytes

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
    ) -> EngineRequest:
        """Take one request; reply gets its outcome, maybe before this returns.  Raises the row that refuses it.

        timeout_ns: from arrival_ns, 0 = none.  more: `transport` of the EngineRequest, and the connection's
        traceparent.
        """
        self.ensure_open()
        request, drawing = self.check(view, reply, caller, arrival_ns, timeout_ns, **more)
        self.submit(request, drawing)
        return request

    def check(
        self,
        view: ForwardRequestView,
        reply: Reply,
        caller: str,
        arrival_ns: int,
        timeout_ns: int,
        traceparent: str = "",
        **more: Any,
    ) -> tuple[EngineRequest, SyntheticTensors | None]:
        """The first half of forward()."""
        deadline_ns = arrival_ns + timeout_ns if timeout_ns else 0
        if self.traced is not None and (context := context_of(view.traceparent or traceparent)):
            more["trace"] = context
        return self._intake.request(view, reply, caller=caller, arrival_ns=arrival_ns, deadline_ns=deadline_ns, **more)

    def report(self, r: EngineRequest, outcome: Outcome) -> RequestReport | None:
        """Of a request that its caller traces and that is answered with `outcome` now; None: nobody wants to know."""
        return report_of(r, outcome, time.monotonic_ns()) if self.traced is not None and r.trace else None

    def tell(self, report: RequestReport | None) -> None:
        """What report() found."""
        if self.traced is not None and report is not None:
            self.traced(report)

    def submit(self, r: EngineRequest, drawing: SyntheticTensors | None) -> Future[None] | None:
        """The second half.  A Future while much is drawn: whoever reads requests of this caller waits for it first."""
        if r.tokens == 0:
            _answer_empty(r, r.weights_version or self.engine.holding.version_of(r.layer.layer))
        elif drawing is None:
            self.engine.submit(r)
        elif drawing.elements <= _DRAW_AT_ONCE:
            self.engine.ask(r)
            drawing.fill(r)
            self.engine.submit(r)
        else:
            self.engine.ask(r)
            self._reserve_drawing(r.caller, drawing.elements)
            return self._draw.submit(self._drawn, r, drawing)
        return None

    def _reserve_drawing(self, caller: str, elements: int) -> None:
        """Raises QueueFullError."""
        with self._lock:
            own, all_ = self._to_draw[caller], self._to_draw.total()
            if all_ and not fits(own + elements, all_ + elements, _DRAW_LATER):
                raise QueueFullError.about(
                    "synthetic tensors",
                    got=f"{all_} elements that wait to be drawn, {own} of them this caller's, and {elements} more",
                    want=f"at most {_DRAW_LATER} of one caller, and room for others",
                    remedy="try again after retry_after_us",
                    retry_after_us=all_ // 64,  # a generator makes about 64 million a second
                )
            self._to_draw[caller] += elements

    def _drawn(self, r: EngineRequest, drawing: SyntheticTensors) -> None:
        """submit() of a request for which much is to be drawn.  On the thread that draws."""
        try:
            if r.cancelled:
                raise RequestCancelledError("request: cancelled by its caller")
            drawing.fill(r)
            self.engine.submit(r)
        except Exception as e:
            r.reply(r, error_of(e, "drawing a request's tensors"))
        finally:
            with self._lock:
                self._to_draw[r.caller] -= drawing.elements
                if not self._to_draw[r.caller]:
                    del self._to_draw[r.caller]

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


def _answer_empty(r: EngineRequest, version: int) -> None:
    """The answer to a batch of no tokens, for which the engine is not needed.  version: of the weights that are
    served."""
    r.queued_ns = time.monotonic_ns()
    nothing = np.empty(0, STORAGE[r.output_dtype])
    digest = (0.0, 0.0, 0) if r.digest else None
    r.reply(r, Answer(nothing, digest, 0, 0, 0, Stages(0, 0, 0), 0, 0, "", r.weights_version or version))
