"""Threads of the CPU kernel: which cores they are pinned to, and how many there should be.

    cores = physical_cores()                one CPU of each core that this process may use, node by node
    cpus  = pins(threads, cores)            a CPU for each thread
    n     = measured_threads(problem)       the number that computes this layer fastest, measured

Threads are spread evenly over the cores in the order of memory nodes.  So each thread works on one long range of
experts beside its neighbours of the same node, and as packing shares a matrix of gates among the same threads in the
same order, the pages of an expert are first touched on the node that will read them.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from expertd_kernels.problem import Problem

__all__ = ["Core", "candidates", "choose", "cpu_quota", "measured_threads", "most_threads", "physical_cores", "pins"]

SYSTEM = Path("/sys/devices/system")
CGROUP = Path("/sys/fs/cgroup")
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


@dataclass(frozen=True, order=True)
class Core:
    """A physical core: its memory node, and the first of its CPUs that this process may use."""

    node: int
    cpu: int


def _numbers(text: str) -> list[int]:
    """ "0-2,5" -> [0, 1, 2, 5]."""
    out: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        out += range(int(first), int(last or first) + 1)
    return out


def _nodes(system: Path) -> dict[int, int]:
    """CPU -> memory node; empty where the system does not say."""
    found: dict[int, int] = {}
    for folder in system.glob("node/node[0-9]*"):
        try:
            cpus = _numbers((folder / "cpulist").read_text())
        except OSError:
            continue
        found |= dict.fromkeys(cpus, int(folder.name.removeprefix("node")))
    return found


def physical_cores(allowed: Iterable[int] | None = None, system: Path = SYSTEM) -> tuple[Core, ...]:
    """The cores that this process may use, by node, then by number.  allowed: its CPUs (default: its affinity)."""
    if allowed is None:
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    nodes = _nodes(system)
    seen: set[frozenset[int]] = set()
    out = []
    for cpu in sorted(allowed):
        try:
            siblings = frozenset(_numbers((system / f"cpu/cpu{cpu}/topology/thread_siblings_list").read_text()))
        except OSError:
            siblings = frozenset([cpu])
        if siblings not in seen:
            seen.add(siblings)
            out.append(Core(nodes.get(cpu, 0), cpu))
    return tuple(sorted(out))


def cpu_quota(cgroup: Path = CGROUP) -> float:
    """CPUs' worth of time that a container may use (cgroup v2); infinity without a limit."""
    try:
        limit, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return math.inf
    return math.inf if limit == "max" else int(limit) / int(period)


def most_threads(cores: Sequence[Core], quota: float) -> int:
    """One a core, no more than the quota pays for: a thread that is put aside in its work holds up all."""
    return max(1, min(len(cores), int(min(quota, len(cores)))))


def pins(threads: int, cores: Sequence[Core]) -> tuple[int, ...]:
    """A CPU for each thread, evenly spaced over the cores; -1 (not pinned) for all where there are more threads."""
    if threads > len(cores):
        return (-1,) * threads
    return tuple(cores[t * len(cores) // threads].cpu for t in range(threads))


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
    from expertd_kernels.backends import cpu, cpu_native
    from expertd_kernels.synthetic import random_inputs, random_weights

    most = most or most_threads(physical_cores(), cpu_quota())
    H, I = problem.hidden_size, problem.intermediate_size
    E = min(problem.num_experts, max(2, WEIGHTS // ((problem.activation.segments + 1) * H * I)), MOST_EXPERTS)
    k = min(problem.top_k, E)
    weights = random_weights(problem.w13, E, H, I, activation=problem.activation)
    packed = cpu.pack(weights, problem)
    level = os.environ.get("EXPERTD_CPU_ISA", "")
    found = {n: cpu.CpuExperts(packed, problem, cpu_native.Context(level, n)) for n in candidates(most)}
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
