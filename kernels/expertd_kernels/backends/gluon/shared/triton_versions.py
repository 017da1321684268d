# mypy: ignore-errors
# (Gluon device code: its types are checked by Triton's compiler, not by mypy.)
"""What differs between the versions of Triton that the Gluon kernels run on, 3.6 to 3.9.  Nothing else asks for one.

    3.7  `thread_barrier` has become `barrier`
    3.8  `async_copy_global_to_shared` has become `async_load`, of cp.async and of the bulk copy; a view as another
         shape must be as large as what it views (3.8 alone: allocations are split instead)
    3.9  `_reinterpret` has lost its underscore; a wait for the tensor cores is followed by a barrier of all warps
         unless it is marked (warpgroup_mma_wait); ptxas is 13.4 instead of 12, and told to spend less time on
         registers (ASSEMBLER)

tests/kernels/backends/gluon/shared/test_triton_versions.py compiles every kernel under each of them.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.core import builtin

from expertd_kernels.backends.triton_launch import OPTIONS

# Why it is so: decision 82 in DECISIONS.md.
__all__ = [
    "barrier",
    "compiling",
    "copy_elements",
    "copy_tile",
    "keep_alive",
    "launch",
    "reinterpret",
    "start",
    "warpgroup_mma_wait",
]

VERSION = tuple(int(number) for number in triton.__version__.split(".")[:2])

ASSEMBLER = {"ptx_options": "--regAllocOptLevel=4"} if VERSION >= (3, 9) else {}
"""Triton asks for 2, under which w8a8 spills 48 bytes a thread (with 4, ptxas's own choice, none), and wide reloads a
register in each stage of its main loop."""


@cache
def launch(warps: int, registers: int = 0) -> dict[str, Any]:
    """Options of a launch: warps of a CTA, registers a thread at most (0: no limit).  All follow the kernel before them
    by programmatic dependent launch."""
    options = {"num_warps": warps, "launch_pdl": True, **OPTIONS, **ASSEMBLER}
    return options | ({"maxnreg": registers} if registers else {})


_ahead: ContextVar[bool] = ContextVar("_ahead", default=False)


def start(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """kernel[grid](*arguments, **options); inside of `compiling`, compiled but not launched."""
    if _ahead.get():
        kernel.warmup(*arguments, grid=grid, **options)
    else:
        kernel[grid](*arguments, **options)


@contextmanager
def compiling(threads: int) -> Iterator[None]:
    """What `start` is given in this block is compiled by so many threads, or found on disk; at its end all is there.
    An error of the compiler is raised by the kernel's first launch, as without."""
    with ThreadPoolExecutor(threads) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        token = _ahead.set(True)
        try:
            yield
        finally:
            _ahead.reset(token)


barrier = gl.barrier if VERSION >= (3, 7) else gl.thread_barrier
"""Of all warps of a CTA, or of a partition of them."""
copy_elements = async_copy.async_load if VERSION >= (3, 8) else async_copy.async_copy_global_to_shared
"""cp.async."""
copy_tile = tma.async_load if VERSION >= (3, 8) else tma.async_copy_global_to_shared
"""The bulk tensor copy."""
REINTERPRET = "reinterpret" if VERSION >= (3, 9) else "_reinterpret"


@builtin
def keep_alive(memory, _semantic=None):
    """Until here nothing else lies in this shared memory.

    Barriers (mbarrier) need it to the kernel's end: PTX leaves undefined what happens to other data in the place of one
    that was not invalidated.  A GPU that takes turns with another process, and so puts a running kernel aside, writes
    the barrier's state over them when it goes on (docs/log/two-processes.md)."""
    memory._keep_alive(_semantic=_semantic)


@builtin
def reinterpret(memory, dtype, shape, layout, _semantic=None):
    """shared memory seen as another type, shape and layout"""
    return getattr(memory, REINTERPRET)(dtype, shape, layout, _semantic=_semantic)


@builtin
def warpgroup_mma_wait(left, deps, _semantic=None):
    """Until at most `left` products of this warpgroup are under way; of the other warpgroups it says nothing.

    3.9 would make these wait for each other here, four times a stage of kernel `ws`.  The kernels have a barrier of
    their own before what others have read is overwritten."""
    results = hopper.warpgroup_mma_wait(left, deps=deps, _semantic=_semantic)
    if VERSION >= (3, 9):
        first = results[0] if isinstance(results, tuple) else results
        first.handle.set_attr("warpGroupLocal", _semantic.builder.get_unit_attr())
    return results
