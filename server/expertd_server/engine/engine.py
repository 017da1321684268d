"""The engine: one thread that owns the device.  Requests come in from any thread; outcomes go out through `reply`.

    hold(layers)      what is served from now on; forget(layers) waits until nothing uses what was
    submit(request)   admit it or raise the row of the error table that says why not
    loop              cut -> fill a lane -> launch -> collect -> answer each request

Nothing here knows of messages or transports.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from expertd.errors import DrainingError, ExpertdError, QueueFullError
from expertd_server.engine.admission import Amount, Queue, QueueLimits, State, admit
from expertd_server.engine.batch import Batch
from expertd_server.engine.forecast import Forecast, LayerWork
from expertd_server.engine.halves import unheard
from expertd_server.engine.outcome import batch_outcome, dead_outcome, reply
from expertd_server.engine.pipeline import BatchFailedError, Pipeline
from expertd_server.engine.report import BatchReport, LoadNow, Waits
from expertd_server.engine.request import Request
from expertd_server.engine.scheduler import LastBatch, Policy, Shares, Waiting, cut, trust_after, wake_at
from expertd_server.engine.served import Holding, ServedLayer
from expertd_server.engine.worker import STOPPED, LostError, Worker

__all__ = ["Engine"]

log = logging.getLogger(__name__)

_SMOOTHING = 0.2
"""Weight of the newest batch in the moving average of the service time a token."""


class Engine(Worker):
    """See Worker.  admitted: requests that submit() has taken so far."""

    def __init__(
        self,
        device: torch.device,
        *,
        compute_dtype: str = "bf16",
        policy: Policy,
        limits: QueueLimits | None = None,
        observe: Callable[[BatchReport], None] | None = None,
        on_fault: Callable[[str], None] | None = None,
        warm_routes: Iterable[int] | None = None,
        nonfinite: str = "pass",
        trouble: Callable[[str], None] = unheard,
    ) -> None:
        super().__init__(
            device,
            policy=policy,
            limits=limits,
            observe=observe,
            on_fault=on_fault,
            warm_routes=warm_routes,
            trouble=trouble,
        )
        self.admitted = 0
        self._pipeline = Pipeline(device, compute_dtype, nonfinite, trouble)
        self._forecast = Forecast(policy.max_tokens)
        self._waiting = Waiting(self._forecast)
        self._shares = Shares()
        self._changed = threading.Condition(self._lock)  # something for the engine's thread
        self._left = threading.Condition(self._lock)  # requests left the queue or the device
        self._computing: list[Batch] = []
        self._busy_tokens = self._busy_requests = self._unanswered = 0
        self._token_ns = 0.0
        self._last: LastBatch | None = None
        self._trust = 1.0
        self._stopping = False

    @property
    def stream(self) -> Any:
        """Of an accelerator: what everything is computed on; None on a CPU."""
        return self._pipeline.stream

    @property
    def graph_bytes(self) -> int:
        return self.between(lambda: self._pipeline.graph_bytes)

    # ---- any thread ------------------------------------------------------------------------------------------------

    def hold(self, layers: Iterable[ServedLayer]) -> None:
        """Hold these layers from now on and no others.  A request is computed by what was held when it was taken."""
        holding = Holding(layers)
        self.between(lambda: self._pipeline.reserve(self.policy.max_tokens, holding.values()))
        with self._lock:
            before, self.holding = self.holding, holding
            for s in holding.values():
                if before.get(s.layer) is not s:
                    self._forecast.layer(s.layer, s.top_k, s.measured)

    def forget(self, layers: Iterable[ServedLayer], timeout_s: float | None = None) -> bool:
        """Wait until no request uses any of these layers, which are held no more, and drop what is kept for them.
        False: the time was over before."""
        gone = {s.generation for s in layers}
        with self._lock:
            if not self._left.wait_for(lambda: gone.isdisjoint(self._in_use()), timeout_s):
                return False
        self.between(lambda: self._pipeline.forget(gone))
        return True

    def ask(self, r: Request) -> None:
        """Whether submit() would take `r` now, whose tensors need not be there yet.  Raises what it would."""
        with self._lock:
            now = time.monotonic_ns()
            refusal = admit(self._queue(r, now), r, now, self._limits)
        if refusal is not None:
            raise refusal

    def submit(self, r: Request) -> None:
        """Put `r` into its line.  Raises LayerNotHeldError, or what admit() says."""
        dead: list[Request] = []
        with self._lock:
            r.layer = self.holding.layer(r.layer.layer)  # it may have changed since the request was checked
            r.queued_ns = now = time.monotonic_ns()
            refusal = admit(self._queue(r, now), r, now, self._limits)
            if isinstance(refusal, QueueFullError):
                dead = self._waiting.sweep(now)
                refusal = admit(self._queue(r, now), r, now, self._limits)
            if refusal is None:
                self._waiting.push(r)
                self.admitted += 1
                self._changed.notify()
            if dead:
                self._left.notify_all()
        self._answer_dead(dead)
        if refusal is not None:
            raise refusal

    def load(self) -> LoadNow:
        """How busy it is."""
        w = self._waiting
        draining = self.state is State.DRAINING
        with self._lock:
            wait_ns = int(self._forecast.running_ns(time.monotonic_ns()) + self._forecast.waiting_ns)
        return LoadNow(
            w.tokens + self._busy_tokens, w.requests + self._busy_requests, self._token_ns, draining, wait_ns
        )

    def drain(self) -> None:
        """From now on submit() refuses; what was admitted is computed."""
        with self._lock:
            self.state = State.DRAINING
            self._changed.notify()

    def idle(self) -> bool:
        """Whether nothing waits and nothing is under way."""
        return self._waiting.requests == 0 and self._unanswered == 0

    def stop(self, timeout_s: float | None = None) -> None:
        """Drain, wait for the thread, and end it.  What still waits after timeout_s is answered with DrainingError."""
        with self._lock:
            self.state = State.DRAINING
            self._stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                log.warning("stop: the engine's thread did not end in %.1f s: a batch is computed", timeout_s)
        with self._lock:
            left = self._waiting.clear()
            self._left.notify_all()
        for r in left:
            reply(r, DrainingError(STOPPED))

    def _queue(self, r: Request, now_ns: int) -> Queue:
        w = self._waiting
        own, late_ns = w.of.get(r.caller, Amount()), 0.0
        if r.deadline_ns > now_ns:
            callers = len(w.of) + (not own.requests)
            line = int(r.router_weight_on_input)
            seen = self._forecast.foresee(
                now_ns, r.layer.layer, line, r.tokens, r.top_k, r.deadline_ns, own.routes, callers, w.all.routes
            )
            late_ns, r.foreseen_ns = seen.late_ns, now_ns + int(seen.in_ns) if seen.in_ns else 0
        return Queue(self.state, w.all, own, self._token_ns, late_ns)

    def _in_use(self) -> set[int]:
        """Generations that a request waits for or that are computed."""
        return {line.generation for line in self._waiting.lines} | {b.layer.generation for b in self._computing}

    # ---- the engine's thread -----------------------------------------------------------------------------------------

    def _wake(self) -> None:
        with self._lock:
            self._changed.notify()

    def _abandon(self, error: ExpertdError) -> None:
        with self._lock:
            self.state = State.DRAINING
            left = [*self._waiting.clear(), *(r for b in self._computing for r in b.requests)]
            self._computing.clear()
            self._left.notify_all()
        for r in left:
            reply(r, error)
        self._unanswered = 0

    def _loop(self) -> None:
        while self._step():
            pass

    def _step(self) -> bool:
        """Do the next thing.  Nothing of it is referred to afterwards, so that a forgotten layer's memory goes.
        False: stopped, and nothing is left."""
        pipeline = self._pipeline
        if self._jobs and not pipeline.busy:
            self._do_jobs()
            return True
        batch = self._next()
        if batch is not None:
            self._begin(batch)
        elif pipeline.busy:
            self._finish()
        else:
            return bool(self._jobs)
        if pipeline.full:
            self._finish()
        return True

    def _next(self) -> Batch | None:
        """The next batch.  None: stopped, or something else to do: jobs, or batches under way."""
        waited = False
        while True:
            now = time.monotonic_ns()
            with self._lock:
                if self._jobs:
                    return None
                self._shares.settle(self._waiting.of)
                forecast = self._forecast if self._limits.refuse_late else None
                c = cut(self._waiting.lines, now, self.policy, self._last, self._shares, forecast)
                if c is None:
                    if self._pipeline.busy or (self._stopping and not self._waiting.lines):
                        return None
                    waited = bool(self._waiting.lines)
                    at = wake_at(self._waiting.lines, self.policy, self._last)
                    self._changed.wait(None if at is None else max(0.0, (at - now) / 1e9))
                    continue
                if waited and self._last is not None:
                    self._trust = trust_after(self._trust, self._waiting.requests, self._last.requests)
                    waited = False
                batch = self._batch(c.run, now) if c.run else None
                self._unanswered += len(c.run)
                self._waiting.remove(c)
                for r in c.dead:
                    if r.foreseen_ns and not r.cancelled:
                        self._forecast.dropped(now, self._work(r.layer), r.tokens, r.top_k, r.foreseen_ns)
                self._shares.serve(c.run)
                self._left.notify_all()
            self._answer_dead(c.dead)
            if batch is not None:
                return batch

    def _batch(self, requests: tuple[Request, ...], now_ns: int) -> Batch:
        """`requests` side by side; they count as being computed."""
        rows = [0]
        for r in requests:
            rows.append(rows[-1] + r.tokens)
        b = Batch(requests[0].layer, requests, rows, rows[-1], now_ns)
        self._forecast.begin(now_ns, self._work(b.layer), b.tokens, b.top_k)
        self._computing.append(b)
        self._busy_requests += len(requests)
        self._busy_tokens += b.tokens
        return b

    def _begin(self, b: Batch) -> None:
        """Launch a batch; a failure answers its requests."""
        self._meet(b.top_k, b.layer)
        try:
            self._pipeline.begin(b)
        except BatchFailedError as e:
            self._fail(e)

    def _finish(self) -> None:
        """Wait for the oldest batch under way and answer its requests."""
        try:
            c = self._pipeline.finish()
        except BatchFailedError as e:
            self._fail(e)
            return
        b, stages = c.batch, c.stages
        spent = stages.copy_in_ns + stages.kernel_ns + stages.copy_out_ns
        token_ns = spent / max(1, b.tokens)
        self._token_ns = token_ns if not self._token_ns else self._token_ns + _SMOOTHING * (token_ns - self._token_ns)
        self._shares.saw(sum(r.routes for r in b.requests), spent)
        queue_ns = [max(0, b.cut_ns - r.queued_ns) for r in b.requests]
        over_ns = time.monotonic_ns()
        with self._lock:
            behind_ns = max((over_ns - r.foreseen_ns for r in b.requests if r.foreseen_ns), default=0)
            self._forecast.computed(over_ns, self._work(b.layer), max(b.tokens, b.padded), b.top_k, spent, behind_ns)
        self._leave(b)
        for i, r in enumerate(b.requests):
            reply(r, b.errors.get(i) or batch_outcome(c, i, queue_ns[i]))
            self._unanswered -= 1
        self._pipeline.give_back(c)
        with self._lock:
            out_ns = time.monotonic_ns()
            self._forecast.went_out(out_ns, out_ns - over_ns)
        self._last = LastBatch(time.monotonic_ns(), spent, len(b.requests), self._trust)
        if self._observe is not None:
            try:
                self._observe(
                    BatchReport(
                        b.layer, b.backend, b.tokens, len(b.requests), Waits.of(queue_ns), stages, b.expert_tokens
                    )
                )
            except Exception:  # counting must not end the computing
                log.exception("layer %d: a batch could not be counted", b.layer.layer)

    def _fail(self, e: BatchFailedError) -> None:
        """Answer every request of a batch with its failure.  The engine goes on, unless device or weights are lost."""
        b = e.batch
        log.error("a batch failed: %s", e, exc_info=e.__cause__)
        self._trouble("failed")
        self._leave(b)
        for i, r in enumerate(b.requests):
            reply(r, b.errors.get(i) or e.error)
            self._unanswered -= 1
        if e.fault:
            raise LostError(f"{e.fault} (after a batch of {b.tokens} tokens on backend {b.backend})") from e

    def _leave(self, b: Batch) -> None:
        """`b` is computed: it counts no longer when its answers say what the load is."""
        with self._lock:
            self._computing.remove(b)
            self._forecast.end(time.monotonic_ns())
            self._busy_tokens -= b.tokens
            self._busy_requests -= len(b.requests)
            self._left.notify_all()

    def _work(self, layer: ServedLayer) -> LayerWork:
        return self._forecast.layer(layer.layer, layer.top_k)

    def _answer_dead(self, requests: Sequence[Request]) -> None:
        """Answer requests that left the queue without a batch."""
        for r in requests:
            reply(r, dead_outcome(r))
