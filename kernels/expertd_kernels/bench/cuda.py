"""The kernel benchmark on a CUDA GPU: whole expert layers, correctness first, then microseconds.

A point is one layer (routing, both GEMMs, activation, combine) at one number of tokens.  Time is the median replay of a
CUDA graph that holds one call for each of several input sets, over their number; the sets route differently (one token:
to disjoint experts), so the weights come from memory and not from the L2.  Several backends are timed in turns, so that
clock drift hits all alike.  Ceilings are measured in the same run: a plain read of memory, a large bf16 product.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expertd_kernels.backends.protocol import Experts
from expertd_kernels.builder import build, problem_of
from expertd_kernels.canonical import Weights
from expertd_kernels.float32 import reference
from expertd_kernels.models import MODELS, ModelShape
from expertd_kernels.numerics import relative_error, tolerance
from expertd_kernels.oracle import NoBackendError, Refused, decide
from expertd_kernels.probe import detect_device, installed_packages
from expertd_kernels.scheme import Scheme
from expertd_kernels.synthetic import random_inputs, random_weights
from expertd_kernels.table import BACKENDS

__all__ = ["Ceilings", "Row", "ceilings", "graph_times", "input_sets", "machine", "run", "shape_of"]

DEFAULT_TOKENS = (1, 8, 32, 128, 512, 2048, 8192)
SUITE = (
    ("qwen3-30b-a3b", "int4_g128", "uniform"),
    ("qwen3-30b-a3b", "int4_g128", "zipf"),
    ("qwen3-30b-a3b", "int4_g128_zp", "uniform"),
    ("qwen3-30b-a3b", "mxfp4", "uniform"),
    ("qwen3-30b-a3b", "int8_channel", "uniform"),
    ("qwen3-30b-a3b", "e4m3_block128", "uniform"),
    ("qwen3-30b-a3b", "bf16", "uniform"),
    ("deepseek-v3/64", "int4_g128", "uniform"),
    ("deepseek-v3/64", "e4m3_block128", "uniform"),
    ("mixtral-8x7b", "int4_g128", "uniform"),
    ("mixtral-8x7b", "int4_g128_zp", "uniform"),
    ("mixtral-8x7b", "int8_channel", "uniform"),
    ("mixtral-8x7b", "e4m3_block128", "uniform"),
    ("gpt-oss-120b", "mxfp4", "uniform"),
    ("gpt-oss-120b", "mxfp4", "zipf"),
    ("gpt-oss-120b", "bf16", "uniform"),
    ("E60-k6-H3584-I1280", "int4_g128", "uniform"),
    ("E16-k1-H5120-I8192", "int4_g128", "uniform"),
)
"""Layers of the committed table, run when neither shape nor scheme is named.  Nobody tuned for the last two."""
CHECK_ROWS = 16
ZIPF_EXPONENT = 1.0
WEIGHT_CYCLE_BYTES = 400_000_000
"""Weights that the input sets of a point touch together, about six times the L2 of an H200."""

Inputs = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Ceilings:
    """Measured on this GPU in this run: GB/s of a plain read, TFLOP/s of an 8192 ** 3 bf16 product."""

    read_gb_s: float
    bf16_tflop_s: float


@dataclass(frozen=True)
class Row:
    """One point.  gb_s: weight bytes of the distinct experts over the time.  roofline_fraction: the larger of
    bytes / read ceiling and FLOP / bf16 ceiling, over the time."""

    shape: str
    scheme: str
    backend: str
    routing: str
    M: int
    us: float
    gb_s: float
    gflop_s: float
    roofline_fraction: float
    relative_error: float


def shape_of(name: str) -> ModelShape:
    """A model's name, NAME/E for a slice with E experts, or "E60-k6-H3584-I1280".  ValueError lists the names."""
    free = re.fullmatch(r"E(\d+)-k(\d+)-H(\d+)-I(\d+)", name)
    if free:
        E, k, H, I = (int(v) for v in free.groups())
        return ModelShape(name, "free", E, k, H, I, (0,))
    base, _, experts = name.partition("/")
    if base not in MODELS or (experts and not experts.isdecimal()):
        raise ValueError(
            f"shape {name!r}: want a model, MODEL/EXPERTS or E60-k6-H3584-I1280; models: {', '.join(MODELS)}"
        )
    s = MODELS[base]
    return replace(s, name=name, num_experts=int(experts)) if experts else s


