"""Finds tile sizes of the row `triton` on this GPU: times whole layers over candidate plans and prints the fastest.

    python kernels/bench/triton_tune.py --shape qwen3-30b-a3b --scheme int4_g128,mxfp4 --tokens 8,512 --out DIR

--scheme may name the shape, as gpt-oss-120b:mxfp4; --compile-only fills the compiler's cache before a benchmark.

One JSON line a candidate goes to DIR/triton_tune.jsonl as soon as it is timed, so that a run that is cut off loses
nothing.  GEMM 1 is varied with the heuristic's GEMM 2, then GEMM 2 with the best GEMM 1.  Candidates are compiled by
several processes first; a candidate that does not compile or gives a wrong answer is recorded as such and not timed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from expertd_kernels.backends import triton as backend
from expertd_kernels.backends.portable.experts import TritonExperts
from expertd_kernels.backends.portable.layout import FLOAT, Layout, layout_of
from expertd_kernels.backends.portable.matrix import Matrix
from expertd_kernels.backends.portable.tiling import Tile, TilingPlan, stage_bytes
from expertd_kernels.backends.triton_launch import OPTIONS
from expertd_kernels.bench.cuda import ceilings, graph_times, input_sets, machine, shape_of
from expertd_kernels.oracle.probe import detect_device
from expertd_kernels.packed.builder import problem_of
from expertd_kernels.sources.synthetic import random_weights
from expertd_kernels.weights.canonical import CODE_DTYPE
from expertd_kernels.weights.float32 import reference
from expertd_kernels.weights.models import ModelShape
from expertd_kernels.weights.numerics import relative_error, tolerance
from expertd_kernels.weights.scheme import Scheme

__all__ = ["candidates", "main"]

SHARED_BYTES = 227 * 1024


@dataclass(frozen=True)
class Job:
    """One layer and token count with a plan; gemm: which of the two is being varied."""

    shape: str
    scheme: str
    tokens: int
    gemm: int
    plan: TilingPlan


def _tiles(tile: Tile, lay: Layout, segments: int) -> Iterator[Tile]:
    """`tile` and those that differ from it in one way."""
    yield tile
    for bn, warps in {(16, 1): ((32, 2),), (32, 2): ((16, 1), (64, 4)), (64, 4): ((32, 2), (128, 8), (128, 4))}.get(
        (tile.weight_rows, tile.warps), ((64, 4), (128, 8) if segments == 2 else (256, 8))
    ):
        yield replace(tile, weight_rows=bn, warps=warps)
    for stages in (tile.stages - 1, tile.stages + 1):
        if stages > 1:
            yield replace(tile, stages=stages)
    for bc in (tile.containers // 2, tile.containers * 2):
        if 16 <= bc <= (128 if lay.elem == FLOAT else lay.sw):
            yield replace(tile, containers=bc, k_blocks=1)
    if lay.elem != FLOAT and tile.containers == lay.sw:
        yield replace(tile, k_blocks=3 - tile.k_blocks)
    for together in {1, 4, 16} - {tile.together}:
        yield replace(tile, together=together)
    if lay.fold == 2 or (lay.fold == 1 and lay.elem in (0, 2)):
        yield replace(tile, weighted=not tile.weighted)


def block_rows(bm: int) -> tuple[int, ...]:
    """Rows a block to try where the heuristic takes bm."""
    return (bm, bm // 2, bm * 2) if 16 <= bm <= 64 else (bm, 16) if bm == 8 else (bm, bm // 2)


def candidates(experts: TritonExperts, gemm: int, base: TilingPlan) -> list[TilingPlan]:
    """Plans that differ from `base` in one GEMM's tile."""
    m = experts.w13 if gemm == 1 else experts.w2
    out = []
    for tile in _tiles(base.w13 if gemm == 1 else base.w2, m.layout, m.segments):
        if tile.stages * stage_bytes(tile, base.rows, m.layout, m.segments, False) > SHARED_BYTES:
            continue
        if m.segments * tile.weight_rows * base.rows > 128 * 32 * tile.warps:  # more accumulators than registers
            continue
        out.append(replace(base, w13=tile) if gemm == 1 else replace(base, w2=tile))
    return out


