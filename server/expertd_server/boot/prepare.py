"""One layer on one backend: mapped from the cache, or loaded, packed and written there; checked before it serves.

    prepare(backend, assignment, canonical, workshop) -> Prepared, or BackendRejectedError with the reason

A layer that is mapped needs no canonical weights: it is checked with the proof that lies beside it, made of the float32
reference and of the answer that passed when the entry was written.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from expertd_kernels.backends.rounding import round_groups
from expertd_kernels.common.problem import Problem
from expertd_kernels.common.protocol import CompiledExperts, E4m3Experts, Experts, Packed, takes_e4m3
from expertd_kernels.common.refused import Refused
from expertd_kernels.measure.surface import Point
from expertd_kernels.native.library import on_node
from expertd_kernels.oracle.decision import Backend
from expertd_kernels.oracle.probe import device_fault, use_device
from expertd_kernels.packed.builder import experts_of, pack
from expertd_kernels.packed.cache import Found, PackedCache
from expertd_kernels.packed.integrity import IntegrityRecord, boot_reference_experts, prove
from expertd_kernels.packed.selfcheck import SelfCheck, accept, check
from expertd_kernels.packed.watched import WatchedExperts
from expertd_kernels.sources.source import ExpertSource
from expertd_kernels.sources.synthetic import random_inputs
from expertd_kernels.weights.digest import expert_digests
from expertd_kernels.weights.numerics import COMPUTE_DTYPE
from expertd_server.boot.ahead import ReadAhead
from expertd_server.boot.assignment import Assignment, BootError
from expertd_server.boot.choice import BackendRejectedError
from expertd_server.boot.compiling import KernelsAhead, calls_to_compile, warm_sizes
from expertd_server.boot.memory import MemoryPlan, give_back, settle
from expertd_server.engine.joined import JoinedSpace
from expertd_server.engine.plain import LAST, compute_stream

if TYPE_CHECKING:
    from expertd_kernels.weights.canonical import Weights

__all__ = ["LayerWeights", "Prepared", "Workshop", "prepare", "warm_up", "will_read"]

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_WARM_UP_CPU = (1, 32)
"""Batch sizes that are run once before SERVING where nothing compiles."""


@dataclass(frozen=True, eq=False)
class Workshop:
    """What preparing any layer of a server needs and counts.

    cache    None: nothing is kept on disk; files: the state of the checkpoint's files, part of an entry's key
    max_tokens  of a batch: up to it an accelerator's kernels are warmed up
    routes   a token, besides each layer's top-k, with which they are warmed up, too
    memory   what the server was found to have room for
    stream   of an accelerator: what requests are computed on, with its scratch memory; None = the current one
    alone    runs work while nothing else computes on that stream
    kernels  compiled by other processes meanwhile; None: none are
    route_s  for tests: so much longer for each token of an expert; parts_s: at each site
    seconds  spent by stage of the boot: "load" (waiting for what is read), "copy" (to the device), "measure", "pack",
             "compile", "check", "store", "map", "warm_up"
    reading  seconds of reading and bytes fetched from storage
    compiled kinds of layers whose kernels are compiled
    proven   schemes and shapes of layers that a proof was made for
    lookups  in the cache, by outcome: "hit", "miss", "stale", "damaged"
    space    where the parts of layers compute that devices share; None: there is one device
    name     of the device, as in --device
    surfaces what was measured of layers so far (surfaces.py)
    node     memory node of a CPU, None = all
    """

    source: ExpertSource
    device: torch.device
    cache: PackedCache | None = None
    files: str = ""
    max_tokens: int = 1024
    routes: Sequence[int] = ()
    memory: MemoryPlan | None = None
    stream: Any = None
    alone: Callable[[Callable[[], Any]], Any] = lambda work: work()
    kernels: KernelsAhead | None = None
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    lookups: Counter[str] = field(default_factory=Counter)
    reading: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    compiled: set[tuple[Any, ...]] = field(default_factory=set)
    proven: set[tuple[Any, ...]] = field(default_factory=set)
    route_s: float = 0.0
    parts_s: Sequence[float] = ()
    space: JoinedSpace | None = None
    node: int | None = None
    name: str = ""
    surfaces: dict[tuple[str, ...], tuple[Point, ...]] = field(default_factory=dict)

    def at(self, site: int) -> Workshop:
        """Of the part at that site of the space."""
        assert self.space is not None
        where = self.space.sites[site]
        return replace(
            self,
            device=where.device,
            stream=where.stream,
            memory=None if self.memory is None else self.memory.of(where.name),
            route_s=(self.parts_s[site] if self.parts_s else self.route_s) if where.device.type == "cpu" else 0.0,
            space=None,
            node=where.node,
            name=where.name,
        )

    @property
    def each(self) -> list[Workshop]:
        """Of every site, or this."""
        return [self] if self.space is None else [self.at(i) for i in range(len(self.space.sites))]

    def give_back(self) -> None:
        """To the devices what nothing uses any more."""
        for device in dict.fromkeys(w.device for w in self.each):
            give_back(device)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the time of its body to seconds[name]."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def computing(self) -> contextlib.AbstractContextManager[Any]:
        """On the stream that requests are computed on, after all that other streams were given."""
        if self.stream is not None:
            getattr(torch, self.device.type).synchronize(self.device)
        return self._on(self.stream)

    def preparing(self) -> contextlib.AbstractContextManager[Any]:
        """On a stream of its own, of low priority: weights are read and packed while requests are computed."""
        return self._on(_packing_stream(self.device))

    def _on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """On `stream` of an accelerator, None = the current one; or on the memory node."""
        if stream is None:
            return on_node(self.node)
        use_device(self.device)
        return cast("contextlib.AbstractContextManager[Any]", getattr(torch, self.device.type).stream(stream))

    def call(self, work: Callable[[], _T]) -> _T:
        """The result of work(), which calls experts: they share their scratch memory with requests.  The stream that
        is current waits for it."""
        if self.stream is None:

            def at_the_node() -> _T:
                with self.computing():
                    return work()

            return cast("_T", self.alone(at_the_node))
        here = getattr(torch, self.device.type).current_stream(self.device)
        here.synchronize()  # or whoever computes would wait for it

        def run() -> tuple[_T, Any]:
            with self.computing():
                return work(), self.stream.record_event()

        out, done = cast("tuple[_T, Any]", self.alone(run))
        here.wait_event(done)
        return out


@functools.cache
def _packing_stream(device: torch.device) -> Any:
    """One for the process: torch keeps a workspace of cuBLAS for each stream that multiplied (32 MiB on Hopper)."""
    return compute_stream(device, LAST)


class LayerWeights:
    """The canonical weights of one layer and their proof: loaded when first asked for, or never."""

    def __init__(self, assignment: Assignment, workshop: Workshop, ahead: ReadAhead | None = None) -> None:
        """ahead: through which they are read; None: for this layer alone."""
        self._assignment, self._workshop = assignment, workshop
        self._ahead = ahead or ReadAhead(workshop.source)
        self._weights: Weights | None = None
        self._proof: IntegrityRecord | None = None

    def weights(self) -> Weights:
        """On the device.  Raises BootError."""
        if self._weights is None:
            assignment, workshop = self._assignment, self._workshop
            with workshop.stage("load"):
                try:
                    found = self._ahead.take(assignment)
                except (ValueError, OSError) as e:
                    raise BootError(f"layer {assignment.info.layer}: {e}") from e
            with workshop.stage("copy"):
                self._weights = found.to(workshop.device)
            del found  # from here on an accelerator's weights are on the device alone
            self._ahead.go_on(assignment)
        return self._weights

    def proof(self) -> IntegrityRecord:
        """The batch with the reference's answer, the same for every backend of the layer."""
        if self._proof is None:
            weights, problem = self.weights(), self._assignment.decision.problem
            kind = (problem.schemes, weights.w13.shape, weights.w2.shape)
            with self._workshop.stage("check"):
                proof = prove(
                    weights,
                    problem,
                    reference_experts=boot_reference_experts(weights, later=kind in self._workshop.proven),
                    device=self._workshop.device,
                )
                self._proof = replace(proof, digests=expert_digests(weights))
            self._workshop.proven.add(kind)
        return self._proof


