"""Cores that this process may use, and how a number of threads is spread over them.

    cores = physical_cores()                one CPU of each core that this process may use, node by node
    cpus  = places(threads, cores)          the CPUs of a memory node for each thread

Threads are spread evenly over the cores in the order of memory nodes.  So each thread works on one long range of
experts beside its neighbours of the same node, and as packing shares a matrix of gates among the same threads in the
same order, the pages of an expert are first touched on the node that will read them.  Inside its node a thread may
move: where others use the cores, a thread that lost its core takes one that a waiting thread has left.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["SYSTEM", "Core", "cpu_quota", "most_threads", "physical_cores", "places", "plan"]

SYSTEM = Path("/sys/devices/system")
CGROUP = Path("/sys/fs/cgroup")
NODES = "EXPERTD_CPU_NODES"
"""Environment variable: CPUs of memory nodes in place of the system's, as "0-7;8-15".  To see the plan of threads for a
machine with several nodes on one that has one."""


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
    """CPU -> memory node, as $EXPERTD_CPU_NODES or the system says; empty where neither does."""
    if asked := os.environ.get(NODES):
        return {cpu: node for node, text in enumerate(asked.split(";")) for cpu in _numbers(text)}
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


def places(threads: int, cores: Sequence[Core]) -> tuple[tuple[int, ...], ...]:
    """The CPUs that each thread may run on: those of the memory node of one core, threads being spaced evenly over the
    cores.  Empty, which is any CPU, for all where there are more threads than cores."""
    if threads > len(cores):
        return ((),) * threads
    nodes = [cores[t * len(cores) // threads].node for t in range(threads)]
    return tuple(tuple(core.cpu for core in cores if core.node == node) for node in nodes)


def plan(threads: int, cores: Sequence[Core]) -> str:
    """Where the threads are, in words: "4 threads: 2 on node 0 (CPUs 0, 1), 2 on node 1 (CPUs 2, 3)"."""
    many = f"{threads} thread{'s' if threads > 1 else ''}"
    sets = places(threads, cores)
    if not all(sets):
        return f"{many} on {len(cores)} cores: anywhere"
    node = {core.cpu: core.node for core in cores}
    parts = [f"{sets.count(s)} on node {node[s[0]]} (CPUs {', '.join(map(str, s))})" for s in dict.fromkeys(sets)]
    return f"{many}: {', '.join(parts)}"
