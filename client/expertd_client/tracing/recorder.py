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
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar, final

from expertd.errors import UnsupportedCombinationError
from expertd_client.requests.request import Request
from expertd_client.tracing.records import Module, Recording, TracedCall

__all__ = ["Trace", "active", "trace"]

_T = TypeVar("_T")


@final
class Trace(Recording):
    """What was recorded.  Thread-safe while it is active.

    calls       every forward, in the order in which they began
    modules     calls of torch modules, around the forwards that they made
    before_end  what finds out, when the trace ends, what nothing waited for before
    """

    def __init__(self) -> None:
        super().__init__()
        self.before_end: list[Callable[[], None]] = []

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
        from expertd_client.tracing.chrome import as_json  # read by who writes one, and by no caller's process else

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
