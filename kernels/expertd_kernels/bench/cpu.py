"""The kernel benchmark on a CPU: whole expert layers, correctness first, then microseconds.

At each point (shape, scheme, threads, M) everything is timed in turns: the backends, the peers, and a plain read of as
many bytes as the point's weights have.  So a neighbour's load hits all alike, and a fraction of the read is a fraction
of what the memory gave in that minute.  Inputs differ from call to call, so that the weights come from memory.
"""

from __future__ import annotations

import argparse
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

from expertd_kernels.backends import cpu, cpu_native
from expertd_kernels.backends.protocol import Packed
from expertd_kernels.bench.peers_cpu import PEERS, peer
from expertd_kernels.builder import build, problem_of
from expertd_kernels.canonical import Weights
from expertd_kernels.float32 import reference
from expertd_kernels.models import MODELS, ModelShape
from expertd_kernels.numerics import relative_error
from expertd_kernels.oracle import NoBackendError, Refused, decide
from expertd_kernels.probe import detect_device, installed_packages
from expertd_kernels.scheme import Scheme
from expertd_kernels.synthetic import random_inputs, random_weights
from expertd_kernels.table import BACKENDS

__all__ = ["Row", "ceilings", "machine", "run", "shape_of"]

SHAPES = ("qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v3/16")
TOKENS = (1, 4, 16, 64, 256, 1024)
CHECK_TOKENS = 16
INPUT_SETS = 8
READ = "plain_read"
"""The row that holds the interleaved read: its gb_s is the ceiling of its point."""

Inputs = tuple[Tensor, Tensor, Tensor]
Caller = Callable[[Inputs], object]


@dataclass(frozen=True)
class Row:
    """One point of one backend.  us: median.  gb_s: bytes of the distinct experts' weights, as formats store them, over
    the time.  gflop_s: 2 x multiply-adds of the routes over the time."""

    shape: str
    scheme: str
    backend: str
    threads: int
    M: int
    us: float
    gb_s: float
    gflop_s: float
    relative_error: float


def shape_of(name: str) -> ModelShape:
    """A model's name, or NAME/E for a slice with E experts.  ValueError lists the names."""
    base, _, experts = name.partition("/")
    if base not in MODELS or (experts and not experts.isdecimal()):
        raise ValueError(f"shape {name!r}: want a model or MODEL/EXPERTS; models: {', '.join(MODELS)}")
    model = MODELS[base]
    return replace(model, name=name, num_experts=int(experts) if experts else model.num_experts)


def machine() -> dict[str, str]:
    """Processor, instruction-set level, versions, commit."""
    model = "unknown"
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    return {
        "cpu": model,
        "cores": str(len(cpu_native.physical_cpus())),
        "level": cpu_native.context().level,
        "torch": str(torch.__version__),
        "commit": commit,
    }


def ceilings(context: cpu_native.Context, data: Tensor) -> dict[str, float]:
    """What bounds a layer with the context's threads, measured now: a plain read of `data`, and the peaks of the
    level's bf16 (where it has no bf16 dot product: f32) and int8 multiply-adds.  Best of five: a peak is a peak."""
    lib = cpu_native.library()
    read = [lib.expertd_cpu_read_gb_s(context.handle, data.data_ptr(), data.numel()) for _ in range(5)]
    bf16, int8 = ([lib.expertd_cpu_peak(context.handle, kind, 0.05) for _ in range(5)] for kind in (0, 2))
    return {"read_gb_s": statistics.median(read), "bf16_gflop_s": max(bf16), "int8_gop_s": max(int8)}


def _inputs(shape: ModelShape, tokens: int) -> list[Inputs]:
    """INPUT_SETS batches; of one token each: to different experts, as far as there are enough."""
    E, k = shape.num_experts, shape.top_k
    sets = [random_inputs(tokens, shape.hidden_size, E, k, seed=101 + r) for r in range(INPUT_SETS)]
    if tokens == 1:
        order = torch.randperm(E, generator=torch.Generator().manual_seed(7)).int()
        sets = [(x, order.roll(-r * k)[:k].view(1, k).contiguous(), w) for r, (x, _, w) in enumerate(sets)]
    return sets


def _error(call: Caller, weights: Weights, inputs: Inputs) -> float:
    """Relative error of the first CHECK_TOKENS tokens."""
    part = inputs[0][:CHECK_TOKENS], inputs[1][:CHECK_TOKENS], inputs[2][:CHECK_TOKENS]
    out = call(part)
    assert isinstance(out, Tensor)
    return relative_error(out, reference(weights, *part))


def _times(calls: Mapping[str, Caller], sets: Sequence[Inputs], seconds: float) -> dict[str, float]:
    """Median microseconds of each call.  One call of each in turn, until `seconds` are spent, at least five rounds."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    n = 0
    while n < 5 or time.perf_counter() < end:
        for name, call in calls.items():
            start = time.perf_counter()
            call(sets[n % len(sets)])
            taken[name].append((time.perf_counter() - start) * 1e6)
        n += 1
    return {name: statistics.median(t[1:]) for name, t in taken.items()}


class _Reader:
    """Reads as many bytes as asked for, each time further on in a layer's packed weights."""

    def __init__(self, packed: Packed, context: cpu_native.Context) -> None:
        self.data = max(packed.tensors.values(), key=lambda t: t.numel() * t.element_size()).view(-1)
        self.context, self.at = context, 0

    def __call__(self, nbytes: int, _: Inputs) -> None:
        nbytes = min(nbytes, self.data.numel()) // 64 * 64
        self.at = 0 if self.at + nbytes > self.data.numel() else self.at
        cpu_native.library().expertd_cpu_read_gb_s(self.context.handle, self.data.data_ptr() + self.at, nbytes)
        self.at += nbytes