@dataclass(frozen=True, eq=False)
class Prepared:
    """Experts that passed their check.

    digests     of the canonical weights, by expert
    from_cache  their packed weights were found on disk
    measured    (tokens, routes a token, nanoseconds) of batches, from their warm-up
    """

    backend: Backend
    experts: Experts
    check: SelfCheck
    digests: tuple[int, ...]
    from_cache: bool
    measured: tuple[tuple[int, int, int], ...] = ()


def prepare(backend: Backend, assignment: Assignment, canonical: LayerWeights, workshop: Workshop) -> Prepared:
    """The layer on `backend`.  BackendRejectedError: that does not serve it; BootError: it cannot be read."""
    facts = _facts(backend, assignment, workshop)
    if workshop.cache is not None:
        with workshop.stage("map"):
            found = workshop.cache.find(facts, workshop.device)
        prepared, found = _mapped(backend, assignment, workshop, found)
        workshop.lookups[found.outcome] += 1
        if prepared is not None:
            return prepared
        if found.why:
            log.warning("layer %d on %s: cache: %s; packing it again", assignment.info.layer, backend.name, found.why)
        return _packed(backend, assignment, canonical, workshop, facts, damaged=found.outcome == "damaged")
    return _packed(backend, assignment, canonical, workshop, facts)