def machine() -> dict[str, str]:
    """GPU, driver, versions, commit."""
    import triton

    def output(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().split("\n")[0]
        except (OSError, subprocess.CalledProcessError):
            return "unknown"

    here = str(Path(__file__).parent)
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": str(torch.__version__),
        "triton": triton.__version__,
        "commit": output("git", "-C", here, "describe", "--always", "--dirty", "--abbrev=12"),
    }


def _events(calls: Iterable[Callable[[], object]]) -> list[float]:
    """Microseconds of each call on the current stream; the stream never runs empty between them."""
    marks = []
    for call in calls:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        marks.append((begin, end))
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1e3 for a, b in marks]


def ceilings() -> Ceilings:
    """The two rates that bound a layer, measured here: medians of 15."""
    from expertd_kernels.bench.cuda_read import read_all

    data = torch.randn(1 << 30, device="cuda")
    read = statistics.median(_events([partial(read_all, data)] * 18)[3:])
    gb_s = data.numel() * 4 / read / 1e3
    del data
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    c = torch.empty_like(a)
    product = statistics.median(_events([partial(torch.mm, a, b, out=c)] * 18)[3:])
    return Ceilings(gb_s, 2 * 8192**3 / product / 1e6)


def input_sets(shape: ModelShape, tokens: int, expert_bytes: float, routing: str) -> list[Inputs]:
    """Input sets that together touch WEIGHT_CYCLE_BYTES of weights where they can; 2 to 16 of them."""
    E, k = shape.num_experts, shape.top_k
    hit = E * (1.0 - (1.0 - k / E) ** tokens)
    count = int(min(16 if tokens == 1 else 8, max(2, WEIGHT_CYCLE_BYTES / max(1.0, hit * expert_bytes) + 1)))
    if tokens >= 2048:
        count = min(count, 2)
    exponent = ZIPF_EXPONENT if routing == "zipf" else 0.0
    sets = [
        random_inputs(tokens, shape.hidden_size, E, k, zipf_exponent=exponent, seed=101 + r, device="cuda")
        for r in range(count)
    ]
    if tokens == 1 and routing == "uniform":
        order = torch.randperm(E, generator=torch.Generator().manual_seed(7)).int().cuda()
        sets = [
            (x, order.roll(-r * k)[:k].view(1, k).contiguous() if 2 * k <= E else ids, w)
            for r, (x, ids, w) in enumerate(sets)
        ]
    return sets


def graph_times(backends: Sequence[Callable[[int], object]], sets: int, budget_ms: float = 40.0) -> list[float]:
    """Median microseconds a call for each backend, call(i) on input set i, their graphs replayed in turns."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    graphs = []
    with torch.cuda.stream(stream):
        for call in backends:
            for i in range(sets):
                call(i)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for i in range(sets):
                    call(i)
            graph.replay()
            graphs.append(graph)
        once = sum(_events([g.replay for g in graphs]))
        rounds = int(min(60, max(7, budget_ms * 1e3 * len(graphs) / once)))
        times = _events([g.replay for g in graphs] * (rounds + 1))[len(graphs) :]
    torch.cuda.current_stream().wait_stream(stream)
    return [statistics.median(times[b :: len(graphs)]) / sets for b in range(len(graphs))]


def _error(experts: Experts, weights: Weights, inputs: Inputs) -> float:
    """Relative error on up to CHECK_ROWS tokens spread over the batch; the output starts poisoned."""
    x, ids, w = inputs
    out = torch.full_like(x, float("nan"))
    experts(x, ids, w, out=out)
    if not bool(torch.isfinite(out).all()):
        return float("inf")
    rows = torch.unique(torch.linspace(0, x.shape[0] - 1, min(x.shape[0], CHECK_ROWS)).long()).to(x.device)
    return relative_error(out[rows], reference(weights, x[rows], ids[rows], w[rows]))


def _candidates(weights: Weights, top_k: int, names: Sequence[str]) -> dict[str, Experts]:
    """The named backends, or the oracle's choice where none is named.  Refusals go to stderr."""
    problem = problem_of(weights, detect_device("cuda"), top_k=top_k, packages=installed_packages(BACKENDS))
    found: dict[str, Experts] = {}
    for name in names or (None,):
        try:
            decision = decide(problem, pin=name)
            found[decision.require().name] = build(decision, weights)
        except (NoBackendError, Refused) as e:
            print(e, file=sys.stderr)
    return found


