"""What the transports share: the server's state, how a message becomes a request, how an outcome becomes bytes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from expertd.dtypes import DTYPE_NUMBER
from expertd.errors import DrainingError, ExpertdError, InternalError, MessageTooLargeError, NotReadyError
from expertd.v1 import expert_service_pb2 as pb
from expertd.wire import ForwardRequestView, ForwardResponseView, TensorView
from expertd_server.engine.request import Answer, Outcome, Request
from expertd_server.service.intake import Intake, Parts, draws_much

if TYPE_CHECKING:
    from expertd_server.engine.engine import Engine
    from expertd_server.views.metrics import Metrics

__all__ = ["Limits", "Mailbox", "Service", "State", "error_of", "response_view"]

log = logging.getLogger(__name__)


class State(Enum):
    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"


class Limits(NamedTuple):
    """max_tokens: of a request.  max_message_bytes: of a received message.  max_in_flight: requests of one stream."""

    max_tokens: int
    max_message_bytes: int
    max_in_flight: int


class Mailbox:
    """Hands things from the engine's thread to the event loop; one wake-up for as many as come together."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: deque[tuple[Callable[[Any, Any], None], Any, Any]] = deque()
        self._armed = False

    def post(self, deliver: Callable[[Any, Any], None], a: Any, b: Any) -> None:
        """Have the loop call deliver(a, b).  From any thread."""
        self._items.append((deliver, a, b))
        if not self._armed:
            self._armed = True
            self._loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        self._armed = False  # before the items: whoever appends after this wakes the loop again
        while self._items:
            deliver, a, b = self._items.popleft()
            deliver(a, b)


class Service:
    """One server's state and the way of a request through it.  Methods are the event loop's unless they say otherwise.

    engine, intake: None until the weights are loaded and checked
    describe: builds the answer of Describe
    open_calls, calls_begun: RPCs of ExpertService, now and ever
    """

    def __init__(self, metrics: Metrics, limits: Limits, loop: asyncio.AbstractEventLoop) -> None:
        self.metrics = metrics
        self.limits = limits
        self.mailbox = Mailbox(loop)
        self.state = State.LOADING
        self.engine: Engine | None = None
        self.intake: Intake | None = None
        self.describe: Callable[[bool], pb.DescribeResponse] | None = None
        self.open_calls = 0
        self.calls_begun = 0
        self.on_drain: set[Callable[[], None]] = set()
        self._loop = loop
        self._draw = ThreadPoolExecutor(1, "expertd-draw")

    def ready(self, engine: Engine, intake: Intake, describe: Callable[[bool], pb.DescribeResponse]) -> None:
        """The weights are loaded and checked: take requests."""
        self.engine, self.intake, self.describe = engine, intake, describe
        if self.state is State.LOADING:
            self.state = State.SERVING
            self.metrics.serving(True)

    def drain(self) -> None:
        """Take nothing new; finish what was admitted."""
        self.state = State.DRAINING
        self.metrics.serving(False)
        if self.engine is not None:
            self.engine.drain()
        for notify in list(self.on_drain):
            notify()

    def close(self) -> None:
        self._draw.shutdown(wait=False, cancel_futures=True)

    def check_size(self, data: bytes) -> None:
        """Raises MessageTooLargeError."""
        self.metrics.bytes_in(len(data))
        if len(data) > self.limits.max_message_bytes:
            raise MessageTooLargeError.about(
                "message",
                got=f"{len(data)} bytes",
                want=f"at most {self.limits.max_message_bytes}",
                remedy="split the batch, or start the server with a larger --max-message-bytes",
            )

    def admit(self) -> tuple[Engine, Intake]:
        """What computes; raises NotReadyError or DrainingError."""
        if self.state is State.DRAINING:
            raise DrainingError("server: it drains and takes no new requests; ask another replica")
        if self.engine is None or self.intake is None:
            raise NotReadyError("server: it loads and checks its weights; wait until its health is SERVING")
        return self.engine, self.intake

    async def check_drawn(self, v: ForwardRequestView) -> Parts:
        """Intake.check on the thread that draws, for a request whose synthetic tensors take long."""
        _, intake = self.admit()
        return await self._loop.run_in_executor(self._draw, intake.check, v)

    def draws_much(self, v: ForwardRequestView) -> bool:
        return self.state is State.SERVING and draws_much(v)

    def request(
        self, p: Parts, start_ns: int, timeout_ns: int, reply: Callable[[Request, Outcome], None], tag: Any
    ) -> Request:
        """timeout_ns: from start_ns; 0 = none."""
        return Request(
            layer=p.layer,
            tokens=p.tokens,
            top_k=p.top_k,
            hidden=p.hidden,
            ids=p.ids,
            weights=p.weights,
            reply=reply,
            arrival_ns=time.monotonic_ns(),
            deadline_ns=start_ns + timeout_ns if timeout_ns else 0,
            router_weight_on_input=p.router_weight_on_input,
            output_dtype=p.output_dtype,
            digest=p.digest,
            tag=tag,
        )

    def load_message(self) -> pb.Load:
        """The load now.  From any thread."""
        if self.engine is None:
            return pb.Load(draining=self.state is State.DRAINING)
        n = self.engine.load()
        return pb.Load(
            queued_tokens=n.queued_tokens,
            queued_requests=n.queued_requests,
            token_ns=n.token_ns,
            draining=n.draining,
        )

    def empty_response(self, p: Parts, request_id: int) -> ForwardResponseView:
        """The answer to a batch of no tokens, for which the engine is not needed."""
        assert self.intake is not None
        v = ForwardResponseView(request_id, load=self.load_message(), timing=pb.Timing())
        if p.digest:
            v.digest = pb.Digest()
        else:
            H = self.intake.layers[p.layer].hidden_size
            v.output = TensorView.of_raw(DTYPE_NUMBER[p.output_dtype], (0, H), b"")
        return v


def response_view(
    r: Request, a: Answer, request_id: int, hidden_size: int, decode_ns: int, load: pb.Load
) -> ForwardResponseView:
    """The answer as a message; its output is a view, valid as long as the answer's."""
    v = ForwardResponseView(request_id, routes_computed=a.routes_computed, load=load)
    v.timing = pb.Timing(
        decode_ns=decode_ns,
        queue_ns=a.queue_ns,
        copy_in_ns=a.stages.copy_in_ns,
        kernel_ns=a.stages.kernel_ns,
        copy_out_ns=a.stages.copy_out_ns,
        encode_ns=a.encode_ns,
        batch_tokens=a.batch_tokens,
        batch_requests=a.batch_requests,
        backend=a.backend,
    )
    if a.digest is not None:
        v.digest = pb.Digest(sum=a.digest[0], sum_of_squares=a.digest[1], crc32=a.digest[2])
    else:
        v.output = TensorView.of_raw(DTYPE_NUMBER[r.output_dtype], (r.tokens, hidden_size), a.output)
    return v


def error_of(e: Exception, what: str) -> ExpertdError:
    """The row that answers `e`; a fault of our own is logged and becomes InternalError."""
    if isinstance(e, ExpertdError):
        return e
    log.exception("%s failed", what)
    return InternalError(f"{what}: {type(e).__name__}: {e}; the server's log has the trace")