def will_read(assignment: Assignment, workshop: Workshop) -> bool:
    """Whether the layer's canonical weights will be asked for, as far as a look at the cache tells."""
    backend = assignment.decision.chosen
    if backend is None or workshop.cache is None:
        return backend is not None
    return not workshop.cache.path(_facts(backend, assignment, workshop)).is_file()


def _facts(backend: Backend, assignment: Assignment, workshop: Workshop) -> dict[str, Any]:
    if workshop.cache is None:
        return {}
    return workshop.cache.facts(
        workshop.source.fingerprint,
        assignment.info.layer,
        assignment.held,
        backend,
        assignment.decision.problem,
        files=workshop.files,
    )


def _mapped(
    backend: Backend, assignment: Assignment, workshop: Workshop, found: Found
) -> tuple[Prepared | None, Found]:
    """The layer from a cache's entry, if it is there and passes its check; else what is wrong with it."""
    if found.entry is None:
        return None, found
    problem = assignment.decision.problem
    try:
        with workshop.stage("map"):
            experts = experts_of(backend, found.entry.packed, problem)
            if found.entry.file is not None:
                experts = WatchedExperts(experts, found.entry.file)
        proof = found.entry.proof
        if proof is None or proof.digests is None:
            return None, Found("damaged", "the entry has no proof to check it with")
        digests = tuple(proof.digests.tolist())
        _compile(experts, assignment, len(proof.x), workshop)
        with workshop.stage("check"):
            here = proof.to(workshop.device)
            checked = check(experts, here, problem, run=workshop.call)
    except Exception as e:
        return None, Found("damaged", f"its entry does not compute: {_text(e)}")
    if not checked.ok:
        return None, Found("damaged", f"its entry fails the self-check: {checked.fault}")
    return Prepared(backend, experts, checked, digests, from_cache=True), found


def _packed(
    backend: Backend,
    assignment: Assignment,
    canonical: LayerWeights,
    workshop: Workshop,
    facts: dict[str, Any],
    damaged: bool = False,
) -> Prepared:
    """The layer packed from canonical weights, checked, and kept where there is a cache.  damaged: what is there now
    must be replaced."""
    problem, weights = assignment.decision.problem, canonical.weights()
    with _rejecting("packing"), workshop.stage("pack"):
        packed = pack(backend, weights, problem)
        if (
            workshop.memory is not None and workshop.device.type != "cpu"
        ):  # nobody else computes: it makes the device wait
            tensors = dict(packed.tensors)
            packed = replace(packed, tensors=tensors)  # which nobody else holds
            settle(tensors, workshop.device)
        experts = experts_of(backend, packed, problem)
    proof = canonical.proof()
    with _rejecting("compiled"):
        _compile(experts, assignment, len(proof.x), workshop)
    with _rejecting("first called"), workshop.stage("check"):
        checked = check(experts, proof, problem, weights, workshop.call)
    if not checked.ok:
        raise BackendRejectedError("checked against the float32 reference", checked.fault, wrong=True)
    assert proof.digests is not None
    packed_here = Prepared(backend, experts, checked, tuple(proof.digests.tolist()), from_cache=False)
    if workshop.cache is None:
        return packed_here
    accepted = workshop.call(lambda: accept(experts, proof, problem))
    if not _kept(workshop, facts, packed, accepted, damaged):
        return packed_here
    if workshop.device.type != "cpu":
        return packed_here
    # The first server, too, computes from the pages that every later one shares; where several started together, from
    # those of the one that was quickest.
    with workshop.stage("map"):
        found = workshop.cache.find(facts)
    mapped, found = _mapped(backend, assignment, workshop, found)
    if mapped is None:
        log.warning(
            "layer %d on %s: cache: the new entry cannot be used: %s", assignment.info.layer, backend.name, found.why
        )
        return packed_here
    return replace(mapped, check=checked, from_cache=False)