def points(
    shape: ModelShape,
    scheme: Scheme,
    tokens: Sequence[int],
    backends: Sequence[str],
    routing: str,
    top: Ceilings,
) -> list[Row]:
    """All rows of one layer.  A backend whose error is above the tolerance gets no time."""
    weights = random_weights(
        scheme,
        shape.num_experts,
        shape.hidden_size,
        shape.intermediate_size,
        activation=shape.activation,
        bias=shape.bias,
        device="cuda",
    )
    H, I, seg = shape.hidden_size, shape.intermediate_size, shape.activation.segments
    bias_bytes = 2 * (seg * I + H) if shape.bias else 0
    expert_bytes = scheme.nbytes(seg * I, H, seg) + scheme.nbytes(H, I) + bias_bytes
    candidates = _candidates(weights, shape.top_k, backends)
    rows = []
    for M in tokens:
        sets = input_sets(shape, M, expert_bytes, routing)
        errors = {name: _error(e, weights, sets[0]) for name, e in candidates.items()}
        right = {n: e for n, e in candidates.items() if errors[n] <= tolerance("bf16")}
        times = graph_times([_caller(e, sets) for e in right.values()], len(sets)) if right else []
        hit = statistics.mean(int(torch.unique(ids).numel()) for _, ids, _ in sets)
        nbytes, flop = hit * expert_bytes, 2.0 * (seg + 1) * M * shape.top_k * H * I
        floor = max(nbytes / top.read_gb_s / 1e3, flop / top.bf16_tflop_s / 1e6)
        found = dict(zip(right, times, strict=True))
        for name in candidates:
            us = found.get(name, float("nan"))
            gb_s, gflop_s = nbytes / us / 1e3, flop / us / 1e3
            rows.append(Row(shape.name, scheme.name, name, routing, M, us, gb_s, gflop_s, floor / us, errors[name]))
            print(_line(rows[-1]), file=sys.stderr, flush=True)
        del sets
    return rows


def _caller(experts: Experts, sets: Sequence[Inputs]) -> Callable[[int], object]:
    outs = [torch.empty_like(x) for x, _, _ in sets]
    return lambda i: experts(*sets[i], out=outs[i])


def _line(r: Row) -> str:
    return (
        f"{r.shape:20s} {r.scheme:16s} {r.backend:12s} {r.routing:8s} M {r.M:5d} {r.us:9.1f} us {r.gb_s:6.0f} GB/s"
        f" {r.gflop_s / 1e3:6.1f} TFLOP/s {r.roofline_fraction * 100:4.0f} % of the roof, error {r.relative_error:.1e}"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The bench's --device cuda.  args: shape, scheme, backend, routing (comma-separated or None: SUITE), m (numbers or
    None), json, csv (paths or None).  ValueError for an unknown name, or without a GPU."""

    def listed(value: str | None, default: str) -> list[str]:
        return (value or default).split(",")

    suite: Sequence[tuple[str, str, str]] = SUITE
    if args.shape or args.scheme:
        shapes, schemes = listed(args.shape, "qwen3-30b-a3b"), listed(args.scheme, "int4_g128")
        suite = [(a, b, c) for a in shapes for b in schemes for c in listed(args.routing, "uniform")]
    layers = [(shape_of(a), Scheme.parse(b), c) for a, b, c in suite]
    if not torch.cuda.is_available():
        raise ValueError("bench: --device cuda: torch sees no GPU here; --device cpu runs anywhere")
    top = ceilings()
    facts = machine()
    print(f"{facts}\nread {top.read_gb_s:.0f} GB/s, bf16 {top.bf16_tflop_s:.0f} TFLOP/s", file=sys.stderr, flush=True)
    rows: list[Row] = []
    for shape, scheme, routing in layers:
        tokens = [int(m) for m in args.m] if args.m else DEFAULT_TOKENS
        names = args.backend.split(",") if args.backend else []
        rows += points(shape, scheme, tokens, names, routing, top)
        torch.cuda.empty_cache()
    result = {"machine": facts, "ceilings": asdict(top), "rows": [asdict(r) for r in rows]}
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    if getattr(args, "csv", None):
        write_csv(Path(args.csv), result)
    return result


def write_csv(path: Path, result: dict[str, Any]) -> None:
    """One line a point, with the machine and the ceilings on each."""
    with path.open("w", newline="") as f:
        lines = [{**r, **result["machine"], **result["ceilings"]} for r in result["rows"]]
        writer = csv.DictWriter(f, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
