"""One layer in this process: what is timed on it, its errors, and its calls one after the other.

Inputs differ from call to call, and before each call the last-level cache is filled with other bytes: the weights come
from memory, as those of a model's dozens of layers do.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from expertd_kernels.backends import cpu
from expertd_kernels.bench.cpu_memory import Evictor, Reader, RunsReader
from expertd_kernels.bench.prepared import Prepared
from expertd_kernels.common.refused import Refused
from expertd_kernels.native import library as native
from expertd_kernels.oracle.decision import NoBackendError, decide
from expertd_kernels.oracle.probe import detect_device, installed_packages
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.packed.builder import build, problem_of
from expertd_kernels.sources.synthetic import random_inputs, random_weights
from expertd_kernels.weights.canonical import Weights
from expertd_kernels.weights.float32 import reference
from expertd_kernels.weights.models import MODELS, ModelShape
from expertd_kernels.weights.numerics import relative_error
from expertd_kernels.weights.scheme import ActivationQuant, Scheme

__all__ = ["OURS", "READ", "RUNS", "Layer", "Maker", "Point", "TimedLayer", "ceilings", "settle", "shape_of"]

OURS: tuple[str, ...] = ("cpu", "cpu_w4a8")
READ, RUNS = "plain_read", "same_runs"
"""Rows that only read: as many contiguous bytes; and what `cpu` reads, thread by thread and in its order."""
CHECK_TOKENS = 4
WARM_TOKENS = 64
INPUT_SETS = 8
PAUSE_S = 0.002
"""Between calls: the threads of other implementations spin for about a millisecond after theirs."""
TASKS = Path("/proc/self/task")

Inputs = tuple[Tensor, Tensor, Tensor]
Layer = Callable[[Tensor, Tensor, Tensor], Tensor]
Maker = Callable[[Weights, int, int], "Layer | str"]
"""(weights, top_k, threads) -> an implementation, or why there is none; a value that can be sent to a process."""


def shape_of(name: str) -> ModelShape:
    """A model's name, or NAME/E for a slice with E experts (of which a token takes no more than there are).  ValueError
    lists the names."""
    base, _, experts = name.partition("/")
    if base not in MODELS or (experts and not experts.isdecimal()):
        raise ValueError(f"shape {name!r}: want a model or MODEL/EXPERTS; models: {', '.join(MODELS)}")
    model = MODELS[base]
    if not experts:
        return model
    if int(experts) < 1:
        raise ValueError(f"shape {name!r}: want at least one expert")
    return replace(model, name=name, num_experts=int(experts), top_k=min(model.top_k, int(experts)))


def ceilings(threads: int) -> dict[str, float]:
    """What bounds a layer, measured now: a plain read of memory, and the peaks of the level's bf16 (where it has no
    bf16 dot product: f32), int8 and int16 multiply-adds.  Best of many short times: a peak is a peak."""
    lib, context, data = native.library(), native.context(None, threads), Evictor().data
    read = [lib.expertd_cpu_read_gb_s(context.handle, data.data_ptr(), data.numel()) for _ in range(5)]
    bf16, int8, int16 = (
        max(lib.expertd_cpu_peak(context.handle, kind, 0.003) for _ in range(80)) for kind in (0, 2, 3)
    )
    return {"read_gb_s": statistics.median(read), "bf16_gflop_s": bf16, "int8_gop_s": int8, "int16_gop_s": int16}


def settle(limit_s: float = 0.5) -> bool:
    """Waits until no other thread of this process runs or wants to; False where some still do after limit_s.  Where the
    system does not say what threads do, after one pause."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        time.sleep(PAUSE_S)
        if not _running():
            return True
    return False


def _running() -> int:
    """How many threads beside this one run, or would if they had a core."""
    states = []
    for file in TASKS.glob("*/stat"):
        with contextlib.suppress(OSError):  # a thread that has ended
            states.append(file.read_text().rpartition(")")[2].split()[0])
    return max(0, states.count("R") - 1)


def _inputs(shape: ModelShape, tokens: int) -> list[Inputs]:
    """INPUT_SETS batches; of one token each: to different experts, as far as there are enough."""
    E, k = shape.num_experts, shape.top_k
    sets = [random_inputs(tokens, shape.hidden_size, E, k, seed=101 + r) for r in range(INPUT_SETS)]
    if tokens == 1:
        order = torch.randperm(E, generator=torch.Generator().manual_seed(7)).int()
        sets = [(x, order.roll(-r * k)[:k].view(1, k).contiguous(), w) for r, (x, _, w) in enumerate(sets)]
    return sets


def _known(shape: ModelShape) -> Inputs:
    """CHECK_TOKENS tokens whose answer is computed in f32."""
    return random_inputs(CHECK_TOKENS, shape.hidden_size, shape.num_experts, shape.top_k, seed=100)


def _error(call: Layer, sets: Sequence[Inputs], known: Inputs, wanted: Tensor) -> float:
    """Relative error on the known tokens: of our kernels as the first of a whole batch, since the number of rows
    decides which of them computes; of the others as a batch of their own."""
    x, ids, weights = sets[0]
    n = min(CHECK_TOKENS, x.shape[0])
    if not isinstance(call, cpu.CpuExperts) or n < CHECK_TOKENS:
        return relative_error(call(*(t[:n] for t in known)), wanted[:n])
    whole = (torch.cat((mine, other[n:])) for mine, other in zip(known, (x, ids, weights), strict=True))
    return relative_error(call(*whole)[:n], wanted)