def _backends(
    weights: Weights, packed: Packed, shape: ModelShape, names: Sequence[str], threads: int
) -> dict[str, Caller]:
    """The named backends; those that are refused are told on stderr and left out."""
    problem = problem_of(weights, detect_device("cpu"), top_k=shape.top_k, packages=installed_packages(BACKENDS))
    found: dict[str, Caller] = {}
    for name in names:
        if name == "cpu":
            ours = cpu.CpuExperts(packed, problem, cpu_native.context(None, threads))
            found[name] = partial(_call, ours)
            continue
        try:
            found[name] = partial(_call, build(decide(problem, pin=name), weights))
        except (NoBackendError, Refused) as e:
            print(e, file=sys.stderr)
    return found


def _call(experts: Callable[..., Tensor], inputs: Inputs) -> Tensor:
    return experts(*inputs)


def _peers(weights: Weights, shape: ModelShape, threads: int) -> dict[str, Caller]:
    found: dict[str, Caller] = {}
    for name in PEERS:
        made = peer(name, weights, shape.top_k, threads)
        if isinstance(made, str):
            print(f"{name}: {made}", file=sys.stderr)
        else:
            found[name] = partial(_call, made)
    return found


def _points(args: argparse.Namespace, shape: ModelShape, scheme: Scheme, threads_list: Sequence[int]) -> list[Row]:
    """All rows of one layer."""
    E, H, I = shape.num_experts, shape.hidden_size, shape.intermediate_size
    weights = random_weights(scheme, E, H, I, activation=shape.activation, bias=shape.bias)
    packed = cpu.pack(weights, problem_of(weights, detect_device("cpu"), top_k=shape.top_k))
    seg = shape.activation.segments
    expert_bytes = scheme.nbytes(seg * I, H, seg) + scheme.nbytes(H, I)
    rows = []
    for threads in threads_list:
        torch.set_num_threads(threads)
        context = cpu_native.context(None, threads)
        calls = _backends(weights, packed, shape, args.backend or ["cpu"], threads)
        calls |= _peers(weights, shape, threads) if args.peers else {}
        top = ceilings(context, packed.tensors["w13.stream"].view(-1))
        reader = _Reader(packed, context)
        for M in args.m or TOKENS:
            sets = _inputs(shape, M)
            errors = {name: _error(call, weights, sets[0]) for name, call in calls.items()}
            nbytes = statistics.mean(int(torch.unique(ids).numel()) for _, ids, _ in sets) * expert_bytes
            flop = 2.0 * (seg + 1) * M * shape.top_k * H * I
            whole = min(int(nbytes), reader.data.numel()) // 64 * 64
            timed: dict[str, Caller] = {**calls, READ: partial(reader, whole)}
            times = _times(timed, sets, args.seconds * len(timed))
            for name, us in times.items():
                size = whole if name == READ else nbytes
                rows.append(Row(shape.name, scheme.name, name, threads, M, us, size / us / 1e3,
                                0.0 if name == READ else flop / us / 1e3, errors.get(name, 0.0)))  # fmt: skip
                print(_line(rows[-1], whole / times[READ] / 1e3, top["bf16_gflop_s"]), file=sys.stderr, flush=True)
    return rows


def _line(r: Row, read_gb_s: float, peak: float) -> str:
    return (
        f"{r.shape:16s} {r.scheme:14s} {r.backend:16s} threads {r.threads} M {r.M:5d} {r.us:11.1f} us"
        f" {r.gb_s:6.1f} GB/s"
        f" {r.gb_s / read_gb_s * 100:4.0f} % of read {r.gflop_s:7.1f} GFLOP/s {r.gflop_s / peak * 100:4.0f} % of bf16"
        f" error {r.relative_error:.1e}"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The bench's --device cpu.  args: shape, scheme, backend, m, threads (lists or None), peers, seconds.

    The ceilings of the result are those of the largest number of threads; a point's own read is its plain_read row.
    """
    facts = machine()
    threads = args.threads or sorted({1, min(2, len(cpu_native.physical_cpus()))})
    context = cpu_native.context(None, max(threads))
    top = ceilings(context, torch.zeros(256 << 20, dtype=torch.uint8))
    print(f"{facts}\n{max(threads)} threads: {top}", file=sys.stderr, flush=True)
    rows: list[Row] = []
    for name in args.shape or SHAPES:
        shape = shape_of(name)
        default = ["mxfp4"] if shape.family == "gpt_oss" else ["int4_g128"]
        for scheme in args.scheme or default:
            rows += _points(args, shape, Scheme.parse(scheme), threads)
    return {"machine": facts, "ceilings": top, "rows": [asdict(r) for r in rows]}
