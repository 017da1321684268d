"""The engine around the core in C++ (core.py): the same as Engine in engine.py, which serves where that is not built.

Two threads: one lends itself to the core and computes, or launches, the batches that it returns; one hands the outcomes
of inline requests to their transports, unless an event loop does it (lend_outcomes).  Requests in shared memory meet no
Python at all.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

import numpy as np
import torch

from expertd.dtypes import DTYPE_NUMBER
from expertd.errors import TABLE, DeadlineExceededError, DrainingError, ExpertdError, InternalError
from expertd.shm.pool import Pool
from expertd.shm.region import Region
from expertd_kernels.oracle.probe import use_device
from expertd_kernels.protocol import Direct, DirectExperts, ExpertsLostError
from expertd_server.engine import core as c
from expertd_server.engine.admission import Amount, Queue, QueueLimits, State, admit, shut
from expertd_server.engine.convert import digest
from expertd_server.engine.executor import CpuExecutor, Executor
from expertd_server.engine.outcome import dead_outcome, reply
from expertd_server.engine.report import BatchReport, LoadNow, Waits
from expertd_server.engine.request import STORAGE, Answer, Array, Operand, Outcome, Request, Stages
from expertd_server.engine.scheduler import Policy
from expertd_server.engine.served import Holding, ServedLayer

__all__ = ["NativeEngine"]

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_ENDED = "it ended on a fault of its own; the server's log has the trace"
_SPIN_NS = 50_000
_BRIEF_NS = 50_000
"""A CPU's batch that takes no longer is computed by whoever brings its request, while the core's thread sleeps: that
would not have begun before."""
_POLL_S = 0.001
_TICK_MS = 500
_COUNT_S = 0.5
"""How often a device's counts of routes are fetched at most."""
_SESSIONS = 1 << 62
"""Handles of sessions lie above those of requests."""


class _LostError(Exception):
    """Nothing can be computed in this process any more: its accelerator answers every call with an error, or its
    weights are not what was checked."""


