"""In a process that has no GPU and starts nothing: which kernels calls would start, and compiling those side by side.

    found = kernels_of(job)               each kernel once, those that take longest first
    faults = compile_all(found, 16)       in 16 forked processes, into Triton's cache

Triton compiles with Python and LLVM, so threads of one process would wait for each other's Python.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from expertd_kernels.backends.device import compile_for
from expertd_kernels.compiling.empty import calls_of, empty_experts
from expertd_kernels.compiling.job import Job

__all__ = ["LONGEST", "Kernel", "compile_all", "kernels_of", "with_launchers"]

LONGEST = ("both", "ws", "wide", "w8a8", "expert_gemm", "expert_gemm_rounded", "gemv", "block", "w8a8_few")
"""Kernels that take longest to compile, the longest first: what begins last must be short."""
_NUMBER = struct.Struct("=H")


@dataclass(frozen=True)
class Kernel:
    """compile: puts it into Triton's cache."""

    name: str
    compile: Callable[[], Any]


class _NotHere:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


class _Noting:
    """Triton's executor of compilations, which only notes them."""

    def __init__(self) -> None:
        self.noted: list[Callable[[], Any]] = []

    def submit(self, compile_it: Callable[[], Any]) -> Future[Any]:
        self.noted.append(compile_it)
        future: Future[Any] = Future()
        future.set_exception(RuntimeError("compiled elsewhere"))
        return future


@contextlib.contextmanager
def _noting(target: GPUTarget) -> Iterator[list[Kernel]]:
    """While it lasts, kernels are noted where they would be started."""
    noting, found, called = _Noting(), list[Kernel](), set[JITFunction[Any]]()
    run, active = JITFunction.run, driver._active

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        before = len(noting.noted)
        if self not in called:  # also what this process has compiled before is noted
            self.device_caches.clear()
            called.add(self)
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        found.extend(Kernel(self.__name__, each) for each in noting.noted[before:])
        return kernel

    JITFunction.run = note
    driver.set_active(cast("Any", _NotHere(target)))
    try:
        with triton.AsyncCompileMode(cast("Any", noting), ignore_errors=True):
            yield found
    finally:
        JITFunction.run, driver._active = run, active
        for function in called:  # it would take what was noted for compiled
            function.device_caches.clear()


def kernels_of(job: Job) -> tuple[list[Kernel], list[str]]:
    """Every kernel once, and what went wrong where some could not be found."""
    compile_for(job.gpu)
    faults: dict[str, None] = {}
    with _noting(GPUTarget("cuda", 10 * job.gpu.capability[0] + job.gpu.capability[1], 32)) as found:
        for layer in job.layers:
            with _faults_to(faults):
                for call in calls_of(layer, empty_experts(layer)):
                    with _faults_to(faults):
                        call()
    order = {name: i for i, name in enumerate(LONGEST)}
    return sorted(found, key=lambda k: order.get(k.name, len(order))), list(faults)


@contextlib.contextmanager
def _faults_to(faults: dict[str, None]) -> Iterator[None]:
    try:
        yield
    except Exception as e:
        faults[f"{type(e).__name__}: {e}"] = None


def compile_all(kernels: Sequence[Kernel], processes: int) -> list[str]:
    """Each kernel by one of so many forks of this process; what could not be compiled.  No thread may run here."""
    work, give = os.pipe()
    os.write(give, b"".join(_NUMBER.pack(i) for i in range(len(kernels))))
    os.close(give)
    told, tell = os.pipe()
    forks = []
    for _ in range(min(processes, len(kernels))):
        if (fork := os.fork()) == 0:
            _compile_some(kernels, work, tell)  # does not return
        forks.append(fork)
    os.close(tell)
    os.close(work)
    with os.fdopen(told, encoding="utf-8", errors="replace") as text:
        faults = text.read().splitlines()
    for fork in forks:  # and for no other child of this process
        if status := os.waitpid(fork, 0)[1]:
            faults.append(f"a process ended with {os.waitstatus_to_exitcode(status)}")
    return faults


def _compile_some(kernels: Sequence[Kernel], work: int, tell: int) -> None:
    """Until no number is left in the pipe, which gives each of them to one process."""
    try:
        while taken := os.read(work, _NUMBER.size):
            kernel = kernels[_NUMBER.unpack(taken)[0]]
            try:
                kernel.compile()
            except Exception as e:
                text = " ".join(f"{kernel.name}: {type(e).__name__}: {e}".split())
                os.write(tell, f"{text[:300]}\n".encode())
    finally:
        os._exit(0)


def with_launchers(kernels: Sequence[Kernel], claims: Path) -> list[Kernel]:
    """With what Triton has the C compiler build at the first launch of a kernel: functions of the driver, and up to
    Triton 3.6 a launcher for each signature.  As they are where the driver is not installed, which they are linked to.
    claims: an empty folder, by which processes share out launchers."""
    from triton.backends.nvidia import driver as nvidia

    try:
        nvidia.libcuda_dirs()
    except Exception:
        return list(kernels)
    functions = Kernel("cuda_utils", nvidia.CudaUtils)
    if not hasattr(nvidia, "make_launcher"):
        return [functions, *kernels]

    def compiled(kernel: Kernel) -> None:
        made = kernel.compile()
        text = f"{made.src.signature} {getattr(made.metadata, 'tensordesc_meta', None)}"
        if _first(claims / hashlib.sha256(text.encode()).hexdigest()):  # others have none to build
            nvidia.CudaLauncher(made.src, made.metadata)

    return [functions, *(Kernel(k.name, partial(compiled, k)) for k in kernels)]


def _first(claim: Path) -> bool:
    """Whether no process has claimed it before."""
    try:
        os.close(os.open(claim, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
