"""Kernels of the layers that a server is about to load, compiled by processes beside it while weights are read.

    kernels = KernelsAhead("auto")          as early as possible: its processes import what they need meanwhile
    kernels.give(assignments, where, 4096)  once it is likely which layers on which backends, and when it is known
    kernels.wait()                          before the first of them is called
    kernels.close()

Imports no torch by itself.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from expertd_kernels.compiling.ahead import CompileAhead, usable_processes
from expertd_kernels.compiling.marks import any_mark
from expertd_server.engine.sizes import sizes_up_to

if TYPE_CHECKING:
    import torch

    from expertd_kernels.backends.device import Nvidia
    from expertd_kernels.compiling.job import Job, LayerCalls
    from expertd_server.boot.assignment import Assignment

__all__ = ["KernelsAhead", "calls_to_compile", "job_of", "warm_sizes"]


log = logging.getLogger(__name__)


def warm_sizes(most: int) -> list[int]:
    """For batches up to `most`: those that they are padded to, and `most`.  Sizes between them are planned alike
    (expertd_kernels.common.sizes)."""
    return sorted({*sizes_up_to(most), most})


def calls_to_compile(checked: int, top_k: int, routes: Iterable[int], most: int) -> list[tuple[int, int]]:
    """(tokens, routes a token) of the calls that a layer gets before it serves: of its check with `checked` rows, and
    of its warm-up."""
    from expertd_kernels.packed.selfcheck import SMALL_BATCHES

    calls = [(tokens, top_k) for tokens in (*SMALL_BATCHES, checked)]
    calls += [(tokens, k) for k in (top_k, *routes) for tokens in warm_sizes(most)]
    return list(dict.fromkeys(calls))


def job_of(gpu: Nvidia, assignments: Iterable[Assignment], routes: Sequence[int], most: int) -> Job | None:
    """Of the layers whose kernels can be compiled ahead; None where there is no such layer."""
    from expertd_kernels.compiling.job import Job

    layers: list[LayerCalls] = []
    for layer in _layers(assignments, routes, most):
        if layer not in layers:
            layers.append(layer)
    return Job(gpu, tuple(layers)) if layers else None


def _layers(assignments: Iterable[Assignment], routes: Sequence[int], most: int) -> Iterator[LayerCalls]:
    from expertd_kernels.compiling.job import BACKENDS, LayerCalls

    for a in assignments:
        p, chosen = a.decision.problem, a.decision.chosen
        if chosen is not None and chosen.name in BACKENDS and p.device.kind == "cuda":
            yield LayerCalls.of(chosen.name, p, calls_to_compile(len(a.held) + 1, p.top_k, routes, most))


class KernelsAhead:
    """device: as `--device` names it.  Whatever goes wrong, kernels are compiled when they are called."""

    def __init__(self, device: str) -> None:
        self._say: Callable[[str], None] | None = None
        self._job: Job | None = None
        likely = device.partition(":")[0] in ("auto", "cuda") and os.path.exists("/dev/nvidiactl")
        self._processes = usable_processes() if likely else 0
        self._ahead = CompileAhead.start(self._processes) if self._processes and not any_mark() else None

    @property
    def wanted(self) -> bool:
        """Whether there is something to compile for, as far as it was looked."""
        return self._processes > 0

    def give(
        self,
        assignments: Iterable[Assignment],
        where: torch.device,
        most: int,
        routes: Sequence[int] = (),
        say: Callable[[str], None] | None = None,
    ) -> None:
        """Compile what these layers will call, instead of what was given before.  most: tokens of a batch; routes: a
        token, besides each layer's top-k; say: told what became of it."""
        self._say = say
        try:
            self._give(assignments, where, most, routes)
        except Exception as e:  # whatever it is: kernels compile when they are called
            log.warning("no kernels are compiled ahead: %s: %s", type(e).__name__, e)
            self.close()

    def _give(self, assignments: Iterable[Assignment], where: torch.device, most: int, routes: Sequence[int]) -> None:
        from expertd_kernels.backends.device import nvidia_of

        gpu = nvidia_of(where) if self._processes else None
        job = None if gpu is None else job_of(gpu, assignments, routes, most)
        before, self._job = self._job, job
        if job is None or job.done():
            self.close()
            return
        if job == before:
            return
        if before is not None:
            self.close()
        self._ahead = self._ahead or CompileAhead.start(self._processes)
        if self._ahead is not None:
            self._ahead.give(job)

    def wait(self) -> None:
        """Until what give() was given is in Triton's cache, or will not be."""
        if self._ahead is not None:
            outcome = self._ahead.wait()
            say, self._say = self._say, None
            if say is not None:
                say(str(outcome))

    def close(self) -> None:
        """End it, whatever it does."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close()
