"""`--oracle measure`: one autotuning run for each distinct problem among the layers, remembered for the next start.

Results lie in the folder of --cache, or in the user's cache folder ($XDG_CACHE_HOME/expertd, ~/.cache/expertd): a few
hundred bytes for each problem, device, number of threads and version of the code.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

import expertd
from expertd_kernels.common.atomic_file import replacing
from expertd_kernels.common.problem import Problem
from expertd_kernels.measure.autotuning import GRID, DeviceLostError, Remembered, Result, measure, with_results
from expertd_kernels.measure.cpu_threads import measured_threads
from expertd_kernels.native import library as native
from expertd_kernels.native.cores import cpu_quota, physical_cores, plan
from expertd_kernels.oracle import table
from expertd_kernels.oracle.decision import Decision
from expertd_kernels.oracle.probe import cpu_name
from expertd_kernels.packed.cache import code_digest
from expertd_kernels.weights.canonical import Weights
from expertd_server.boot.assignment import Assignment, BootError
from expertd_server.boot.memory import free_bytes
from expertd_server.boot.prepare import LayerWeights, Workshop
from expertd_server.config.serve import ServeConfig

__all__ = ["Autotuning", "affordable_copies", "results_text", "settle_threads", "settled_threads", "user_folder"]

log = logging.getLogger(__name__)

_SHARE = 0.8
"""Part of the free memory that packed weights may take before a second copy of them is out of the question."""


def user_folder() -> Path:
    """Where programs keep what they can make again."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "expertd"


class Autotuning:
    """copies: how many packed copies of a layer a plan may take."""

    def __init__(self, folder: Path, device: torch.device, grid: Sequence[int] = GRID, copies: int = 1) -> None:
        self._memory, self._device, self._grid = Remembered(folder), device, tuple(grid)
        self.copies = copies
        self._held: dict[Path, list[Result]] = {}

    @classmethod
    def of(cls, config: ServeConfig, device: torch.device, assignments: Sequence[Assignment]) -> Autotuning | None:
        """As the configuration asks; None where the platform's order decides."""
        if config.oracle != "measure":
            return None
        copies = affordable_copies(config.copies, assignments, device)
        # A batch is never larger than max_tokens.
        grid = tuple(m for m in GRID if m <= config.max_tokens)
        return cls(config.cache or user_folder(), device, grid, copies)

    def known(self, decision: Decision) -> list[Result] | None:
        """Results for the decision's problem, of this run or an earlier one.  None: it must be measured, or is pinned
        and will not be."""
        if decision.pinned:
            return None
        path = self._path(decision)
        if path not in self._held and (found := self._memory.find(path)) is not None:
            self._held[path] = found
            log.info("measured earlier: %s (remove %s to measure again)", results_text(found), path)
        return self._held.get(path)

    def results(
        self, decision: Decision, weights: Callable[[], Weights], stopped: Callable[[], bool] = lambda: False
    ) -> list[Result] | None:
        """As known(), measured now if it must be.  weights(): of a layer that poses the problem.  Raises BootError, and
        MeasuringStoppedError soon after stopped() says so."""
        found = self.known(decision)
        if found is not None or decision.pinned:
            return found
        try:
            found = measure(weights(), decision, table.BACKENDS, self._grid, stopped=stopped)
        except DeviceLostError as e:
            raise BootError(str(e)) from e
        path = self._path(decision)
        self._held[path] = found
        log.info("measured %s: %s", decision.problem.scheme_name, results_text(found))
        try:
            self._memory.store(path, found)
        except OSError as e:
            log.warning("the measurement cannot be written to %s: %s", path, e)
        return found

    def apply(self, assignment: Assignment) -> Assignment:
        """The plan with what is known already."""
        found = self.known(assignment.decision)
        return (
            assignment
            if found is None
            else replace(assignment, decision=with_results(assignment.decision, found, table.BACKENDS))
        )

    def run(self, assignments: Sequence[Assignment], workshop: Workshop) -> list[Assignment]:
        """The assignments with everything measured: loads one layer for each distinct problem that is not known."""
        out = []
        for assignment in assignments:
            self.results(assignment.decision, LayerWeights(assignment, workshop).weights)
            out.append(self.apply(assignment))
        return out

    def _path(self, decision: Decision) -> Path:
        version = f"{expertd.__version__} {code_digest()}"
        return self._memory.path(decision.problem, _device_name(self._device), version, table.BACKENDS, self._grid)


