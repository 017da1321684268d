"""How many threads the CPU kernel should have: measured, not assumed."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence

from expertd_kernels.backends import cpu
from expertd_kernels.common.problem import Problem
from expertd_kernels.native import library as native
from expertd_kernels.native.cores import cpu_quota, most_threads, physical_cores
from expertd_kernels.sources.synthetic import random_inputs, random_weights

__all__ = ["candidates", "choose", "measured_threads"]

WEIGHTS = 64_000_000
"""Weights of the layer that is measured, about: 32 MB at 4 bits, as much as a last-level cache holds."""
MOST_EXPERTS = 16
TOKENS = (1, 16)
"""Numbers of tokens that are measured: bound by memory, and by memory and arithmetic."""
ROUNDS = 5
SECONDS = 0.5
"""For each number of tokens; two rounds at least."""
ENOUGH = 1.03
"""The least number of threads within this factor of the fastest is chosen: the others are free for gRPC and Python."""


def candidates(most: int) -> tuple[int, ...]:
    """Numbers of threads worth trying: 1, 2, 3, 4, 6, 8, 12, ... and all."""
    doubled = (n for p in range(most.bit_length()) for n in (1 << p, 3 << p))
    return tuple(sorted({n for n in doubled if n < most} | {most}))


def choose(times: Mapping[int, Sequence[float]]) -> int:
    """Number of threads from times [number][token count]: the least within ENOUGH of the best geometric mean."""
    means = {n: math.exp(sum(map(math.log, t)) / len(t)) for n, t in times.items()}
    best = min(means.values())
    return min(n for n, mean in means.items() if mean <= best * ENOUGH)


def measured_threads(problem: Problem, most: int = 0, note: Callable[[str], None] = lambda _: None) -> int:
    """Times the kernel on random weights of the problem's shape and scheme, the candidates in turns, and chooses.

    most: no more threads than this; 0 = one a core, within the container's quota.  note: told what was measured.  Takes
    a few seconds and up to 1 GB.  KernelMissingError where the kernel is not built.
    """
    most = most or most_threads(physical_cores(), cpu_quota())
    H, I = problem.hidden_size, problem.intermediate_size
    E = min(problem.num_experts, max(2, WEIGHTS // ((problem.activation.segments + 1) * H * I)), MOST_EXPERTS)
    k = min(problem.top_k, E)
    weights = random_weights(problem.w13, E, H, I, activation=problem.activation)
    packed = cpu.pack(weights, problem)
    level = os.environ.get("EXPERTD_CPU_ISA", "")
    found = {n: cpu.CpuExperts(packed, problem, native.Context(level, n)) for n in candidates(most)}
    times: dict[int, list[float]] = {n: [] for n in found}
    for tokens in TOKENS:
        sets = [random_inputs(tokens, H, E, k, seed=s) for s in range(ROUNDS + 1)]
        taken: dict[int, list[float]] = {n: [] for n in found}
        end = time.perf_counter() + SECONDS
        for i, inputs in enumerate(sets):
            if i > 1 and time.perf_counter() > end:
                break
            for n, experts in found.items():
                start = time.perf_counter()
                experts(*inputs)
                taken[n].append(time.perf_counter() - start)
        for n, seconds in taken.items():
            times[n].append(min(seconds[1:]))  # the first call wakes threads and takes memory
    chosen = choose(times)
    table = "; ".join(f"{n}: " + ", ".join(f"{s * 1e3:.2f}" for s in t) for n, t in times.items())
    note(f"threads: {chosen} of {most} (ms for {TOKENS} tokens: {table})")
    return chosen
