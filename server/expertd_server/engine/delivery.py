"""Requests that the core has, and the way of their outcomes to whoever asked.

By a thread of its own, or by an event loop that has borrowed that work (`lend`).  The core rings an eventfd when
outcomes have come, and is asked for them in bunches.  Its reports of batches and of traced requests are fetched here,
too.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from expertd.errors import ExpertdError
from expertd_server.engine import core as c
from expertd_server.engine.convert import digest
from expertd_server.engine.known import BatchTally, KnownLayers
from expertd_server.engine.outcome import hand_over, reply
from expertd_server.engine.refusal_texts import refusal
from expertd_server.engine.report import RequestReport, stages_of
from expertd_server.engine.request import Answer, Array, EngineRequest, Stages

__all__ = ["Delivery", "Waiting"]

_TRANSPORTS = ("", "shm", "tcp")
"""By the core's number."""
_TICK_MS = 500


class Waiting(NamedTuple):
    """A request that the core has.  out: where its output is written, None: into `answer`, the message that is to be
    sent; operands: kept while they may be read."""

    request: EngineRequest
    out: Array | None
    operands: tuple[Any, ...]
    answer: bytes = b""


class Delivery:
    """session_gone: told of sessions in shared memory that have ended, by handle; traced: see Engine.  lock:
    whoever gives a request to the core holds it until that is written down."""

    def __init__(
        self,
        core: c.Core,
        layers: KnownLayers,
        tally: BatchTally,
        session_gone: Callable[[int], None],
        traced: Callable[[RequestReport], None] | None,
    ) -> None:
        self._core, self._layers, self._tally = core, layers, tally
        self._session_gone, self._traced = session_gone, traced
        self._waiting: dict[int, Waiting] = {}  # by handle
        self.lock = threading.Lock()  # of _waiting
        self._delivering = threading.Lock()
        self._ended = False
        self._mine = threading.Event()  # outcomes are handed out by the thread below
        self._mine.set()
        self._thread = threading.Thread(target=self._run, name="expertd-answers", daemon=True)

    @property
    def waiting(self) -> int:
        """Requests that are not answered."""
        return len(self._waiting)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float | None = None) -> bool:
        """Hand out what has come, and end the thread.  False: it has not ended after timeout_s."""
        self._ended = True
        self._mine.set()
        if self._thread.ident is not None:
            os.eventfd_write(self._core.bell, 1)
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def submit(self, f: c.Forward, r: EngineRequest, out: Array, operands: tuple[Any, ...]) -> None:
        """Give a request to the core.  Raises the error that refuses it."""
        with self.lock:  # the outcome may come before the handle is written down
            r.handle, r.on_cancel = self._core.submit(f), self._cancel
            self._waiting[r.handle] = Waiting(r, out, operands)

    def wait_for(self, handle: int, r: EngineRequest, data: bytes, answer: bytes) -> None:
        """`r`, which the message `data` holds, was given to the core under `lock`."""
        r.handle, r.on_cancel = handle, self._cancel
        self._waiting[handle] = Waiting(r, None, (data,), answer)

    def _cancel(self, r: EngineRequest) -> None:
        self._core.cancel(r.handle)

    def take_all(self, timeout_s: float = -1) -> list[Waiting] | None:
        """What waits, which is the caller's to answer from now on.  None: after timeout_s (-1 = for ever) somebody
        still computes a request that he brought."""
        if not self.lock.acquire(timeout=timeout_s):
            return None
        try:
            left = list(self._waiting.values())
            self._waiting.clear()
        finally:
            self.lock.release()
        return left

    # ---- the thread, or whoever borrowed its work --------------------------------------------------------------------

    def lend(self) -> int:
        """From now on the caller hands outcomes out: deliver() whenever the eventfd that this returns can be read, and
        report() when that is done.  So an answer needs no thread between the core and an event loop."""
        self._mine.clear()
        return self._core.bell

    def take_back(self) -> None:
        """The end of lend()."""
        self._mine.set()

    def deliver(self) -> None:
        """Hand out what has come."""
        with self._delivering:
            more = True
            while more:
                outcomes = self._core.outcomes()
                more = len(outcomes) == c.MOST_OUTCOMES
                posted_ns = outcomes[0].posted_ns if outcomes else 0
                for o in outcomes:
                    self._hand_over(o)
                if posted_ns:
                    self._core.went_out(time.monotonic_ns() - posted_ns)

    def report(self, scraped: bool = False) -> None:
        """Count the batches that have ended.  scraped: somebody looks at the numbers now."""
        with self._delivering:
            self._tally.report(scraped)
            if self._traced is not None:
                self._tell_traces(self._traced)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._core.bell, select.POLLIN)
        while not self._ended:
            if self._mine.wait(_TICK_MS / 1000):
                poll.poll(_TICK_MS)
            if self._mine.is_set():
                self.deliver()
            self.report()  # batches of sessions in shared memory ring nobody
        self.deliver()
        self.report()

    def _hand_over(self, o: c.Outcome) -> None:
        if o.session_gone:
            self._session_gone(o.handle)
            return
        with self.lock:
            found = self._waiting.pop(o.handle, None)
        if found is None:
            return
        r, out = found.request, found.out
        if r.cancelled or o.reason:
            reply(r, self._error(o, r))
        elif out is None:
            self._core.answer_message(found.answer, o)
            hand_over(r, found.answer)
        else:
            reply(r, self._answer(o, r, out))

    def _error(self, o: c.Outcome, r: EngineRequest) -> ExpertdError:
        return refusal("cancelled") if r.cancelled else o.error()

    def _answer(self, o: c.Outcome, r: EngineRequest, out: Array) -> Answer:
        start = time.perf_counter_ns()
        summary = digest(out, r.output_dtype) if r.digest else None
        return Answer(
            out,
            summary,
            o.routes_computed,
            o.queue_ns,
            time.perf_counter_ns() - start,
            Stages(o.collect_ns, o.kernel_ns, o.deliver_ns),
            o.batch_tokens,
            o.batch_requests,
            self._layers.backend(o.backend),
            o.weights_version,
        )

    def _tell_traces(self, traced: Callable[[RequestReport], None]) -> None:
        while records := self._core.traces():
            for t in records:
                traced(self._request_report(t))

    def _request_report(self, t: c.TraceRecord) -> RequestReport:
        at = (t.arrival_ns, t.queue_ns, t.collect_ns, t.kernel_ns, t.answered_ns, t.computed_ns)
        return RequestReport(
            bytes(t.trace),
            _TRANSPORTS[t.transport],
            t.layer,
            t.tokens,
            t.top_k,
            c.REASONS[t.reason],
            self._layers.backend(t.backend) if t.computed_ns else "",
            t.batch_tokens,
            t.batch_requests,
            t.arrival_ns,
            t.answered_ns,
            stages_of(*at) if t.computed_ns else (),
            Stages(t.collect_ns, t.kernel_ns, t.deliver_ns) if t.computed_ns else None,
        )