class Compiling(TritonExperts):
    """Compiles one of the two GEMMs instead of running the layer."""

    wanted = 1

    def _launch(self, call: Any, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        if "GATHER_X" in constants and constants["GATHER_X"] == (self.wanted == 1):
            kernel.warmup(*args, grid=grid, **constants, **OPTIONS)


def _empty(scheme: Scheme, shape: ModelShape, n: int, k: int, segments: int) -> Matrix:
    """A matrix of the right sizes, without values."""
    E, lay = shape.num_experts, layout_of(scheme, n, k, segments)
    seg = n // segments
    if lay.elem == FLOAT:
        tensors = {"codes": torch.empty(E, n, k, dtype=CODE_DTYPE[scheme.element], device="cuda")}
    else:
        size = (E, segments, -(-seg // 16), -(-k // lay.block), 16, lay.sw)
        tensors = {"codes": torch.empty(size, dtype=torch.int16, device="cuda")}
        name = "row_scales" if lay.group == 0 else "scales"
        dtype = torch.float32 if lay.group == 0 else torch.int32
        tensors[name] = torch.empty(16, dtype=dtype, device="cuda")
        if scheme.zeros:
            tensors["zeros"] = torch.empty(16, dtype=torch.int32, device="cuda")
    if shape.bias:
        tensors["bias"] = torch.empty(E, n, device="cuda")
    return Matrix(tensors, lay, seg, k, segments)


def _compile(jobs: Sequence[Job]) -> None:
    """Worker: fills the compiler's cache."""
    torch.set_num_threads(1)
    made: dict[tuple[str, str], Compiling] = {}
    for job in jobs:
        s, scheme = shape_of(job.shape), Scheme.parse(job.scheme)
        key = (job.shape, job.scheme)
        if key not in made:
            seg = s.activation.segments
            w13 = _empty(scheme, s, seg * s.intermediate_size, s.hidden_size, seg)
            w2 = _empty(scheme, s, s.hidden_size, s.intermediate_size, 1)
            made[key] = Compiling("triton", w13, w2, s.activation)
        experts = made[key]
        experts.wanted, experts._planner = job.gemm, lambda tokens, plan=job.plan: plan
        x = torch.empty(job.tokens, s.hidden_size, dtype=torch.bfloat16, device="cuda")
        ids = torch.empty(job.tokens, s.top_k, dtype=torch.int32, device="cuda")
        try:
            experts(x, ids, torch.empty(job.tokens, s.top_k, device="cuda"))
        except Exception as e:  # recorded again, with its text, when the main process runs it
            print(f"{job.shape} {job.scheme} {job.plan}: {type(e).__name__}", flush=True)


def precompile(jobs: Sequence[Job], processes: int) -> None:
    """Compile the distinct kernels of `jobs`, neighbouring jobs in different processes."""
    distinct = list({(j.shape, j.scheme, j.gemm, j.plan.rows, j.plan.direct, _tile(j)): j for j in jobs}.values())
    workers = [multiprocessing.Process(target=_compile, args=(distinct[i::processes],)) for i in range(processes)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    print(f"{len(distinct)} kernels compiled", flush=True)


def _tile(job: Job) -> Tile:
    return job.plan.w13 if job.gemm == 1 else job.plan.w2


class Layer:
    """Random weights of one layer, packed, with the means to time plans."""

    def __init__(self, shape: str, scheme: str) -> None:
        self.name, self.scheme_name = shape, scheme
        self.shape, self.scheme = shape_of(shape), Scheme.parse(scheme)
        s = self.shape
        self.weights = random_weights(
            self.scheme, s.num_experts, s.hidden_size, s.intermediate_size,
            activation=s.activation, bias=s.bias, signed_scales=True, device="cuda",
        )  # fmt: skip
        problem = problem_of(self.weights, detect_device("cuda"), top_k=s.top_k)
        self.experts = backend.experts(backend.pack(self.weights, problem), problem)
        self.expert_bytes = self.weights.nbytes / s.num_experts
        self.inputs: dict[int, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {}

    def time(self, tokens: int, plan: TilingPlan, budget_ms: float) -> tuple[float, float]:
        """(median microseconds, relative error) of the whole layer; (nan, error) where it is wrong."""
        if tokens not in self.inputs:
            self.inputs = {tokens: input_sets(self.shape, tokens, self.expert_bytes, "uniform")}
            x, ids, w = self.inputs[tokens][0]
            self.rows = torch.linspace(0, tokens - 1, min(tokens, 8)).long().to(x.device)
            self.expected = reference(self.weights, x[self.rows], ids[self.rows], w[self.rows])
        sets = self.inputs[tokens]
        outs = [torch.full_like(x, float("nan")) for x, _, _ in sets]
        self.experts._planner = lambda _: plan
        self.experts(*sets[0], out=outs[0])
        error = relative_error(outs[0][self.rows], self.expected)
        if not error <= tolerance("bf16") or not bool(torch.isfinite(outs[0]).all()):
            return float("nan"), error
        return graph_times([lambda i: self.experts(*sets[i], out=outs[i])], len(sets), budget_ms)[0], error


def kernel_times(layer: Layer, tokens: int) -> dict[str, float]:
    """Mean microseconds of each kernel of a layer, launched one by one, over the input sets of the last token count."""
    sets = layer.inputs[tokens]
    for s in sets:
        layer.experts(*s)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for s in sets:
            layer.experts(*s)
        torch.cuda.synchronize()
    totals = {e.key: e.device_time_total for e in found.key_averages()}
    return {name: round(us / len(sets), 1) for name, us in totals.items() if us > 0}


def tune(layer: Layer, tokens: int, out: Any, budget_ms: float, deadline: float) -> None:
    """Vary GEMM 1, then GEMM 2, for each number of rows a block; print the best."""
    e, k = layer.experts, layer.shape.top_k
    e._planner = None
    start = e.plan(tokens, k)
    best: dict[str, tuple[float, TilingPlan]] = {}
    first, _ = layer.time(tokens, start, budget_ms)
    for bm in block_rows(start.rows):
        here, us = replace(start, rows=bm), float("inf")
        for gemm in (1, 2):
            for plan in candidates(e, gemm, here):
                if time.monotonic() > deadline:
                    break
                record = {"shape": layer.name, "scheme": layer.scheme_name, "tokens": tokens, "gemm": gemm}
                try:
                    found, error = layer.time(tokens, plan, budget_ms)
                    record.update(us=found, error=error)
                except Exception as failure:
                    found = float("nan")
                    record.update(failed=f"{type(failure).__name__}: {failure}"[:200])
                out.write(json.dumps(record | {"plan": str(plan)}) + "\n")
                out.flush()
                if found < us:
                    here, us = plan, found
        best[f"rows {bm}"] = (us, here)
    us, plan = min(best.values(), key=lambda b: b[0])
    e._planner = lambda _: plan
    print(kernel_times(layer, tokens), flush=True)
    others = " ".join(f"{n}:{t:.1f}" for n, (t, _) in best.items())
    print(
        f"{layer.name} {layer.scheme_name} M {tokens}: start {first:.1f} best {us:.1f} us ({others}) {plan}", flush=True
    )


def _jobs(shape: str, scheme: str, tokens: Sequence[int], vary: bool) -> list[Job]:
    s, sch = shape_of(shape), Scheme.parse(scheme)
    seg = s.activation.segments
    w13 = _empty(sch, replace(s, num_experts=1), seg * s.intermediate_size, s.hidden_size, seg)
    w2 = _empty(sch, replace(s, num_experts=1), s.hidden_size, s.intermediate_size, 1)
    experts = TritonExperts("triton", w13, w2, s.activation)
    experts.num_experts = s.num_experts
    out = []
    for m in tokens:
        start = experts.plan(m, s.top_k)
        out += [Job(shape, scheme, m, g, start) for g in (1, 2)]
        for bm in block_rows(start.rows) if vary else ():
            for gemm in (1, 2):
                plans = candidates(experts, gemm, replace(start, rows=bm))
                out += [Job(shape, scheme, m, gemm, p) for p in plans]
    return out


def _plan_jobs(pairs: Sequence[tuple[str, str]], tokens: Sequence[int], vary: bool, queue: Any) -> None:
    queue.put([job for shape, scheme in pairs for job in _jobs(shape, scheme, tokens, vary)])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--scheme", default="int4_g128")
    parser.add_argument("--tokens", default="1,8,32,128,512,2048,8192")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--budget-ms", type=float, default=10.0, help="time of one candidate")
    parser.add_argument("--seconds", type=float, default=200.0, help="time of the whole run")
    parser.add_argument("--compile-only", action="store_true", help="compile what the heuristic takes, time nothing")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    a = parser.parse_args(arguments)
    deadline = time.monotonic() + a.seconds
    tokens = [int(m) for m in a.tokens.split(",")]
    pairs = [
        (s.split(":")[0], s.split(":")[1]) if ":" in s else (shape, s)
        for shape in a.shape.split(",")
        for s in a.scheme.split(",")
    ]
    # CUDA must not be started here before the compiling processes fork
    queue: Any = multiprocessing.Queue()
    planner = multiprocessing.Process(target=_plan_jobs, args=(pairs, tokens, not a.compile_only, queue))
    planner.start()
    jobs = queue.get()
    planner.join()
    precompile(jobs, a.processes)
    if a.compile_only:
        return
    print(machine(), ceilings(), f"{deadline - time.monotonic():.0f} s left", flush=True)
    with (a.out / "triton_tune.jsonl").open("a") as out:
        for shape, scheme in pairs:
            layer = Layer(shape, scheme)
            for m in tokens:
                if time.monotonic() < deadline:
                    tune(layer, m, out, a.budget_ms, deadline)
            del layer
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