class NativeEngine:
    """See Engine.  observe: called with one record (core.BatchRecord) a batch and its layer, on the thread of the
    outcomes."""

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
        answered: Callable[[str, int], None] | None = None,
    ) -> None:
        self.policy = policy
        self.state = State.LOADING
        self.holding = Holding()
        self._device, self._limits = device, limits or QueueLimits()
        self._observe, self._on_fault, self._answered = observe, on_fault, answered
        self._executor = _executor(device, compute_dtype)
        on_device = self._executor.streams is not None
        self._met = None if warm_routes is None else set(warm_routes)
        self._core = c.Core(
            c.Config(
                lanes=self._executor.lanes,
                max_tokens=policy.max_tokens,
                max_queue_requests=self._limits.requests,
                max_queue_tokens=self._limits.tokens,
                max_queue_routes=self._limits.routes,
                max_queue_bytes=self._limits.nbytes,
                spin_ns=_SPIN_NS,
                brief_ns=_BRIEF_NS,
                patience=0.0 if on_device else policy.patience,
                compute_dtype=DTYPE_NUMBER[compute_dtype],
                device=on_device,
                streamed_rows=self._executor.streamed_rows,
            )
        )
        self._executor.core = self._core
        if self._executor.streams is not None and not self._core.device(
            *(s.cuda_stream for s in self._executor.streams)
        ):
            raise c.CoreMissingError("the CUDA driver lacks what the core needs")
        self._layers: dict[int, tuple[ServedLayer, Array]] = {}  # by generation, until they are forgotten
        self._backends: list[str] = []
        self._requests: dict[int, tuple[Request, Array, tuple[Any, ...]]] = {}  # by handle
        self._left: dict[int, Any] = {}  # requests that were answered while the core might still read them
        self._callers: dict[str, int] = {}
        self._regions: dict[int, Region] = {}
        self._pools: dict[int, Pool] = {}
        self._counted: dict[int, Array] = {}  # routes by expert that were reported, by generation
        self._counts_due_s = 0.0
        self._used: set[int] = set()  # generations that computed since the last look at the counts
        self._numbers = itertools.count(1)
        self._lock, self._delivering = threading.Lock(), threading.Lock()
        self._jobs: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._running = self._ended = False
        self._mine = threading.Event()  # the outcomes are handed out by this engine's own thread
        self._mine.set()
        self._thread = threading.Thread(target=self._run, name="expertd-engine", daemon=True)
        self._answers = threading.Thread(target=self._hand_out, name="expertd-answers", daemon=True)

    @property
    def stream(self) -> Any:
        """Of an accelerator: what everything is computed on; None on a CPU."""
        return None if self._executor.streams is None else self._executor.streams[0]

    @property
    def admitted(self) -> int:
        """Requests taken so far."""
        return int(self._core.load().admitted)

    # ---- any thread --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the threads.  Requests are refused until open()."""
        self._running = True
        self._thread.start()
        self._answers.start()

    def open(self) -> None:
        """Take requests, unless it drains already."""
        with self._lock:
            if self.state is State.LOADING:
                self.state = State.SERVING

    def hold(self, layers: Iterable[ServedLayer]) -> None:
        """Hold these layers from now on and no others.  A request is computed by what was held when it was taken."""
        holding = Holding(layers)
        self.between(lambda: self._reserve(holding))
        with self._lock:
            before, self.holding = self.holding, holding
        for served in holding.values():
            if before.get(served.layer) is not served:
                self._add(served)
        for number in set(before) - set(holding):
            self._core.remove_layer(number)

    def forget(self, layers: Iterable[ServedLayer], timeout_s: float | None = None) -> bool:
        """Wait until no request uses any of these layers, which are held no more, and drop what is kept for them.
        False: the time was over before."""
        gone = {s.generation for s in layers}
        end = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while self.between(lambda: any(map(self._core.waited_for, gone)), end):
                time.sleep(_POLL_S)
        except TimeoutError:
            return False
        self.between(self._drop_unused)
        return True

    def between(self, work: Callable[[], _T], end: float | None = None) -> _T:
        """The result of work(), run on the engine's thread while no batch is under way.  Callers wait meanwhile.
        Raises TimeoutError at the monotonic time `end`; the work is done all the same."""
        with self._lock:
            if not self._running or threading.current_thread() is self._thread:
                done = None
            else:
                done = Future[_T]()
                self._jobs.append((work, done))
        if done is None:
            return work()
        self._core.interrupt()
        try:
            return done.result(None if end is None else max(0.0, end - time.monotonic()))
        except FutureTimeoutError as e:
            raise TimeoutError from e

    def submit(self, r: Request) -> None:
        """Put `r` into its line.  Raises LayerNotHeldError, or what admit() says."""
        closed = shut(self.state)
        if closed is not None:
            raise closed
        r.layer = self.holding.layer(r.layer.layer)  # it may have changed since the request was checked
        r.queued_ns = time.monotonic_ns()
        if r.tokens > self.policy.max_tokens:
            raise InternalError(f"engine: a request of {r.tokens} tokens, want at most {self.policy.max_tokens}")
        into = r.into if r.into is not None and not r.digest else None
        out = np.empty(r.tokens * r.layer.hidden_size, STORAGE[r.output_dtype]) if into is None else into
        operands = (r.hidden, r.ids, r.weights)
        f = c.Forward(
            hidden=_address(r.hidden),
            ids=_address(r.ids),
            weights=0 if r.weights is None else _address(r.weights),
            out=out.ctypes.data,
            bytes=r.nbytes,
            arrival_ns=r.queued_ns,
            deadline_ns=r.deadline_ns,
            layer=r.layer.layer,
            tokens=r.tokens,
            top_k=r.top_k,
            caller=self._caller(r.caller),
            hidden_dtype=DTYPE_NUMBER[r.hidden.dtype],
            ids_dtype=DTYPE_NUMBER[r.ids.dtype],
            weights_dtype=DTYPE_NUMBER["f32" if r.weights is None else r.weights.dtype],
            out_dtype=DTYPE_NUMBER[r.output_dtype],
            router_weight_on_input=r.router_weight_on_input,
        )
        with self._lock:  # the outcome may come before the handle is written down
            handle, reason, _ = self._core.submit(f)
            if not reason:
                r.handle, r.on_cancel = handle, self._cancel
                self._requests[handle] = (r, out, operands)
        if reason:
            raise self._refusal(reason, r)

    def load(self) -> LoadNow:
        """How busy it is."""
        n = self._core.load()
        return LoadNow(n.queued_tokens, n.queued_requests, n.token_ns, self.state is State.DRAINING)

    def drain(self) -> None:
        """From now on submit() refuses; what was admitted is computed."""
        with self._lock:
            self.state = State.DRAINING
        self._core.drain()

    def idle(self) -> bool:
        """Whether nothing waits, is under way or is unanswered."""
        return not self._requests and self._core.load().queued_requests == 0

    def stop(self, timeout_s: float | None = None) -> None:
        """Drain, wait for the threads, and end them.  What still waits after timeout_s is answered with
        DrainingError."""
        self.drain()
        self._core.stop()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        self._ended = True
        self._mine.set()
        if self._answers.ident is not None:
            os.eventfd_write(self._core.bell, 1)
            self._answers.join()
        with self._lock:
            left = dict(self._requests)
            self._requests.clear()
        if self._thread.is_alive():  # a kernel that does not end: what it reads stays, and nothing runs after it
            self._left = left
            for handle in left:
                self._core.cancel(handle)
        for r, _, _ in left.values():
            reply(r, DrainingError("server: it stopped before this request's turn came; ask another replica"))

    # ---- sessions in shared memory: any thread -----------------------------------------------------------------------

    def pool(self, nbytes: int) -> Pool:
        """Memory of the device for a session.  Raises PoolError."""
        return self._executor.pool(nbytes)

    def pool_refusal(self) -> str:
        """Why there is none, "" where there is."""
        return self._executor.pool_refusal()

    def add_session(self, region: Region, caller: str, pool: Pool | None = None) -> int:
        """Serve what comes through `region`, and from a device through `pool`; both are the engine's from now on.  Its
        handle.  Raises OSError where the device cannot be given the memory."""
        self._executor.register(region.address, region.bytes)
        handle = _SESSIONS + next(self._numbers)
        self._regions[handle] = region
        if pool is not None:
            self._pools[handle] = pool
        self._core.add_session(
            handle,
            region.address,
            region.bytes,
            region.entries,
            region.server_bell,
            region.client_bell,
            self._caller(caller),
            (0, 0) if pool is None else (pool.address, pool.bytes),
        )
        return handle

    def remove_session(self, handle: int) -> None:
        """Serve it no more.  The region is closed when nothing uses it."""
        self._core.remove_session(handle)

    def _session_gone(self, handle: int) -> None:
        pool = self._pools.pop(handle, None)
        if pool is not None:
            pool.close()
        region = self._regions.pop(handle, None)
        if region is not None:
            self._executor.unregister(region.address)
            region.close()

    def _drop_unused(self) -> None:
        held = {s.generation for s in self.holding.values()}
        unused = [g for g in self._layers if g not in held and not self._core.waited_for(g)]
        self._executor.forget(set(unused))
        for generation in unused:
            del self._layers[generation]
            self._counted.pop(generation, None)

    def _cancel(self, r: Request) -> None:
        self._core.cancel(r.handle)

    def _reserve(self, holding: Holding) -> None:
        for i, memory in enumerate(self._executor.reserve(self.policy.max_tokens, holding.values())):
            self._core.lane(i, memory)

    def _add(self, s: ServedLayer) -> None:
        counts = np.zeros(len(s.held), np.uint64)
        self._layers[s.generation] = (s, counts)
        plan = s.plan or ((None, s.backend),)
        for _, name in plan:
            if name not in self._backends:
                self._backends.append(name)
        device_slots, device_counts = self._executor.facts(s)
        direct = _direct(s.experts) if self._device.type == "cpu" else Direct(0, 0, 0)
        facts = c.LayerFacts(
            layer=s.layer,
            generation=s.generation,
            hidden_size=s.hidden_size,
            num_experts=s.num_experts,
            held=len(s.held),
            input_weights=1,
            top_k=s.top_k,
            slots=s.slot_of.ctypes.data,
            expert_tokens=counts.ctypes.data,
            device_slots=device_slots,
            device_counts=device_counts,
            call=direct.function,
            context=direct.context,
            experts=direct.experts,
        )
        self._core.add_layer(facts, [(most or 0, self._backends.index(name)) for most, name in plan])

    def _caller(self, name: str) -> int:
        number = self._callers.get(name)
        if number is None:
            if len(self._callers) > 1 << 16:
                self._callers.clear()
            number = self._callers[name] = next(self._numbers)
        return number

    def _refusal(self, reason: str, r: Request) -> ExpertdError:
        """With the words of admission.py, from the same facts."""
        token_ns = self._core.load().token_ns
        waits = self._core.waiting(self._caller(r.caller))
        all_, own = (Amount(w.requests, w.tokens, w.routes, w.bytes) for w in waits)
        queue = Queue(self.state, all_, own, token_ns)
        found = admit(queue, r, time.monotonic_ns(), self._limits)
        return found if found is not None and found.reason == reason else TABLE[reason](f"queue: {reason}")

    # ---- the core's thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            use_device(self._device)
            with torch.inference_mode():
                self._loop()
        except _LostError as e:
            self._end(str(e), DrainingError(f"server: {e}; ask another replica"))
        except BaseException:
            log.critical("the engine's thread ended", exc_info=True)
            self._end("the engine ended on a fault of its own", InternalError(f"engine: {_ENDED}"))
        with self._lock:
            self._running = False
        self._do_jobs()  # nobody computes any more: whoever waits for its job need not wait for ever

    def _loop(self) -> None:
        run = c.Run()
        while (code := self._core.run(run)) != c.STOPPED:
            if code == c.INTERRUPTED:
                self._do_jobs()
            elif code == c.CHECK:
                self._check("a batch has taken a second and more")
            else:
                self._compute(run)
        self._do_jobs()

    def _compute(self, run: c.Run) -> None:
        layer = self._layers[run.generation][0]
        self._meet(run.top_k, layer)
        backend = layer.backend_at(run.tokens)
        batch = f"after a batch of {run.tokens} tokens on backend {backend}"
        try:
            kernel_ns = self._executor.run(run, layer)
        except ExpertsLostError as e:  # no fault of the requests: they are answered as those that wait are
            raise _LostError(f"cache: {e} ({batch})") from e
        except Exception as e:
            log.exception("layer %d, backend %s: a batch of %d tokens failed", layer.layer, backend, run.tokens)
            text = f"backend {backend}, layer {layer.layer}, {run.tokens} tokens: {type(e).__name__}: {e}"
            fault = self._executor.fault()
            self._core.done(run.lane, 0, text)
            if fault:
                raise _LostError(f"the device is lost to this process: {fault} ({batch})") from e
            return
        if kernel_ns is None:
            self._core.launched(run.lane)
        else:
            self._core.done(run.lane, kernel_ns)

    def _meet(self, top_k: int, layer: ServedLayer) -> None:
        """Say so when a number of routes a token comes for the first time: an accelerator's kernels compile then."""
        if self._met is not None and top_k not in self._met and top_k != layer.top_k:
            self._met.add(top_k)
            log.warning(
                "the first batch with %d routes a token: its kernels compile now, which may take seconds;"
                " --warm-up-routes %d does it at boot",
                top_k,
                top_k,
            )

    def _check(self, when: str) -> None:
        if fault := self._executor.fault():
            raise _LostError(f"the device is lost to this process: {fault} ({when})")

    def _do_jobs(self) -> None:
        while self._jobs:
            work, done = self._jobs.popleft()
            try:
                done.set_result(work())
            except BaseException as e:
                done.set_exception(e)

    def _end(self, why: str, error: ExpertdError) -> None:
        """Take nothing more, answer what is left with `error`, and tell."""
        log.critical("%s; the server takes no more requests", why)
        self.deliver()  # the batch that failed is answered with its own error
        with self._lock:
            self.state = State.DRAINING
            left = dict(self._requests)
            self._requests.clear()
        self._core.fail_all("DRAINING" if isinstance(error, DrainingError) else "BACKEND_FAILED", error.message)
        for r, _, _ in left.values():
            reply(r, error)
        if self._on_fault is not None:
            self._on_fault(why)

    # ---- the thread of the outcomes, or whoever borrowed them --------------------------------------------------------

    def lend_outcomes(self) -> int:
        """From now on the caller hands the outcomes out: deliver() whenever the eventfd that this returns can be read,
        and report() when that is done.  So an answer needs no thread between the core and an event loop."""
        self._mine.clear()
        return self._core.bell

    def take_outcomes_back(self) -> None:
        """The end of lend_outcomes()."""
        self._mine.set()

    def deliver(self) -> None:
        """Hand out what has come."""
        with self._delivering:
            more = True
            while more:
                outcomes = self._core.outcomes()
                more = len(outcomes) == c.MOST_OUTCOMES
                for o in outcomes:
                    self._hand_over(o)

    def report(self, scraped: bool = False) -> None:
        """Count the batches that have ended.  scraped: somebody looks at the numbers now."""
        with self._delivering:
            self._report(scraped)

    def _hand_out(self) -> None:
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
        with self._lock:
            found = self._requests.pop(o.handle, None)
        if found is not None:
            reply(found[0], self._outcome(o, found[0], found[1]))

    def _report(self, scraped: bool) -> None:
        try:
            if self._answered is not None:
                for reason, n in zip(c.REASONS, self._core.answered(), strict=True):
                    if n:
                        self._answered(reason, n)
            if self._observe is not None:
                records: list[c.BatchRecord] = []
                while more := self._core.records():
                    records.extend(c.BatchRecord.from_buffer_copy(r) for r in more)
                self._used.update(b.generation for b in records)
                routes = self._routes(scraped)
                for b in records:
                    self._report_batch(b, routes)
        except Exception:  # counting must not end the computing
            log.exception("batches could not be counted")

    def _report_batch(self, b: c.BatchRecord, routes: dict[int, Array]) -> None:
        found = self._layers.get(b.generation)
        if b.failed or self._observe is None or found is None:
            return
        served = found[0]
        stages = Stages(*(ns // b.batches for ns in (b.collect_ns, b.kernel_ns, b.deliver_ns)))
        experts = routes.pop(b.generation, None)
        if experts is None:
            experts = np.zeros(len(served.held), np.int64)
        self._observe(
            BatchReport(
                served,
                self._backends[b.backend],
                b.tokens,
                b.requests,
                Waits(list(b.waits), b.queue_ns),
                stages,
                experts,
                b.batches,
            )
        )

    def _routes(self, scraped: bool) -> dict[int, Array]:
        """New routes by expert since the last look, by generation; a device is asked rarely."""
        now_s = time.monotonic()
        if self._executor.streams is not None and not scraped and now_s < self._counts_due_s:
            return {}
        self._counts_due_s = now_s + _COUNT_S
        out = {}
        for generation in self._used:
            found = self._layers.get(generation)
            if found is not None:
                counts = self._executor.counts(generation)
                now = (found[1] if counts is None else counts).astype(np.int64)
                out[generation] = now - self._counted.get(generation, 0)
                self._counted[generation] = now
        self._used.clear()
        return out

    def _outcome(self, o: c.Outcome, r: Request, out: Array) -> Outcome:
        if r.cancelled:
            return dead_outcome(r)
        if o.reason:
            reason = c.REASONS[o.reason]
            if reason == DeadlineExceededError.reason:
                return dead_outcome(r)
            return TABLE[reason](o.text.decode(errors="replace"))
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
            self._backends[o.backend],
        )


def _direct(experts: object) -> Direct:
    """How the core calls them by itself; zeros where Python must."""
    return experts.direct() if isinstance(experts, DirectExperts) else Direct(0, 0, 0)


def _executor(device: torch.device, compute_dtype: str) -> Executor:
    if device.type == "cpu":
        return CpuExecutor(compute_dtype)
    from expertd_server.engine.device import DeviceExecutor  # needs triton

    return DeviceExecutor(device, compute_dtype)


def _address(operand: Operand) -> int:
    return int(operand.values.ctypes.data)
