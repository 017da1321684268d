"""The engine: what surrounds the core in C++ (core.py, csrc/), which queues, batches and answers requests.

Two threads.  One runs the core's loop and computes, or launches, the batches that the core cannot call by itself
(executor.py, plain.py, device.py).  One hands the outcomes of gRPC requests to their transports (delivery.py), unless
an event loop does that.  Requests in shared memory and over TCP meet no Python at all.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from expertd.codec import ForwardHead
from expertd.common.dtypes import DTYPE_NUMBER
from expertd.errors import (
    DeadlineExceededError,
    DrainingError,
    ExpertdError,
    InternalError,
    OverloadedError,
)
from expertd_kernels.common.protocol import ExpertsLostError
from expertd_server.engine import core as c
from expertd_server.engine.admission import QueueLimits, State, shut
from expertd_server.engine.delivery import Delivery, Waiting
from expertd_server.engine.executor import Executor
from expertd_server.engine.executors import executor_of
from expertd_server.engine.joined import JoinedExecutor, JoinedSpace
from expertd_server.engine.known import BatchTally, KnownLayers
from expertd_server.engine.messages import Messages
from expertd_server.engine.out_of_memory import unheard
from expertd_server.engine.outcome import reply
from expertd_server.engine.policy import NONFINITE, Policy
from expertd_server.engine.refusal_texts import refusal
from expertd_server.engine.report import BatchReport, LoadNow, RequestReport
from expertd_server.engine.request import STORAGE, EngineRequest, Operand
from expertd_server.engine.served import Holding, ServedLayer
from expertd_server.engine.shm_connections import ShmConnections
from expertd_server.engine.tcp_connections import TcpBounds, TcpConnections
from expertd_server.engine.worker import STOPPED, LostError, Worker

__all__ = ["Engine"]

log = logging.getLogger(__name__)

_SPIN_NS = 50_000
_BRIEF_NS = 50_000
"""A CPU's batch that takes no longer is computed by whoever brings its request, while the core's thread sleeps: that
would not have begun before."""
_POLL_S = 0.001
_LEAST_S = 0.05
"""What each thread of an engine that stops is given at least: one that does not hang needs less."""
_hung: list[Engine] = []
"""Stopped with a kernel that does not end on a thread that holds nothing, and kept to the end of the process."""


class Engine(Worker):
    """See Worker.  Raises CoreMissingError where the core is not built.

    nonfinite     of policy.NONFINITE
    answered      see BatchTally; traced: told of requests of sessions that their callers trace, None: nobody looks for
                  them
    sessions      in shared memory; delivery: of outcomes; messages: of gRPC streams, which the core reads
    space         on a CPU: where parts of its layers compute; None: there are none
    launches_why  why the core does not launch the device's batches by itself, "" = it does, or there is no device
    """

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
        trouble: Callable[[str], None] = unheard,
        answered: Callable[[str, int], None] | None = None,
        traced: Callable[[RequestReport], None] | None = None,
        nonfinite: str = "pass",
        space: JoinedSpace | None = None,
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
        warm = () if warm_routes is None else warm_routes
        self._executor: Executor
        if space is None:
            self._executor, self.launches_why = executor_of(device, compute_dtype, warm)
        else:
            self._executor, self.launches_why = JoinedExecutor(compute_dtype, space), ""
        on_device = self._executor.streams is not None
        self._core = c.Core(
            c.Config(
                batch_slots=self._executor.batch_slots,
                max_tokens=policy.max_tokens,
                max_queue_requests=self._limits.requests,
                max_queue_tokens=self._limits.tokens,
                max_queue_routes=self._limits.routes,
                max_queue_bytes=self._limits.nbytes,
                spin_ns=_SPIN_NS,
                brief_ns=_BRIEF_NS,
                max_wait_ns=policy.max_wait_ns,
                patience=0.0 if on_device else policy.patience,
                compute_dtype=DTYPE_NUMBER[compute_dtype],
                device=on_device,
                refuse_late=self._limits.refuse_late,
                nonfinite=NONFINITE.index(nonfinite),
                streamed_rows=self._executor.streamed_rows,
                traces=traced is not None,
            )
        )
        self._executor.core, self._executor.trouble = self._core, trouble
        if on_device and not self._core.device(*(s.cuda_stream for s in self._executor.streams)):
            raise c.CoreMissingError("the CUDA driver lacks what the core needs")
        self._layers = KnownLayers(self._core, self._executor, direct=device.type == "cpu")
        self._tally = BatchTally(self._core, self._layers, observe, answered, on_device)
        self.shm_connections = ShmConnections(self._core, self._executor, self._caller)
        self.delivery = Delivery(self._core, self._layers, self._tally, self.shm_connections.gone, traced)
        self._left: list[Waiting] = []  # requests that were answered while the core might still read them
        self._callers: dict[str, int] = {}
        self._tcp_connections: TcpConnections | None = None
        self._numbers = itertools.count(1)
        self.messages = Messages(self._core, self.delivery, self._caller)

    @property
    def stream(self) -> Any:
        """Of an accelerator: what everything is computed on; None on a CPU."""
        return self._executor.stream

    @property
    def graph_bytes(self) -> int:
        """Of the device's memory, what captured graphs took so far."""
        return self.between(lambda: self._executor.graph_bytes)

    @property
    def admitted(self) -> int:
        """Requests taken so far."""
        return int(self._core.load().admitted)

    # ---- any thread --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the threads.  Requests are refused until open()."""
        super().start()
        self.delivery.start()

    def without_graphs(self, work: Callable[[], object]) -> None:
        """work() while no batch is under way and no graph is captured: for what changes a device so that graphs from
        before would fail.  They are captured anew."""

        def run() -> None:
            self._executor.drop_graphs()
            work()

        self.between(run)

    def hold(
        self,
        layers: Iterable[ServedLayer],
        version: int = 0,
        keep: bool = False,
        others: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """Hold these layers from now on and no others.  A request is computed by what was held when it was taken.

        version   of their weights; others: of layers that are of another one, by index, and may be held already
        keep      what they replace, layer by layer, is still computed for requests that ask for its version, until the
                  next hold()
        """
        now = self.holding
        before = Holding(now.values(), now.version, others=now.others) if keep else None
        holding = Holding(layers, version, before, others)
        self.between(lambda: self._reserve(holding))
        new = [s for s in holding.values() if now.get(s.layer) is not s]
        graphs = self._graphs_of(new, now)
        with self._lock:
            gone, self.holding = self.holding, holding
        for served in new:
            self._layers.add(served, holding.version_of(served.layer), keep)
            for graph in graphs[served.generation]:
                self._core.add_graph(served.layer, served.generation, *graph)
        for number in set(gone) - set(holding):
            self._core.remove_layer(number)
        if not keep and gone.before is not None:
            self._core.drop_kept()

    def _graphs_of(self, new: list[ServedLayer], now: Holding) -> dict[int, list[tuple[int, ...]]]:
        """CUDA graphs of layers before they are served, by generation: of the sizes that the layers before them have.
        Captured one at a time, since callers wait for each."""
        left = [(s, now[s.layer].generation) for s in reversed(new) if s.layer in now]
        if not left:  # and no wait for the batch under way: who removes a layer waits for that once, not twice
            return {s.generation: [] for s in new}

        def capture() -> dict[int, list[tuple[int, ...]]] | None:
            while left:
                if self._executor.capture_like(*left[-1]):
                    return None
                left.pop()
            return {s.generation: self._executor.graphs(s.generation) for s in new}

        while (graphs := self.between(capture)) is None:
            pass
        return graphs

    def forget(self, layers: Iterable[ServedLayer], timeout_s: float | None = None) -> bool:
        """Wait until no request uses any of these layers, which are held no more, and drop what is kept for them.
        False: the time was over before."""
        gone = {s.generation for s in layers}
        end = None if timeout_s is None else time.monotonic() + timeout_s

        def left_s() -> float | None:
            return None if end is None else max(0.0, end - time.monotonic())

        try:
            while self.between(lambda: any(map(self._core.waited_for, gone)), left_s()):
                time.sleep(_POLL_S)
        except TimeoutError:
            return False
        self.delivery.report()  # their last batches, which nobody could name once they are dropped
        while self.between(self._drop_one):  # one after another: a layer may have many graphs, and callers wait
            pass
        return True

    def check(self, request: c.RequestFacts, version: int = 0) -> ServedLayer:
        """The layer that a request is for.  version: of its weights, 0 = whichever is served.  Raises
        LayerNotHeldError, WeightsVersionNotHeldError or the InvalidRequestError that refuses it."""
        self._core.check(request)
        return self._held(request.layer, version)

    def _held(self, layer: int, version: int) -> ServedLayer:
        holding = self.holding
        found = holding.find(layer, version)
        if found is None and layer in holding:
            raise refusal("version_not_held", version=version, held=", ".join(map(str, holding.versions(layer))))
        if found is None:
            raise self._core.not_held(layer)
        return found

    def ask(self, r: EngineRequest) -> None:
        """Whether submit() would take `r` now, whose tensors need not be there yet.  Raises what it would."""
        closed = shut(self.state)
        if closed is not None:
            raise closed
        f = c.Forward(
            bytes=r.nbytes,
            deadline_ns=r.deadline_ns,
            layer=r.layer.layer,
            tokens=r.tokens,
            top_k=r.top_k,
            caller=self._caller(r.caller),
            router_weight_on_input=r.router_weight_on_input,
        )
        if refused := self._core.admits(f):
            raise refused

    def hopeless(self, head: ForwardHead, caller: str, deadline_ns: int) -> ExpertdError | None:
        """Why a request of which no more is known would not be taken now, for the time that it has; None: it may be."""
        f = c.Forward(
            deadline_ns=deadline_ns,
            layer=head.layer,
            tokens=head.tokens,
            top_k=head.top_k,
            caller=self._caller(caller),
        )
        refused = self._core.admits(f)
        return refused if isinstance(refused, OverloadedError | DeadlineExceededError) else None

    def submit(self, r: EngineRequest) -> None:
        """Put `r` into its queue.  Raises LayerNotHeldError, WeightsVersionNotHeldError, or the core's refusal."""
        closed = shut(self.state)
        if closed is not None:
            raise closed
        r.layer = self._held(r.layer.layer, r.weights_version)  # it may have changed since the request was checked
        r.queued_ns = time.monotonic_ns()
        if r.tokens > self.policy.max_tokens:
            raise InternalError(f"engine: a request of {r.tokens} tokens, want at most {self.policy.max_tokens}")
        out = np.empty(r.output_bytes, np.uint8).view(STORAGE[r.output_dtype])
        operands = (r.hidden, r.ids, r.weights)
        f = c.Forward(
            hidden=_address(r.hidden),
            scales=0 if r.hidden.scales is None else r.hidden.scales.ctypes.data,
            ids=_address(r.ids),
            weights=0 if r.weights is None else _address(r.weights),
            out=out.ctypes.data,
            bytes=r.nbytes,
            arrival_ns=r.queued_ns,
            weights_version=r.weights_version,
            deadline_ns=r.deadline_ns,
            layer=r.layer.layer,
            tokens=r.tokens,
            top_k=r.top_k,
            hidden_size=r.layer.hidden_size,
            caller=self._caller(r.caller),
            hidden_dtype=DTYPE_NUMBER[r.hidden.dtype],
            ids_dtype=DTYPE_NUMBER[r.ids.dtype],
            weights_dtype=DTYPE_NUMBER["f32" if r.weights is None else r.weights.dtype],
            out_dtype=DTYPE_NUMBER[r.output_dtype],
            router_weight_on_input=r.router_weight_on_input,
        )
        self.delivery.submit(f, r, out, operands)

    def load(self) -> LoadNow:
        """How busy it is."""
        n = self._core.load()
        return LoadNow(n.queued_tokens, n.queued_requests, n.token_ns, self.state is State.DRAINING, n.wait_ns)

    def drain(self) -> None:
        """From now on submit() refuses; what was admitted is computed."""
        with self._lock:
            self.state = State.DRAINING
        self._core.drain()

    def idle(self) -> bool:
        """Whether nothing waits, is under way or is unanswered."""
        return not self.delivery.waiting and self._core.load().queued_requests == 0

    def stop(self, timeout_s: float | None = None) -> None:
        """Drain, wait for the threads, and end them.  What still waits after timeout_s is answered with
        DrainingError; then the log says which batch does not end."""
        end = None if timeout_s is None else time.monotonic() + timeout_s

        def left_s() -> float | None:
            return None if end is None else max(_LEAST_S, end - time.monotonic())

        self.drain()
        self._core.stop()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        hang = ["the engine's thread"] * self._thread.is_alive()
        if self._tcp_connections is not None and not self._tcp_connections.stop(left_s()):
            hang.append("the thread of sessions over TCP")
        if not self.delivery.stop(left_s()):
            hang.append("the thread of answers")
        left = self.delivery.take_all(-1 if end is None else left_s() or -1)
        if left is None:
            hang.append("a thread that brought a request")
            left = []
        if hang:  # the kernel reads weights, batch slots and requests, which may not be freed before it has ended
            if not self._thread.is_alive():  # that would hold them, through this engine, as long as it takes
                _hung.append(self)  # leaked on purpose
            self._left = left
            for w in left:
                self._core.cancel(w.request.handle)
            log.warning("stop: %s did not end in %.1f s%s", ", ".join(hang), timeout_s or 0.0, self._what_runs())
        for w in left:
            reply(w.request, DrainingError(STOPPED))

    def _what_runs(self) -> str:
        batch = self._core.computing()
        if batch is None:
            return ""
        layer, rows = batch
        served = self.holding.get(layer)
        backend = "" if served is None else f" on backend {served.backend_at(rows)}"
        return (
            f": a batch of {rows} tokens for layer {layer}{backend} is computed; what it reads is kept until that ends"
        )

    def open_tcp_connections(self, bounds: TcpBounds) -> TcpConnections:
        """Serve sessions over TCP; once."""
        if self._tcp_connections is not None:
            raise RuntimeError("engine: it serves sessions over TCP already")
        self._tcp_connections = TcpConnections(self._core, bounds, self._caller)
        return self._tcp_connections

    def _drop_one(self) -> bool:
        """Of the layers that are not used any more.  Whether there was one."""
        now = self.holding
        held = [*now.values(), *(() if now.before is None else now.before.values())]
        dropped = self._layers.drop_one_but({s.generation for s in held})
        self._tally.forget(dropped)
        return bool(dropped)

    def _reserve(self, holding: Holding) -> None:
        for i, memory in enumerate(self._executor.reserve(self.policy.max_tokens, holding.values())):
            self._core.batch_slot(i, memory)

    def _caller(self, name: str) -> int:
        number = self._callers.get(name)
        if number is None:
            if len(self._callers) > 1 << 16:
                self._callers.clear()
            number = self._callers[name] = next(self._numbers)
        return number

    # ---- the core's thread -------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        self._core.interrupt()

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
        layer = self._layers.layer(run.generation)
        self._meet(run.top_k, layer)
        backend = layer.backend_at(run.tokens)
        batch = f"after a batch of {run.tokens} tokens on backend {backend}"
        if run.launch_error:
            log.warning("layer %d: a CUDA graph could not be launched: error %d", layer.layer, run.launch_error)
            self._check(f"launching {run.tokens} tokens for layer {layer.layer}")
        try:
            kernel_ns = self._executor.run(run, layer)
        except ExpertsLostError as e:  # no fault of the requests: they are answered as those that wait are
            raise LostError(f"cache: {e} ({batch})") from e
        except Exception as e:
            log.exception("layer %d, backend %s: a batch of %d tokens failed", layer.layer, backend, run.tokens)
            self._trouble("failed")
            text = f"backend {backend}, layer {layer.layer}, {run.tokens} tokens: {type(e).__name__}: {e}"
            fault = self._executor.fault()
            self._core.done(run.batch_slot, 0, text)
            if fault:
                raise LostError(f"the device is lost to this process: {fault} ({batch})") from e
            return
        if kernel_ns is None:
            self._core.launched(run.batch_slot)
        else:
            self._core.done(run.batch_slot, kernel_ns)

    def _check(self, when: str) -> None:
        if fault := self._executor.fault():
            raise LostError(f"the device is lost to this process: {fault} ({when})")

    def _abandon(self, error: ExpertdError) -> None:
        self.delivery.deliver()  # the batch that failed is answered with its own error
        with self._lock:
            self.state = State.DRAINING
        left = self.delivery.take_all() or []
        self._core.fail_all("DRAINING" if isinstance(error, DrainingError) else "BACKEND_FAILED", error.message)
        for w in left:
            reply(w.request, error)


def _address(operand: Operand) -> int:
    return int(operand.values.ctypes.data)
