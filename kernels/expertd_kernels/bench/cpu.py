"""The kernel benchmark on a CPU: whole expert layers, correctness first, then microseconds.

At each point (shape, scheme, threads, M) everything is timed in turns: the backends, the peers, and a plain read of as
many bytes as the point's weights have.  So a neighbour's load hits all alike, and a fraction of the read is a fraction
of what the memory gave in that minute.  Inputs differ from call to call, and before each call the last-level cache is
filled with other bytes: the weights come from memory, as those of a model's dozens of layers do.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expertd_kernels.backends import cpu
from expertd_kernels.bench.cpu_memory import Evictor, Reader
from expertd_kernels.bench.points import write_points
from expertd_kernels.bench.prepared import Prepared
from expertd_kernels.builder import build, problem_of
from expertd_kernels.native import library as native
from expertd_kernels.oracle.decision import NoBackendError, decide
from expertd_kernels.oracle.probe import cpu_name, detect_device, installed_packages
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.protocol import Packed
from expertd_kernels.refused import Refused
from expertd_kernels.sources.synthetic import random_inputs, random_weights
from expertd_kernels.weights.canonical import Weights
from expertd_kernels.weights.float32 import reference
from expertd_kernels.weights.models import MODELS, ModelShape
from expertd_kernels.weights.numerics import relative_error
from expertd_kernels.weights.scheme import ActivationQuant, Element, Scheme

__all__ = ["OURS", "READ", "Layer", "Others", "Row", "ceilings", "fraction", "machine", "run", "shape_of"]

SHAPES = ("qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v3/16")
TOKENS = (1, 4, 16, 64, 256, 1024)
SCHEMES = {
    "qwen3-30b-a3b": ("int4_g128", "mxfp4", "int4_g32", "int8_g128", "e4m3_block128"),
    "gpt-oss-20b": ("mxfp4",),
}
"""Schemes of a shape where none is named; int4_g128 for the others."""
OURS: tuple[str, ...] = ("cpu", "cpu_w4a8")
READ = "plain_read"
"""The row that holds the interleaved read: its gb_s is the ceiling of its point."""
INTEGERS = ("int4", "int8", "mxfp4", "nvfp4")
"""Schemes whose codes are multiplied as integers; the others as bf16 or f32."""
LONG_S = 8.0
"""Four rounds are taken where they take no longer; where one round takes longer, that one counts."""
CHECK_TOKENS = 4
WARM_TOKENS = 64
INPUT_SETS = 8
PAUSE_S = 0.002
"""Between calls: the threads of other implementations spin for about a millisecond after theirs."""

Inputs = tuple[Tensor, Tensor, Tensor]
Layer = Callable[[Tensor, Tensor, Tensor], Tensor]
Others = Callable[[Weights, int, int], Mapping[str, Layer]]
"""(weights, top_k, threads) -> implementations to time in turns with ours; kernels/bench/peers_cpu.py has some."""


@dataclass(frozen=True)
class Row:
    """One point of one backend.  us: median.  gb_s: bytes of the distinct experts' weights, as formats store them, over
    the time.  gflop_s: 2 x multiply-adds of the routes over the time.  roofline_fraction: shortest possible time over
    the measured one; bound: "read" or "arithmetic", whichever sets it."""

    shape: str
    scheme: str
    backend: str
    threads: int
    M: int
    us: float
    gb_s: float
    gflop_s: float
    roofline_fraction: float
    bound: str
    relative_error: float


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


def machine() -> dict[str, str]:
    """Processor, instruction-set level, versions, commit."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    return {
        "cpu": cpu_name() or "unknown",
        "cores": str(len(native.physical_cpus())),
        "level": native.context().level,
        "torch": str(torch.__version__),
        "commit": commit,
    }


