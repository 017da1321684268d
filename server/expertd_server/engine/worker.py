"""The thread that owns the device, and work that others have done on it."""

from __future__ import annotations

import abc
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

import torch

from expertd.errors import DrainingError, ExpertdError, InternalError
from expertd_kernels.oracle.probe import use_device
from expertd_server.engine.admission import QueueLimits, State
from expertd_server.engine.policy import Policy
from expertd_server.engine.report import BatchReport
from expertd_server.engine.served import Holding, ServedLayer

# Why it is so: decision 42 in DECISIONS.md.
__all__ = ["STOPPED", "LostError", "Worker"]

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_ENDED = "it ended on a fault of its own; the server's log has the trace"
STOPPED = "server: it stopped before this request's turn came; ask another replica"


class LostError(Exception):
    """Nothing can be computed in this process any more: its accelerator answers every call with an error, or its
    weights are not what was checked."""


class Worker(abc.ABC):
    """Computes requests in batches on one device.

    limits: of the queue; beyond them submit() refuses
    observe: called with one report a batch, or several batches that were added up, on a thread of the engine
    on_fault: called on the engine's thread with one sentence if that thread ends on a fault of its own or the device is
        lost; nothing is computed after it
    trouble: told on the engine's thread of each batch that memory ran out for and that was computed in halves
        ("split"), of each that failed ("failed"), and when nothing is computed any more ("lost")
    warm_routes: numbers of routes a token that kernels were warmed up with, besides each layer's top-k; None: of no
        interest, nothing compiles
    state: SERVING takes requests; holding: what is held now
    """

    def __init__(
        self,
        device: torch.device,
        *,
        policy: Policy,
        limits: QueueLimits | None,
        observe: Callable[[BatchReport], None] | None,
        on_fault: Callable[[str], None] | None,
        warm_routes: Iterable[int] | None,
        trouble: Callable[[str], None],
    ) -> None:
        self._trouble = trouble
        self.policy = policy
        self.state = State.LOADING
        self.holding = Holding()
        self._device, self._limits = device, limits or QueueLimits()
        self._observe, self._on_fault = observe, on_fault
        self._met = None if warm_routes is None else set(warm_routes)
        self._lock = threading.Lock()
        self._jobs: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._running = False
        self._thread = threading.Thread(target=self._run, name="expertd-engine", daemon=True)

    # ---- any thread --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread.  Requests are refused until open()."""
        self._running = True
        self._thread.start()

    def open(self) -> None:
        """Take requests, unless it drains already."""
        with self._lock:
            if self.state is State.LOADING:
                self.state = State.SERVING

    def between(self, work: Callable[[], _T], timeout_s: float | None = None) -> _T:
        """The result of work(), run on the engine's thread while no batch is under way.  Callers wait meanwhile.
        Raises TimeoutError after timeout_s; the work is done all the same."""
        done: Future[_T] | None = None
        with self._lock:
            if self._running and threading.current_thread() is not self._thread:
                done = Future()
                self._jobs.append((work, done))
        if done is None:
            return work()
        self._wake()
        try:
            return done.result(timeout_s)
        except FutureTimeoutError as e:
            raise TimeoutError from e

    # ---- the engine's thread -----------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _loop(self) -> None:
        """Compute until it is stopped.  Raises LostError."""

    @abc.abstractmethod
    def _wake(self) -> None:
        """Have the loop see that there are jobs; from any thread."""

    @abc.abstractmethod
    def _abandon(self, error: ExpertdError) -> None:
        """Take nothing more, and answer what is left with `error`."""

    def _run(self) -> None:
        try:
            use_device(self._device)
            with torch.inference_mode():
                self._loop()
        except LostError as e:
            self._end(str(e), DrainingError(f"server: {e}; ask another replica"))
        except BaseException:
            log.critical("the thread of the engine ended", exc_info=True)
            self._end("the engine failed with an internal error", InternalError(f"engine: {_ENDED}"))
        with self._lock:
            self._running = False
        self._do_jobs()  # nobody computes any more: whoever waits for its job need not wait for ever

    def _end(self, why: str, error: ExpertdError) -> None:
        log.critical("%s; the server accepts no more requests", why)
        self._trouble("lost")
        self._abandon(error)
        if self._on_fault is not None:
            self._on_fault(why)

    def _do_jobs(self) -> None:
        while self._jobs:
            work, done = self._jobs.popleft()
            try:
                done.set_result(work())
            except BaseException as e:
                done.set_exception(e)

    def _meet(self, top_k: int, layer: ServedLayer) -> None:
        """Say so when a number of routes a token comes for the first time: an accelerator's kernels compile then."""
        if self._met is not None and top_k not in self._met and top_k != layer.top_k:
            self._met.add(top_k)
            log.warning(
                "compiling kernels for the first batch with %d routes per token, which may take seconds;"
                " --warm-up-routes %d compiles them at startup",
                top_k,
                top_k,
            )