def settle_threads(config: ServeConfig, assignments: Sequence[Assignment], note: Callable[[str], None]) -> None:
    """The number of threads of the CPU library, before it packs: what was asked for (or $EXPERTD_CPU_THREADS), else
    measured for the first layer that it serves, now or at an earlier start.  Nothing where it serves none."""
    decisions = (part.decision for a in assignments for part in a.each)
    problem = next((d.problem for d in decisions if d.chosen is not None and d.chosen.native_threads), None)
    if config.threads:
        native.use_threads(config.threads)
    elif problem is not None and not os.environ.get("EXPERTD_CPU_THREADS"):
        native.use_threads(settled_threads(problem, config.cache, note))
    if problem is not None:
        note(plan(native.default_threads(), physical_cores()))


def settled_threads(problem: Problem, folder: Path | None, note: Callable[[str], None]) -> int:
    """The CPU kernel's number of threads for layers like `problem`: measured (a few seconds), and with a folder kept
    there for the next start on this machine.  note: told what was measured, or when it was."""
    facts = {k: str(v) for k, v in vars(problem).items() if k != "packages"}
    facts |= {"machine": _cpu_text(), "isa": os.environ.get("EXPERTD_CPU_ISA", ""), "quota": str(cpu_quota())}
    facts |= {"code": code_digest()}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    path = None if folder is None else folder / f"threads-{digest[:32]}.json"
    if path is not None and (found := _kept_threads(path)):
        note(f"threads: {found}, as measured earlier (remove {path} to measure again)")
        return found
    threads = measured_threads(problem, note=note)
    if path is not None:
        try:
            with replacing(path) as f:
                f.write(json.dumps({"threads": threads}).encode())
        except OSError as e:
            log.warning("the number of threads cannot be written to %s: %s", path, e)
    return threads


def _kept_threads(path: Path) -> int:
    """0 where the file is not there or damaged."""
    try:
        found = json.loads(path.read_text())["threads"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return found if isinstance(found, int) and found > 0 else 0


def results_text(results: Sequence[Result]) -> str:
    """ "cpu 981, 7012 us at 1, 8 tokens; ...": those that took part, or failed when they were measured."""
    parts = []
    for r in results:
        if r.microseconds:
            times = ", ".join(f"{us:.0f}" for us in r.microseconds.values())
            tokens = ", ".join(str(m) for m in r.microseconds)
            parts.append(f"{r.backend} {times} us at {tokens} tokens")
        elif r.relative_error is not None or r.refusal.startswith("failed"):
            parts.append(f"{r.backend} {r.refusal}")
    return "; ".join(parts) or "nothing took part"


def affordable_copies(wanted: int, assignments: Sequence[Assignment], device: torch.device) -> int:
    """`wanted`, or 1 where that many copies of all layers would not fit into _SHARE of the free memory."""
    if wanted == 1:
        return 1
    need, free = wanted * sum(p.decision.problem.weight_bytes for p in assignments), free_bytes(device)
    if need <= _SHARE * free:
        return wanted
    log.warning(
        "--copies %d: the weights need %.1f GiB and %.1f GiB are free: keeping one copy of each layer",
        wanted,
        need / 2**30,
        free / 2**30,
    )
    return 1


def _device_name(device: torch.device) -> str:
    """The hardware's own name; of a CPU with the threads that compute on it."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    if device.type == "xpu":
        return str(torch.xpu.get_device_name(device))
    threads = f"{torch.get_num_threads()} threads, EXPERTD_CPU_THREADS={os.environ.get('EXPERTD_CPU_THREADS', '')}"
    return f"{_cpu_text()}, {threads}"


def _cpu_text() -> str:
    """The processor and how many of its CPUs this process may use."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cpu_name()}, {cpus} cpus"