def ceilings(context: native.Context, data: Tensor) -> dict[str, float]:
    """What bounds a layer with the context's threads, measured now: a plain read of `data`, and the peaks of the
    level's bf16 (where it has no bf16 dot product: f32), int8 and int16 multiply-adds.  Best of many short
    times: a peak is a peak.
    """
    lib = native.library()
    read = [lib.expertd_cpu_read_gb_s(context.handle, data.data_ptr(), data.numel()) for _ in range(5)]
    bf16, int8, int16 = (
        max(lib.expertd_cpu_peak(context.handle, kind, 0.003) for _ in range(80)) for kind in (0, 2, 3)
    )
    return {"read_gb_s": statistics.median(read), "bf16_gflop_s": bf16, "int8_gop_s": int8, "int16_gop_s": int16}


def fraction(scheme: str, gb_s: float, gflop_s: float, top: Mapping[str, float], eight_bits: bool) -> tuple[float, str]:
    """(shortest possible time over the measured one, which of "read" and "arithmetic" bounds).  top: the peaks, and the
    read_gb_s that was measured in turns with the point; eight_bits: activations are rounded to 8 bits."""
    integers = top["int8_gop_s"] if eight_bits else top.get("int16_gop_s", 0.0)
    peak = max(integers if scheme.startswith(INTEGERS) else 0.0, top["bf16_gflop_s"])
    return max((gb_s / top["read_gb_s"], "read"), (gflop_s / peak, "arithmetic"))


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


def _times(
    calls: Mapping[str, Sequence[Callable[[], object]]], seconds: float, clock: str, evict: Callable[[], None]
) -> dict[str, float]:
    """Median microseconds of each implementation, given as its call on each set of inputs.  One call of each in turn,
    until `seconds` are spent, at least four rounds unless those take longer than LONG_S; the first counts only where
    it is the only one.  Neighbours of a round take different inputs, and none finds its weights in the cache."""
    now = time.thread_time if clock == "cpu" else time.perf_counter
    taken: dict[str, list[float]] = {name: [] for name in calls}
    start_s = time.perf_counter()
    n, spent = 0, 0.0
    while n == 0 or spent < seconds or (n < 4 and spent < LONG_S):
        for i, (name, sets) in enumerate(calls.items()):
            call = sets[(n + 3 * i) % len(sets)]
            evict()
            time.sleep(PAUSE_S)
            start = now()
            call()
            taken[name].append((now() - start) * 1e6)
        n, spent = n + 1, time.perf_counter() - start_s
    return {name: statistics.median(t[1:] or t) for name, t in taken.items()}


def _backends(
    weights: Weights, packed: Packed, shape: ModelShape, names: Sequence[str], threads: int
) -> dict[str, Layer]:
    """The named backends; those that are refused are told on stderr and left out."""
    problem = problem_of(weights, detect_device("cpu"), top_k=shape.top_k, packages=installed_packages(BACKENDS))
    found: dict[str, Layer] = {}
    for name in names:
        if name in OURS:  # one packing serves both
            quant = ActivationQuant.INT8_GROUP if name == "cpu_w4a8" else ActivationQuant.NONE
            asked = replace(problem, activation_quant=quant)
            found[name] = cpu.CpuExperts(packed, asked, native.context(None, threads), backend=name)
            continue
        try:
            found[name] = build(decide(problem, pin=name), weights)
        except (NoBackendError, Refused) as e:
            print(e, file=sys.stderr)
    return found


