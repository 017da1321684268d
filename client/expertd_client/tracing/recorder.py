"""trace(): whatever this process calls inside of it is recorded, on every thread and in every event loop.

with expertd_client.trace("step.json") as t:
    model.generate(**prompt, max_new_tokens=1)      # or any calls of a client or a cluster
t.calls                                             # step.json is written

Clients look at `active` once a call; where it is None nothing else happens.  Times are nanoseconds of this host's
monotonic clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, final

from expertd.errors import UnsupportedCombinationError
from expertd.v1 import expert_service_pb2 as pb
from expertd_client.requests.request import Request
from expertd_client.requests.result import ForwardResult

__all__ = ["FROM_GPU_TO_GPU", "Module", "SubRequestTrace", "Trace", "TracedCall", "active", "trace"]

_T = TypeVar("_T")


@dataclass(slots=True)
class SubRequestTrace:
    """What one server was asked for in a call.

    transport     "shm", "inline", ...: what the session had agreed on
    begin_ns      when its sending began; sent_ns: when it was on its way; answered_ns: when the answer was there
    timing        the server's stages; None = nothing was answered, or another server was faster
    """

    server: str
    tokens: int
    begin_ns: int = field(default_factory=time.monotonic_ns)
    sent_ns: int = 0
    answered_ns: int = 0
    transport: str = ""
    timing: pb.Timing | None = None

    def sent(self, transport: str = "") -> None:
        """It is on its way; its answer may be there already."""
        now_ns = time.monotonic_ns()
        self.sent_ns, self.transport = min(now_ns, self.answered_ns or now_ns), transport

    def answered(self, timing: pb.Timing, at_ns: int | None = None) -> None:
        """The answer came, now or at `at_ns`."""
        self.answered_ns = at_ns or time.monotonic_ns()
        self.sent_ns = min(self.sent_ns or self.answered_ns, self.answered_ns)
        self.timing = timing


@dataclass(slots=True)
class TracedCall:
    """One forward.

    thread      name of the thread that called
    split_ns    when it was known who is asked for what; joined_ns: when all answers were there
    end_ns      when the caller had his answer; 0: he has none
    """

    layer: int
    tokens: int
    thread: str = field(default_factory=lambda: threading.current_thread().name)
    begin_ns: int = field(default_factory=time.monotonic_ns)
    split_ns: int = 0
    joined_ns: int = 0
    end_ns: int = 0
    parts: list[SubRequestTrace] = field(default_factory=list)

    def split(self) -> None:
        """The parts are known."""
        self.split_ns = time.monotonic_ns()

    def part(self, server: str, tokens: int) -> SubRequestTrace:
        """One of them is about to be sent."""
        self.parts.append(SubRequestTrace(server, tokens))
        return self.parts[-1]

    def answers_are_there(self) -> None:
        """What is left to do is adding them up."""
        self.joined_ns = time.monotonic_ns()

    def end(self) -> None:
        """The caller has his answer."""
        self.end_ns = time.monotonic_ns()

    def over_at(self, joined_ns: int, end_ns: int) -> None:
        """All answers were there, and the caller had his, at these times: for who records a call when it is over."""
        self.joined_ns, self.end_ns = joined_ns, end_ns

    def landed(self, future: Future[ForwardResult]) -> None:
        """For a future of a call with one part."""
        if not future.cancelled() and future.exception() is None:
            self.parts[-1].answered(future.result().timing)
            self.end()

    def over(self, transport: str, timing: pb.Timing) -> None:
        """For a call with one part that was sent, and waited for, in one step."""
        part = self.parts[-1]
        part.sent_ns, part.transport = part.begin_ns, transport
        part.answered(timing)
        self.end()

    @property
    def answers(self) -> list[SubRequestTrace]:
        """The parts that count."""
        return [part for part in self.parts if part.timing is not None]


FROM_GPU_TO_GPU = "from GPU to GPU"


@dataclass(frozen=True, slots=True)
class Module:
    """One call of a torch module (RemoteExperts): "experts", or its two halves "start" and "wait", on a
    thread of this host.  Where tensors travel from GPU to GPU that is only the time to ask for it, and there is another
    of the name FROM_GPU_TO_GPU, by the clock of the caller's GPU, whose `thread` is that GPU's name."""

    name: str
    layer: int
    thread: str
    begin_ns: int
    end_ns: int
    tokens: int = 0


@final
class Trace:
    """What was recorded.  Thread-safe while it is active.

    calls       every forward, in the order in which they began
    modules     calls of torch modules, around the forwards that they made
    before_end  what finds out, when the trace ends, what nothing waited for before
    """

    def __init__(self) -> None:
        self.begin_ns = time.monotonic_ns()
        self.end_ns = 0
        self.calls: list[TracedCall] = []
        self.modules: list[Module] = []
        self.before_end: list[Callable[[], None]] = []

    @property
    def finished(self) -> list[TracedCall]:
        """Calls that were answered while this was active."""
        return [c for c in self.calls if c.end_ns > 0 and (not self.end_ns or c.end_ns <= self.end_ns)]

    def call(self, request: Request) -> TracedCall:
        """For a client: a forward begins."""
        call = TracedCall(request.layer, request.tokens)
        self.calls.append(call)
        return call

    def single(self, request: Request, server: str) -> TracedCall:
        """The same for a client of one server: there is nothing to split."""
        call = self.call(request)
        call.part(server, request.tokens)
        call.split()
        return call

    def module(self, name: str, layer: int, run: Callable[[], _T]) -> _T:
        """Runs what a torch module does."""
        begin_ns = time.monotonic_ns()
        try:
            return run()
        finally:
            thread = threading.current_thread().name
            self.modules.append(Module(name, layer, thread, begin_ns, time.monotonic_ns()))

    def write(self, path: str | Path) -> None:
        """The trace to `path`, for chrome://tracing and ui.perfetto.dev."""
        from expertd_client.tracing.chrome import as_json

        Path(path).write_text(as_json(self))


active: Trace | None = None
"""What records now; None = nothing does."""
_LOCK = threading.Lock()


@contextmanager
def trace(path: str | Path | None = None) -> Iterator[Trace]:
    """Records what this process calls meanwhile; at the end writes `path`, a JSON for chrome://tracing and
    ui.perfetto.dev; None = nothing is written, see Trace.  A picture of it: expertctl.pictures.trace.

    One at a time in a process: raises UnsupportedCombinationError where another is active."""
    global active
    with _LOCK:
        if active is not None:
            raise UnsupportedCombinationError.about(
                "trace", got="another trace that is active in this process", want="one at a time"
            )
        found = active = Trace()
    try:
        yield found
    finally:
        active = None
        for find_out in found.before_end:
            find_out()
        found.end_ns = time.monotonic_ns()
    if path is not None:
        found.write(path)
