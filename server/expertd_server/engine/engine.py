"""The engine: one thread that owns the device.  Requests come in from any thread; outcomes go out through `reply`.

    submit(request)   admit it or raise the row of the error table that says why not
    loop              cut -> fill a lane -> launch -> collect -> answer each request

Nothing here knows of messages or transports.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from expertd.errors import (
    BackendFailedError,
    DeadlineExceededError,
    DrainingError,
    ExpertdError,
    InternalError,
    LayerNotHeldError,
    QueueFullError,
)
from expertd_kernels.oracle.probe import use_device
from expertd_server.engine.batch import Batch, ServedLayer, fill
from expertd_server.engine.convert import digest, output_array
from expertd_server.engine.lane import Inputs, Lane, lanes
from expertd_server.engine.request import Answer, Array, Outcome, Request, Stages
from expertd_server.engine.scheduler import LastBatch, Policy, Waiting, cut, trust_after, wake_at

__all__ = ["BatchReport", "Engine", "LoadNow"]

log = logging.getLogger(__name__)

_ENDED = "it ended on a fault of its own; the server's log has the trace"
_SMOOTHING = 0.2
"""Weight of the newest batch in the moving average of the service time a token."""


class _DeviceLostError(Exception):
    """The accelerator answers every call of this process with an error from now on."""


class LoadNow(NamedTuple):
    """What a caller needs to choose between replicas.  token_ns: recent service time a token."""

    queued_tokens: int
    queued_requests: int
    token_ns: float
    draining: bool


class BatchReport(NamedTuple):
    """One computed batch, for metrics.  backend: the one that computed it; expert_tokens: [experts held] int64, routes
    that each slot served."""

    layer: ServedLayer
    backend: str
    tokens: int
    requests: Sequence[Request]
    queue_ns: Sequence[int]
    stages: Stages
    expert_tokens: Array


class Engine:
    """Computes requests in batches on one device.

    max_queue_tokens, max_queue_requests: beyond them submit() refuses; an empty queue takes any single request
    observe: called on the engine's thread after each batch
    on_fault: called on the engine's thread with one sentence if that thread ends on a fault of its own or the device is
        lost; nothing is computed after it
    admitted: requests that submit() has taken so far
    warm_routes: numbers of routes a token that kernels were warmed up with, besides each layer's top-k; None: of no
        interest, nothing compiles
    """

    def __init__(
        self,
        layers: Mapping[int, ServedLayer],
        device: torch.device,
        *,
        compute_dtype: str = "bf16",
        policy: Policy,
        max_queue_tokens: int = 1 << 17,
        max_queue_requests: int = 4096,
        observe: Callable[[BatchReport], None] | None = None,
        on_fault: Callable[[str], None] | None = None,
        warm_routes: Iterable[int] | None = None,
    ) -> None:
        self.layers = dict(layers)
        self.policy = policy
        self._device, self._dtype = device, compute_dtype
        self._limits = (max_queue_tokens, max_queue_requests)
        self._observe = observe
        self._on_fault = on_fault
        self._lanes = deque(lanes(device, compute_dtype))
        for lane in self._lanes:
            top_k, H = (max(getattr(s, name) for s in layers.values()) for name in ("top_k", "hidden_size"))
            lane.reserve(policy.max_tokens, top_k, H)
        self._met = None if warm_routes is None else {*warm_routes, *(s.top_k for s in layers.values())}
        self._under_way: deque[tuple[Lane, Batch]] = deque()
        self._ids = _Ids()
        self._waiting = Waiting()
        self._changed = threading.Condition(threading.Lock())
        self._draining = self._stopping = False
        self._busy_tokens = self._busy_requests = self._unanswered = 0
        self._token_ns = 0.0
        self._last: LastBatch | None = None
        self._trust = 1.0
        self.admitted = 0
        self._thread = threading.Thread(target=self._run, name="expertd-engine", daemon=True)

    # ---- any thread ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def submit(self, r: Request) -> None:
        """Put `r` into its line.  Raises DrainingError, LayerNotHeldError, QueueFullError or DeadlineExceededError."""
        if r.layer not in self.layers:
            held = ", ".join(map(str, self.layers))
            raise LayerNotHeldError.about("layer", got=r.layer, want=f"one of those held here: {held}")
        with self._changed:
            if self._draining:
                raise DrainingError("server: it drains and takes no new requests; ask another replica")
            expired = self._make_room(r)
            self._waiting.push(r)
            self.admitted += 1
            self._changed.notify()
        self._answer_expired(expired)

    def load(self) -> LoadNow:
        w = self._waiting
        return LoadNow(w.tokens + self._busy_tokens, w.requests + self._busy_requests, self._token_ns, self._draining)

    def drain(self) -> None:
        """From now on submit() refuses; what was admitted is computed."""
        with self._changed:
            self._draining = True
            self._changed.notify()

    def idle(self) -> bool:
        """Whether nothing waits and nothing is under way."""
        return self._waiting.requests == 0 and self._unanswered == 0

    def stop(self, timeout_s: float | None = None) -> None:
        """Drain, wait for the thread, and end it.  What still waits after timeout_s is answered with DrainingError."""
        with self._changed:
            self._draining = self._stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        with self._changed:
            left = self._waiting.clear()
        for r in left:
            self._reply(r, DrainingError("server: it stopped before this request's turn came; ask another replica"))

    def _make_room(self, r: Request) -> list[Request]:
        """Check the bounds of the queue for `r`.  Returns expired requests that were taken out, to be answered."""
        w, (max_tokens, max_requests) = self._waiting, self._limits

        def full() -> bool:
            return w.requests > 0 and (w.tokens + r.tokens > max_tokens or w.requests >= max_requests)

        now = time.monotonic_ns()
        if r.expired(now):
            raise DeadlineExceededError("request: its deadline had passed when it came; want time left to compute it")
        expired = w.sweep(now) if full() else []
        if full():
            raise QueueFullError.about(
                "queue",
                got=f"{w.requests} requests of {w.tokens} tokens waiting and one of {r.tokens} more",
                want=f"at most {max_requests} requests of {max_tokens} tokens",
                remedy="try again after retry_after_us, or another replica",
                retry_after_us=max(1, int(w.tokens * self._token_ns / 1000)),
            )
        return expired

    # ---- the engine's thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            use_device(self._device)
            with torch.inference_mode():
                self._loop()
        except _DeviceLostError as e:
            self._end(f"the device is lost to this process: {e}", DrainingError(f"server: {e}; ask another replica"))
        except BaseException:
            log.critical("the engine's thread ended", exc_info=True)
            self._end("the engine ended on a fault of its own", InternalError(f"engine: {_ENDED}"))

    def _end(self, why: str, error: ExpertdError) -> None:
        """Take nothing more, answer what is left with `error`, and tell."""
        log.critical("%s; the server takes no more requests", why)
        with self._changed:
            self._draining = True
            left = [*self._waiting.clear(), *(r for _, b in self._under_way for r in b.requests)]
        for r in left:
            self._reply(r, error)
        self._unanswered = 0
        if self._on_fault is not None:
            self._on_fault(why)

    def _loop(self) -> None:
        while True:
            batch = self._next()
            if batch is not None:
                self._begin(batch)
            elif self._under_way:
                self._finish()
            else:
                return
            if not self._lanes:
                self._finish()

    def _next(self) -> Batch | None:
        """The next batch.  None: stopped, or nothing to do while batches are under way."""
        waited = False
        while True:
            now = time.monotonic_ns()
            with self._changed:
                c = cut(self._waiting.lines, now, self.policy, self._last)
                if c is None:
                    if self._under_way or (self._stopping and not self._waiting.lines):
                        return None
                    waited = bool(self._waiting.lines)
                    at = wake_at(self._waiting.lines, self.policy, self._last)
                    self._changed.wait(None if at is None else max(0.0, (at - now) / 1e9))
                    continue
                if waited and self._last is not None:
                    self._trust = trust_after(self._trust, self._waiting.requests, self._last.requests)
                    waited = False
                self._busy_requests += len(c.run)
                self._unanswered += len(c.run)
                tokens = sum(r.tokens for r in c.run)
                self._busy_tokens += tokens
                self._waiting.remove(c)
            self._answer_expired(c.expired)
            if c.run:
                rows = [0]
                for r in c.run:
                    rows.append(rows[-1] + r.tokens)
                return Batch(self.layers[c.line.layer], c.run, rows, tokens, now)

    def _meet(self, top_k: int) -> None:
        """Say so when a number of routes a token comes for the first time: an accelerator's kernels compile then."""
        if self._met is not None and top_k not in self._met:
            self._met.add(top_k)
            log.warning(
                "the first batch with %d routes a token: its kernels compile now, which may take seconds;"
                " --warm-up-routes %d does it at boot",
                top_k,
                top_k,
            )

    def _begin(self, b: Batch) -> None:
        """Fill a free lane and launch; a failure answers the batch's requests."""
        lane = self._lanes.popleft()
        start = time.perf_counter_ns()
        try:
            top_k = max(r.top_k for r in b.requests)
            self._meet(top_k)
            b.padded, routes = lane.size(b.tokens, b.layer.capturable), b.tokens * top_k
            inputs = all_rows = lane.open(b.padded, top_k, b.layer.hidden_size)
            if b.padded > b.tokens:  # the rest of the rows has no routes
                all_rows.slots[routes:] = -1
                inputs = Inputs(
                    all_rows.hidden[: b.tokens * b.layer.hidden_size],
                    all_rows.slots[:routes],
                    all_rows.weights[:routes],
                )
            fill(b, inputs, top_k, self._dtype, self._ids.get(routes))
            b.fill_ns = time.perf_counter_ns() - start
            lane.launch(
                b.layer.experts,
                router_weight_on_input=b.requests[0].router_weight_on_input,
                capturable=b.layer.capturable,
            )
        except Exception as e:
            self._fail(lane, b, e)
        else:
            self._under_way.append((lane, b))

    def _finish(self) -> None:
        """Wait for the oldest batch under way and answer its requests."""
        lane, b = self._under_way.popleft()
        try:
            out, stages = lane.collect()
        except Exception as e:
            self._fail(lane, b, e)
            return
        stages = stages._replace(copy_in_ns=stages.copy_in_ns + b.fill_ns)
        spent = stages.copy_in_ns + stages.kernel_ns + stages.copy_out_ns
        token_ns = spent / max(1, b.tokens)
        self._token_ns = token_ns if not self._token_ns else self._token_ns + _SMOOTHING * (token_ns - self._token_ns)
        queue_ns = [max(0, b.cut_ns - r.arrival_ns) for r in b.requests]
        self._leave(b)
        for i, r in enumerate(b.requests):
            self._reply(r, b.errors.get(i) or self._answer(b, i, out, queue_ns[i], stages))
            self._unanswered -= 1
        self._lanes.append(lane)
        self._last = LastBatch(time.monotonic_ns(), spent, len(b.requests), self._trust)
        if self._observe is not None:
            try:
                self._observe(BatchReport(b.layer, b.backend, b.tokens, b.requests, queue_ns, stages, b.expert_tokens))
            except Exception:  # counting must not end the computing
                log.exception("layer %d: a batch could not be counted", b.layer.layer)

    def _answer(self, b: Batch, i: int, out: Tensor, queue_ns: int, stages: Stages) -> Outcome:
        r = b.requests[i]
        start = time.perf_counter_ns()
        try:
            values = output_array(out[b.rows[i] : b.rows[i + 1]], r.output_dtype)
            summary = digest(values, r.output_dtype) if r.digest else None
        except Exception as e:
            log.exception("layer %d: an output could not be converted", r.layer)
            return InternalError(f"output of layer {r.layer} to {r.output_dtype}: {type(e).__name__}: {e}")
        return Answer(
            values,
            summary,
            b.routes[i],
            queue_ns,
            time.perf_counter_ns() - start,
            stages,
            b.tokens,
            len(b.requests),
            b.backend,
        )

    def _fail(self, lane: Lane, b: Batch, e: Exception) -> None:
        """Answer every request of `b` with the failure.  The engine goes on, unless the device is lost."""
        backend = b.backend
        log.exception("layer %d, backend %s: a batch of %d tokens failed", b.layer.layer, backend, b.tokens)
        text = f"backend {backend}, layer {b.layer.layer}, {b.tokens} tokens: {type(e).__name__}: {e}"
        fault = lane.fault()
        self._leave(b)
        for i, r in enumerate(b.requests):
            self._reply(r, b.errors.get(i) or BackendFailedError(text))
            self._unanswered -= 1
        self._lanes.append(lane)
        if fault:
            raise _DeviceLostError(f"{fault} (after a batch of {b.tokens} tokens on backend {backend})") from e

    def _leave(self, b: Batch) -> None:
        """`b` is computed: it counts no longer when its answers say what the load is."""
        self._busy_tokens -= b.tokens
        self._busy_requests -= len(b.requests)

    def _answer_expired(self, requests: Sequence[Request]) -> None:
        for r in requests:
            waited_ms = (time.monotonic_ns() - r.arrival_ns) / 1e6
            self._reply(
                r,
                DeadlineExceededError(
                    f"request of {r.tokens} tokens for layer {r.layer}: its deadline passed while it waited"
                    f" {waited_ms:.1f} ms in the queue; it was not computed"
                ),
            )

    def _reply(self, r: Request, outcome: Outcome) -> None:
        try:
            r.reply(r, outcome)
        except Exception as e:  # a transport's fault must not end the engine, nor leave its caller waiting
            log.exception("layer %d: an outcome could not be handed over", r.layer)
            if not isinstance(outcome, ExpertdError):
                self._reply(r, InternalError(f"answer of layer {r.layer}: {type(e).__name__}: {e}"))


class _Ids:
    """Reused room for a batch's global ids."""

    def __init__(self) -> None:
        self._room = np.empty(0, np.int64)

    def get(self, count: int) -> Array:
        if count > len(self._room):
            self._room = np.empty(1 << (count - 1).bit_length(), np.int64)
        return self._room[:count]