def _points(
    args: argparse.Namespace,
    shape: ModelShape,
    scheme: Scheme,
    threads_list: Sequence[int],
    peaks: Mapping[str, Mapping[str, float]],
    evict: Callable[[], None],
    others: Others | None,
    rows: list[Row],
) -> None:
    """All rows of one layer, appended as they are timed."""
    E, H, I = shape.num_experts, shape.hidden_size, shape.intermediate_size
    torch.set_num_threads(len(native.physical_cpus()))  # nothing is timed yet
    weights = random_weights(scheme, E, H, I, activation=shape.activation, bias=shape.bias)
    packed = cpu.pack(weights, problem_of(weights, detect_device("cpu"), top_k=shape.top_k))
    seg = shape.activation.segments
    expert_bytes = scheme.nbytes(seg * I, H, seg) + scheme.nbytes(H, I)
    known = _known(shape)
    wanted = reference(weights, *known)
    for threads in threads_list:
        torch.set_num_threads(len(native.physical_cpus()))
        context = native.context(None, threads)
        backends = args.backend or (OURS if scheme.element is Element.INT4 else OURS[:1])
        calls = _backends(weights, packed, shape, backends, threads)
        calls |= others(weights, shape.top_k, threads) if others else {}
        torch.set_num_threads(threads)
        for call in calls.values():  # memory that was not touched since packing may have been taken away by the host
            call(*_inputs(shape, WARM_TOKENS)[0])
        reader = Reader(packed, context)
        for M in args.m or TOKENS:
            sets = _inputs(shape, M)
            errors = {name: _error(call, sets, known, wanted) for name, call in calls.items()}
            nbytes = statistics.mean(int(torch.unique(ids).numel()) for _, ids, _ in sets) * expert_bytes
            flop = 2.0 * (seg + 1) * M * shape.top_k * H * I
            whole = reader.whole(nbytes)
            timed: dict[str, Sequence[Callable[[], object]]] = {n: _prepared(call, sets) for n, call in calls.items()}
            timed[READ] = [partial(reader, whole)]
            times = _times(timed, args.seconds * len(timed), args.clock, evict)
            top = {**peaks[f"{threads}"], "read_gb_s": whole / times[READ] / 1e3}
            for name, us in times.items():
                gb_s = (whole if name == READ else nbytes) / us / 1e3
                gflop_s = 0.0 if name == READ else flop / us / 1e3
                eight_bits = name == "cpu_w4a8" or getattr(calls.get(name), "eight_bits", False)
                share, bound = fraction(scheme.name, gb_s, gflop_s, top, eight_bits)
                rows.append(Row(shape.name, scheme.name, name, threads, M, us, gb_s, gflop_s, share, bound,
                                errors.get(name, 0.0)))  # fmt: skip
                print(_line(rows[-1]), file=sys.stderr, flush=True)


def _line(r: Row) -> str:
    return (
        f"{r.shape:16s} {r.scheme:14s} {r.backend:16s} threads {r.threads} M {r.M:5d} {r.us:11.1f} us"
        f" {r.gb_s:6.1f} GB/s {r.gflop_s:7.1f} GFLOP/s {r.roofline_fraction * 100:4.0f} % of {r.bound:10s}"
        f" error {r.relative_error:.1e}"
    )


def _load_average() -> str:
    """Waiting and running processes: how busy others kept the machine."""
    return " ".join(f"{x:.1f}" for x in os.getloadavg()) if hasattr(os, "getloadavg") else "unknown"


def run(args: argparse.Namespace, others: Others | None = None) -> dict[str, Any]:
    """The bench's --device cpu.  args: shape, scheme, backend, m, threads (lists or None), seconds, clock and csv (a
    path, written at the end, or None).  others: implementations beside the backends.

    The ceilings of the result are those of the largest number of threads, `peaks` those of each; a point's own read is
    its plain_read row.
    """
    facts = {**machine(), "clock": args.clock, "load_before": _load_average()}
    if args.clock == "cpu" and args.threads != [1]:
        raise ValueError("--clock cpu sees one thread only: want --threads 1")
    threads = args.threads or sorted({1, min(2, len(native.physical_cpus()))})
    evict = Evictor()
    peaks = {f"{t}": ceilings(native.context(None, t), evict.data) for t in threads}
    top = peaks[f"{max(threads)}"]
    print(f"{facts}\n{max(threads)} threads: {top}", file=sys.stderr, flush=True)
    rows: list[Row] = []
    try:
        for name in args.shape or SHAPES:
            shape = shape_of(name)
            for scheme in args.scheme or SCHEMES.get(name, ("int4_g128",)):
                _points(args, shape, Scheme.parse(scheme), threads, peaks, evict, others, rows)
    except KeyboardInterrupt:
        print("interrupted: the result has what was timed so far", file=sys.stderr)
    records = [asdict(r) for r in rows]
    facts["load_after"] = _load_average()
    if args.csv:
        write_points(Path(args.csv), [{**r, **facts, **peaks[f"{r['threads']}"]} for r in records])
    return {"machine": facts, "ceilings": top, "peaks": peaks, "rows": records}