def _compile(experts: Experts, assignment: Assignment, rows: int, workshop: Workshop) -> None:
    """What the check with so many rows and the warm-up would compile one after another, side by side; once for each
    kind of layer."""
    p = assignment.decision.problem
    if workshop.kernels is not None:
        with workshop.stage("compile"):
            workshop.kernels.wait()
    if not isinstance(experts, CompiledExperts) or workshop.device.type == "cpu":
        return
    kind = (type(experts), str(replace(p, packages={})))
    if kind in workshop.compiled:
        return
    sizes = calls_to_compile(rows, p.top_k, workshop.routes, workshop.max_tokens)
    threads = max(1, len(os.sched_getaffinity(0)))
    with workshop.stage("compile"), torch.inference_mode():
        workshop.call(lambda: experts.compile_ahead(sizes, threads, p.router_weight_on_input))
    workshop.compiled.add(kind)


def _kept(workshop: Workshop, facts: dict[str, Any], packed: Packed, proof: IntegrityRecord, damaged: bool) -> bool:
    """Write the entry.  False where that fails: the server works without it, and says so."""
    assert workshop.cache is not None
    try:
        with workshop.stage("store"):
            workshop.cache.store(facts, packed, proof, replace=damaged)
    except OSError as e:
        log.warning("cache: layer %d cannot be written to %s: %s", facts["layer"], workshop.cache.folder, e)
        return False
    return True


def warm_up(
    experts: Experts, assignment: Assignment, workshop: Workshop, *, on_cpu: Sequence[int] = _WARM_UP_CPU
) -> list[tuple[int, int, int]]:
    """Run the batch sizes that must not be met first under load: kernels that compile or choose on first use would hold
    up callers for seconds.  Small batches are padded to few sizes, larger ones change plans at distances of a factor of
    two and more, and the largest takes the most scratch.  on_cpu: the sizes there.  Returns (tokens, routes a token,
    nanoseconds) of the second time that each is run.  Raises BackendRejectedError."""
    p, device = assignment.decision.problem, workshop.device
    took = []
    with _rejecting("warmed up"), workshop.stage("warm_up"), torch.inference_mode():
        for routes in dict.fromkeys((p.top_k, *workshop.routes)):
            for tokens in on_cpu if device.type == "cpu" else warm_sizes(workshop.max_tokens):
                batch = _routed(tokens, routes, p, device)
                took.append((tokens, routes, workshop.call(functools.partial(_timed, experts, batch))))
        if fault := device_fault(device):  # what a kernel did wrong is told by the next call that waits
            raise RuntimeError(fault)
    return took


def _timed(experts: Experts, batch: tuple[Tensor, Tensor, Tensor]) -> int:
    """Nanoseconds of a batch that was computed once before."""
    device = batch[0].device
    wait = getattr(torch, device.type).synchronize if device.type != "cpu" else lambda _: None
    experts(*batch)
    wait(device)
    begin = time.perf_counter_ns()
    experts(*batch)
    wait(device)
    took = time.perf_counter_ns() - begin
    if takes_e4m3(experts):  # as an engine on a GPU calls them
        x, *routes = batch
        codes, scales = round_groups(x)
        cast(E4m3Experts, experts).of_e4m3(codes, scales, *routes, out=torch.empty_like(x))
        wait(device)
    return took


def _routed(tokens: int, routes: int, p: Problem, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """A random batch with so many routes a token, also where fewer experts are held."""
    held, dtype = min(routes, p.num_experts), COMPUTE_DTYPE[p.compute_dtype]
    x, ids, w = random_inputs(tokens, p.hidden_size, p.num_experts, held, dtype=dtype, device=device)
    more = (0, routes - held)
    return x, torch.nn.functional.pad(ids, more, value=-1), torch.nn.functional.pad(w, more)


@contextlib.contextmanager
def _rejecting(stage: str) -> Iterator[None]:
    """Whatever a backend raises becomes BackendRejectedError."""
    try:
        yield
    except Exception as e:
        raise BackendRejectedError(stage, _text(e)) from e


def _text(e: Exception) -> str:
    return str(e) if isinstance(e, Refused) else f"{type(e).__name__}: {e}"
