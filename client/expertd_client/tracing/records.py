"""What trace() records: calls, their parts, and modules around them.  Times are nanoseconds of this host's monotonic
clock."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field

from expertd.v1 import expert_service_pb2 as pb
from expertd_client.requests.result import ForwardResult

__all__ = ["FROM_GPU_TO_GPU", "Module", "Recording", "SubRequestTrace", "TracedCall"]


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


class Recording:
    """What a Trace has when it is over, and what is written of it.  end_ns: 0 = it goes on."""

    def __init__(self) -> None:
        self.begin_ns = time.monotonic_ns()
        self.end_ns = 0
        self.calls: list[TracedCall] = []
        self.modules: list[Module] = []

    @property
    def finished(self) -> list[TracedCall]:
        """Calls that were answered while this was active."""
        return [c for c in self.calls if c.end_ns > 0 and (not self.end_ns or c.end_ns <= self.end_ns)]
