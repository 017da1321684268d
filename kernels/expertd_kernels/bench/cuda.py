"""The kernel benchmark on a CUDA GPU: whole expert layers, correctness first, then microseconds.

A point is one layer (routing, both GEMMs, activation, combine) at one number of tokens.  Time is the median replay of a
CUDA graph that holds one call for each of several input sets, over their number; the sets route differently (one
token: to disjoint experts), so the weights come from memory and not from the L2.  Several backends are timed in turns,
so that clock drift hits all alike.  Ceilings are measured in the same run: a plain read of memory, large bf16 and e4m3
products.  A backend that cannot be built, fails or is wrong gets no time and stops no other; results are written after
each layer.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
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

from expertd_kernels.bench.cuda_timing import Ceilings, ceilings, graph_times
from expertd_kernels.bench.measurements import picked
from expertd_kernels.bench.points import write_points
from expertd_kernels.bench.workers import NoResult, run_tasks
from expertd_kernels.common.protocol import Experts
from expertd_kernels.common.refused import Refused
from expertd_kernels.oracle.decision import NoBackendError, decide
from expertd_kernels.oracle.probe import detect_device, installed_packages
from expertd_kernels.oracle.table import BACKENDS
from expertd_kernels.packed.builder import build, problem_of
from expertd_kernels.sources.synthetic import random_inputs, random_weights
from expertd_kernels.weights.canonical import Weights
from expertd_kernels.weights.float32 import reference
from expertd_kernels.weights.models import MODELS, ModelShape
from expertd_kernels.weights.numerics import relative_error, tolerance
from expertd_kernels.weights.scheme import ActivationQuant, Scheme

__all__ = ["Ceilings", "CudaMeasurement", "ceilings", "graph_times", "input_sets", "machine", "run", "shape_of"]

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
    ("deepseek-v3/64", "bf16", "uniform"),
    ("mixtral-8x7b", "int4_g128", "uniform"),
    ("mixtral-8x7b", "int4_g128_zp", "uniform"),
    ("mixtral-8x7b", "int8_channel", "uniform"),
    ("mixtral-8x7b", "e4m3_block128", "uniform"),
    ("mixtral-8x7b", "bf16", "uniform"),
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
class CudaMeasurement:
    """One point.  gb_s: weight bytes of the distinct experts over the time.  roofline_fraction: the larger of
    bytes / read ceiling and FLOP / ceiling of the products, over the time.  Without a time these four are None;
    relative_error is None where an answer was not finite or there was none."""

    shape: str
    scheme: str
    backend: str
    routing: str
    M: int
    us: float | None
    gb_s: float | None
    gflop_s: float | None
    roofline_fraction: float | None
    relative_error: float | None
    tolerance: float
    activations: str = "none"


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
    """GPU, driver, versions, commit (of the work tree, or what EXPERTD_COMMIT says where there is none)."""
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
        "commit": os.environ.get("EXPERTD_COMMIT")
        or output("git", "-C", here, "describe", "--always", "--dirty", "--abbrev=12"),
    }


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


def _error(experts: Experts, weights: Weights, inputs: Inputs) -> float:
    """Relative error on up to CHECK_ROWS tokens spread over the batch; the output starts poisoned."""
    x, ids, w = inputs
    out = torch.full_like(x, float("nan"))
    experts(x, ids, w, out=out)
    if not bool(torch.isfinite(out).all()):
        return float("inf")
    rows = torch.unique(torch.linspace(0, x.shape[0] - 1, min(x.shape[0], CHECK_ROWS)).long()).to(x.device)
    return relative_error(out[rows], reference(weights, x[rows], ids[rows], w[rows]))


def _candidates(
    weights: Weights, top_k: int, names: Sequence[str], how: ActivationQuant = ActivationQuant.NONE
) -> dict[str, Experts]:
    """The named backends; "all": each that the oracle does not refuse, but the reference, without any "-NAME"; none
    named: its choice.  Refusals and failures go to stderr."""
    problem = problem_of(
        weights,
        detect_device("cuda"),
        top_k=top_k,
        activation_quant=how,
        packages=installed_packages(BACKENDS, probe_imports=True),
    )
    every = [v.backend for v in decide(problem).verdicts if v.eligible and v.backend != "reference"]
    wanted: Sequence[str | None] = picked(names, every) if names else [None]
    found: dict[str, Experts] = {}
    for name in wanted:
        begin = time.perf_counter()
        try:
            decision = decide(problem, pin=name)
            row = decision.require()
            found[row.name] = build(decision, weights)
        except (NoBackendError, Refused) as e:
            print(e, file=sys.stderr)
        except Exception as e:  # a package that fails here must not cost the others their run
            print(f"{name}: {type(e).__name__}: {e}", file=sys.stderr)
        print(f"{name or 'the choice'}: {time.perf_counter() - begin:.1f} s to build", file=sys.stderr, flush=True)
    return found


def _errors(candidates: dict[str, Experts], weights: Weights, inputs: Inputs) -> dict[str, float]:
    """Relative errors; infinite, with the exception on stderr, for one that fails."""
    errors = {}
    for name, e in candidates.items():
        try:
            errors[name] = _error(e, weights, inputs)
        except Exception as problem:
            print(f"{name}: {type(problem).__name__}: {problem}", file=sys.stderr)
            errors[name] = math.inf
    return errors


def _weights(shape: ModelShape, scheme: Scheme) -> Weights:
    """A random layer on the GPU."""
    return random_weights(
        scheme,
        shape.num_experts,
        shape.hidden_size,
        shape.intermediate_size,
        activation=shape.activation,
        bias=shape.bias,
        device="cuda",
    )


def _compile(
    layer: tuple[ModelShape, Scheme], tokens: Sequence[int], names: Sequence[str], how: ActivationQuant
) -> float:
    """Calls each backend once with each number of tokens, in a process of its own: what it compiles stays in the
    compilers' caches on disk.  Returns the seconds."""
    begin = time.perf_counter()
    shape, scheme = layer
    weights = _weights(shape, scheme)
    candidates = _candidates(weights, shape.top_k, names, how)
    for M in tokens:
        inputs = random_inputs(M, shape.hidden_size, shape.num_experts, shape.top_k, device="cuda")
        for name, experts in candidates.items():
            try:
                experts(*inputs)
            except Exception as e:
                print(f"{name}, {M} tokens: {type(e).__name__}: {e}", file=sys.stderr)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def points(
    shape: ModelShape,
    scheme: Scheme,
    tokens: Sequence[int],
    backends: Sequence[str],
    routing: str,
    top: Ceilings,
    how: ActivationQuant = ActivationQuant.NONE,
    others: Mapping[str, Callable[[Weights], Experts]] | None = None,
) -> list[CudaMeasurement]:
    """All rows of one layer, with activations rounded `how`.  One whose error is above the tolerance gets no time.
    others: what is no row of the table but is timed beside them."""
    weights = _weights(shape, scheme)
    H, I, seg = shape.hidden_size, shape.intermediate_size, shape.activation.segments
    bias_bytes = 2 * (seg * I + H) if shape.bias else 0
    expert_bytes = scheme.nbytes(seg * I, H, seg) + scheme.nbytes(H, I) + bias_bytes
    candidates = _candidates(weights, shape.top_k, backends, how)
    candidates |= {name: make(weights) for name, make in (others or {}).items()}
    limit = tolerance("bf16", how)
    rows = []
    for M in tokens:
        sets = input_sets(shape, M, expert_bytes, routing)
        errors = _errors(candidates, weights, sets[0])
        right = {n: e for n, e in candidates.items() if errors[n] <= limit}
        times = graph_times([_caller(e, sets) for e in right.values()], len(sets)) if right else []
        hit = statistics.mean(int(torch.unique(ids).numel()) for _, ids, _ in sets)
        nbytes, flop = hit * expert_bytes, 2.0 * (seg + 1) * M * shape.top_k * H * I
        floor = max(nbytes / top.read_gb_s / 1e3, flop / top.tflop_s(how) / 1e6)
        found = dict(zip(right, times, strict=True))
        for name in candidates:
            time_us = found.get(name, math.nan)
            us, gb_s, gflop_s, fraction, error = (
                f if math.isfinite(f) else None
                for f in (time_us, nbytes / time_us / 1e3, flop / time_us / 1e3, floor / time_us, errors[name])
            )
            rows.append(
                CudaMeasurement(
                    shape.name, scheme.name, name, routing, M, us, gb_s, gflop_s, fraction, error, limit, how.value
                )
            )
            print(_line(rows[-1]), file=sys.stderr, flush=True)
        del sets
    return rows