def _prepared(call: Layer, sets: Sequence[Inputs]) -> list[Callable[[], object]]:
    """The call on each set.  What is done before the clock starts: inputs in an implementation's own types, and, for
    ours, the memory of the answer, as the server hands it over."""
    if isinstance(call, Prepared):
        return [partial(call.run, call.prepare(*inputs)) for inputs in sets]
    if isinstance(call, cpu.CpuExperts):
        return [partial(call, *inputs, out=torch.empty_like(inputs[0])) for inputs in sets]
    return [partial(call, *inputs) for inputs in sets]


@dataclass(frozen=True)
class Point:
    """What is known of a point before anything is timed.  nbytes: of the distinct experts' weights, as formats store
    them; flop: 2 x multiply-adds of the routes; whole: bytes of a plain read; errors: of each row; eight_bits: rows
    that round activations to 8 bits."""

    nbytes: float
    flop: float
    whole: int
    errors: dict[str, float]
    eight_bits: frozenset[str]


class TimedLayer:
    """A layer and the rows that are timed on it in this process: `rows` of backends, `others` by name, the reads."""

    def __init__(
        self, shape: str, scheme: str, rows: Sequence[str], others: Mapping[str, Maker], reads: bool, clock: str
    ) -> None:
        self.shape, self.scheme = shape_of(shape), Scheme.parse(scheme)
        self.rows, self.others = rows, others
        self.now = time.thread_time if clock == "cpu" else time.perf_counter
        self.evict = Evictor()
        torch.set_num_threads(len(native.physical_cpus()))  # nothing is timed yet
        s = self.shape
        self.weights = random_weights(
            self.scheme, s.num_experts, s.hidden_size, s.intermediate_size, activation=s.activation, bias=s.bias
        )
        self.problem = problem_of(
            self.weights, detect_device("cpu"), top_k=s.top_k, packages=installed_packages(BACKENDS)
        )
        ours = reads or any(name in OURS for name in rows)
        self.packed = cpu.pack(self.weights, self.problem) if ours else None  # one packing serves both of OURS
        self.reads = reads
        self.known = _known(s)
        self.wanted = reference(self.weights, *self.known)
        self.calls: dict[str, Layer] = {}
        self.timed: dict[str, Sequence[Callable[[], object]]] = {}

    def use(self, threads: int) -> dict[str, str]:
        """Makes the rows for a number of threads -> why some of them cannot be had."""
        torch.set_num_threads(len(native.physical_cpus()))
        self.calls, self.timed = {}, {}  # what the number before held is free while these are made
        refused: dict[str, str] = {}
        for name in self.rows:
            self._keep(name, self._backend(name, threads), refused)
        for name, make in self.others.items():
            self._keep(name, make(self.weights, self.shape.top_k, threads), refused)
        torch.set_num_threads(threads)
        for call in self.calls.values():  # memory untouched since packing may have been taken away by the host
            call(*_inputs(self.shape, WARM_TOKENS)[0])
        if self.reads and self.packed is not None:
            context = native.context(None, threads)
            self.reader = Reader(self.packed, context)
            self.runs = RunsReader(cpu.CpuExperts(self.packed, self.problem, context))
        return refused

    def _keep(self, name: str, made: Layer | str, refused: dict[str, str]) -> None:
        if isinstance(made, str):
            refused[name] = made
        else:
            self.calls[name] = made

    def _backend(self, name: str, threads: int) -> Layer | str:
        if self.packed is not None and name in OURS:
            quant = ActivationQuant.INT8_GROUP if name == "cpu_w4a8" else ActivationQuant.NONE
            asked = replace(self.problem, activation_quant=quant)
            return cpu.CpuExperts(self.packed, asked, native.context(None, threads), backend=name)
        try:
            return build(decide(self.problem, pin=name), self.weights)
        except (NoBackendError, Refused) as e:
            return str(e)

    def point(self, tokens: int) -> Point:
        """Checks every row at a number of tokens, and calls each once."""
        s, seg = self.shape, self.shape.activation.segments
        sets = _inputs(s, tokens)
        expert = self.scheme.nbytes(seg * s.intermediate_size, s.hidden_size, seg)
        expert += self.scheme.nbytes(s.hidden_size, s.intermediate_size)
        nbytes = sum(int(torch.unique(ids).numel()) for _, ids, _ in sets) / len(sets) * expert
        flop = 2.0 * (seg + 1) * tokens * s.top_k * s.hidden_size * s.intermediate_size
        errors = {name: _error(call, sets, self.known, self.wanted) for name, call in self.calls.items()}
        eight = {name for name, c in self.calls.items() if name == "cpu_w4a8" or getattr(c, "eight_bits", False)}
        self.timed = {name: _prepared(call, sets) for name, call in self.calls.items()}
        whole = 0
        if self.reads:
            whole = self.reader.whole(nbytes)
            self.timed |= {READ: [partial(self.reader, whole)], RUNS: [partial(self.runs, *i) for i in sets]}
        for calls in self.timed.values():
            calls[0]()
        return Point(nbytes, flop, whole, errors, frozenset(eight))

    def turn(self, seconds: float, first: int) -> dict[str, list[float]]:
        """Microseconds of each row's calls: one of each in turn until `seconds` a row are spent, at least one round.
        Neighbours of a round take different inputs, beginning with set `first`; none finds its weights in the cache."""
        taken: dict[str, list[float]] = {name: [] for name in self.timed}
        end = time.perf_counter() + seconds * len(self.timed)
        n = first
        while n == first or time.perf_counter() < end:
            for i, (name, sets) in enumerate(self.timed.items()):
                call = sets[(n + 3 * i) % len(sets)]
                self.evict()
                time.sleep(PAUSE_S)
                start = self.now()
                call()
                taken[name].append((self.now() - start) * 1e6)
            n += 1
        return taken
