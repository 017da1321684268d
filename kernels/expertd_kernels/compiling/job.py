"""What is to be compiled: layers by their sizes alone, and the calls that they will get.

    job = Job(gpu, (LayerCalls("gluon_sm90", problem, ((1, 8), (4096, 8))),))
    job.done()          whether Triton's cache has all of it, by the mark that set_done() left

Plain values, which a process gives another.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from expertd_kernels.backends.device import Nvidia
from expertd_kernels.common.atomic_file import replacing
from expertd_kernels.common.problem import Problem
from expertd_kernels.compiling.marks import MARK, cache_folder
from expertd_kernels.packed.cache import code_digest

__all__ = ["BACKENDS", "Job", "LayerCalls"]

log = logging.getLogger(__name__)

BACKENDS = ("gluon_sm90", "gluon_w8a8", "triton", "triton_w4a8", "triton_w8a8")
"""Backends whose kernels can be compiled before there is a layer."""


@dataclass(frozen=True)
class LayerCalls:
    """Layers that are alike: their backend, their problem, and (tokens, routes a token) of the calls to compile for."""

    backend: str
    problem: Problem
    sizes: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, backend: str, problem: Problem, sizes: Iterable[tuple[int, int]]) -> LayerCalls:
        """Without what kernels do not depend on, so that layers which are alike are equal."""
        return cls(backend, replace(problem, packages={}), tuple(dict.fromkeys(sizes)))


@dataclass(frozen=True)
class Job:
    """Layers for one GPU."""

    gpu: Nvidia
    layers: tuple[LayerCalls, ...]

    @property
    def mark(self) -> Path:
        """A file of Triton's cache that says that all of it was compiled there, by this code under this Triton."""
        text = f"{self}\n{_triton()}\n{code_digest()}"
        return cache_folder() / f"{MARK}{hashlib.sha256(text.encode()).hexdigest()[:24]}"

    def done(self) -> bool:
        """Whether it was compiled before.  What somebody has removed since then is compiled when it is called."""
        return self.mark.is_file()

    def set_done(self) -> None:
        """Leave the mark; without it the next start compiles again what it finds on disk."""
        try:
            with replacing(self.mark) as f:
                f.write(b"")
        except OSError as e:
            log.info("Triton's cache takes no mark: %s", e)


def _triton() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""