def _caller(experts: Experts, sets: Sequence[Inputs]) -> Callable[[int], object]:
    outs = [torch.empty_like(x) for x, _, _ in sets]
    return lambda i: experts(*sets[i], out=outs[i])


def _line(r: CudaMeasurement) -> str:
    point = f"{r.shape:20s} {r.scheme:16s} {r.backend:12s} {r.routing:8s} M {r.M:5d}"
    error = "not finite" if r.relative_error is None else f"{r.relative_error:.1e}"
    if r.us is None or r.gb_s is None or r.gflop_s is None or r.roofline_fraction is None:
        return f"{point} no time, error {error}, tolerance {r.tolerance:.0e}"
    return (
        f"{point} {r.us:9.1f} us {r.gb_s:6.0f} GB/s {r.gflop_s / 1e3:6.1f} TFLOP/s"
        f" {r.roofline_fraction * 100:4.0f} % of the roof, error {error}"
    )


def _suite(args: argparse.Namespace) -> list[tuple[ModelShape, Scheme, str]]:
    """The layers asked for, or SUITE.  ValueError for an unknown name."""

    def listed(value: str | None, default: str) -> list[str]:
        return (value or default).split(",")

    suite: Sequence[tuple[str, str, str]] = SUITE
    if args.shape or args.scheme:
        shapes, schemes = listed(args.shape, "qwen3-30b-a3b"), listed(args.scheme, "int4_g128")
        suite = [(a, b, c) for a in shapes for b in schemes for c in listed(args.routing, "uniform")]
    return [(shape_of(a), Scheme.parse(b), c) for a, b, c in suite]


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The bench's --device cuda.  args: shape, scheme, backend, routing (comma-separated or None: SUITE), m (numbers or
    None), activations (how they are rounded), budget (seconds after which no layer is begun, or None), json, csv (paths
    or None; written after each layer), jobs (processes that compile all layers' kernels first, or None).  ValueError
    for an unknown name, or without a GPU."""
    begin = time.monotonic()
    layers = _suite(args)
    how = ActivationQuant(getattr(args, "activations", None) or "none")
    budget = getattr(args, "budget", None) or math.inf
    if not torch.cuda.is_available():
        raise ValueError("bench: --device cuda: torch sees no GPU here; --device cpu runs anywhere")
    tokens = [int(m) for m in args.m] if args.m else DEFAULT_TOKENS
    names = args.backend.split(",") if args.backend else []
    if getattr(args, "jobs", None):
        compile_all(list(dict.fromkeys((s, q) for s, q, _ in layers)), tokens, names, how, args.jobs, budget)
    top = ceilings()
    facts = machine()
    print(f"{facts}\n{top}", file=sys.stderr, flush=True)
    result: dict[str, Any] = {"machine": facts, "ceilings": asdict(top), "rows": [], "not_run": []}
    for shape, scheme, routing in layers:
        if time.monotonic() - begin > budget:
            result["not_run"].append(f"{shape.name} {scheme.name} {routing}")
            continue
        result["rows"] += [asdict(r) for r in points(shape, scheme, tokens, names, routing, top, how)]
        torch.cuda.empty_cache()
        if args.json:
            Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
        if getattr(args, "csv", None):
            write_points(Path(args.csv), [{**r, **facts, **asdict(top)} for r in result["rows"]])
    for layer in result["not_run"]:
        print(f"not run, the budget was spent: {layer}", file=sys.stderr)
    return result


def compile_all(
    layers: Sequence[tuple[ModelShape, Scheme]],
    tokens: Sequence[int],
    names: Sequence[str],
    how: ActivationQuant,
    jobs: int,
    budget_s: float,
) -> None:
    """Fill the compilers' caches for all layers in `jobs` processes, in at most half of the budget; failures go to
    stderr and show up again, with their layer, when it is timed."""
    half = budget_s / 2
    target = partial(_compile, tokens=tuple(tokens), names=tuple(names), how=how)
    for (shape, scheme), got in run_tasks(target, layers, jobs=jobs, budget_s=half, limit_s=half):
        said = got.reason if isinstance(got, NoResult) else f"{got:.1f} s"
        print(f"compiled {shape.name} {scheme.name}: {said}", file=sys.stderr, flush=True)
