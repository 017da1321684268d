"""The CPU kernel's shared object, through ctypes: loading it, its structs, and one context for the process.

Knows nothing of canonical weights.  Every function releases the GIL while it runs (ctypes does).
"""

from __future__ import annotations

import ctypes as C
import mmap
import os
import struct
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from expertd_kernels.native.cores import Core, cpu_quota, most_threads, physical_cores, places
from expertd_kernels.native.csrc import build as source

__all__ = [
    "Canonical",
    "Context",
    "KernelMissingError",
    "Layer",
    "Matrix",
    "Rounding",
    "Spec",
    "allocate",
    "call_bytes",
    "context",
    "default_threads",
    "kernel_error",
    "level_in_use",
    "levels",
    "library",
    "on_node",
    "physical_cpus",
    "stand_apart",
    "use_threads",
]

ABI = 4
HUGE_PAGE = 2 << 20


class KernelMissingError(ImportError):
    """The shared object is not there, does not load, or was built from other sources: that is `why`; the text goes on
    with the command that makes it."""

    def __init__(self, why: str) -> None:
        self.why = f"cpu kernel: {why}"
        super().__init__(f"{self.why}; run `{source.remedy()}`")


class Spec(C.Structure):
    """expertd_spec of abi.h."""

    _fields_ = [
        (name, C.c_int32)
        for name in (
            "element",
            "scale_type",
            "experts",
            "n",
            "k",
            "segments",
            "rows",
            "cols",
            "zeros",
            "global_scale",
        )
    ]


class Canonical(C.Structure):
    """expertd_canonical of abi.h."""

    _fields_ = [(name, C.c_void_p) for name in ("codes", "scales", "zeros")]


class Matrix(C.Structure):
    """expertd_matrix of abi.h."""

    _fields_ = [("spec", Spec), *((name, C.c_void_p) for name in ("stream", "bias", "global_scales", "columns"))]


class Layer(C.Structure):
    """expertd_layer of abi.h."""

    _fields_ = [
        ("w13", Matrix),
        ("w2", Matrix),
        ("activation", C.c_int32),
        ("has_limit", C.c_int32),
        ("alpha", C.c_float),
        ("beta", C.c_float),
        ("limit", C.c_float),
        ("compute", C.c_int32),
        ("batch_invariant", C.c_int32),
        ("subnormals", C.c_int32),
    ]


class Rounding(C.Structure):
    """expertd_rounding of abi.h."""

    _fields_ = [
        *((name, C.c_void_p) for name in ("weights", "codes", "scales", "zeros", "second", "tries")),
        *((name, C.c_int64) for name in ("rows", "columns", "block", "rows_of_part")),
        *((name, C.c_int32) for name in ("kind", "scale_type", "source", "count")),
    ]


call_bytes = struct.Struct("@4P2q4i").pack
"""expertd_call of abi.h: x, ids, weights, out, m, x_stride, top_k, x_f32, out_f32, weight_on_input -> its bytes.  Not
a ctypes structure, which takes longer to make than everything else that Python does in a call."""

_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "expertd_cpu_abi": (C.c_int32, []),
    "expertd_cpu_sources": (C.c_char_p, []),
    "expertd_cpu_levels": (C.c_char_p, []),
    "expertd_cpu_create": (
        C.c_int32,
        [C.c_char_p, C.c_int32, C.POINTER(C.c_int32), C.POINTER(C.c_int32), C.POINTER(C.c_void_p)],
    ),
    "expertd_cpu_destroy": (None, [C.c_void_p]),
    "expertd_cpu_level": (C.c_char_p, [C.c_void_p]),
    "expertd_cpu_threads": (C.c_int32, [C.c_void_p]),
    "expertd_cpu_stream_bytes": (C.c_int64, [C.POINTER(Spec), C.POINTER(C.c_int32), C.POINTER(C.c_int32)]),
    "expertd_cpu_pack": (C.c_int32, [C.c_void_p, C.POINTER(Spec), C.POINTER(Canonical), C.c_void_p]),
    "expertd_cpu_unpack": (
        C.c_int32,
        [C.c_void_p, C.POINTER(Spec), C.c_void_p, C.c_void_p, C.c_void_p, C.c_void_p],
    ),
    "expertd_cpu_round": (C.c_int32, [C.c_void_p, C.POINTER(Rounding)]),
    "expertd_cpu_forward": (C.c_int32, [C.c_void_p, C.POINTER(Layer), C.c_char_p]),
    "expertd_repack_rows": (C.c_int32, [C.c_int32, C.c_int64, C.c_int64, C.c_int64, C.c_uint32, C.c_void_p]),
    "expertd_repack_gather": (
        C.c_int32,
        [C.c_int32, C.c_int64, C.c_int64, C.c_int64, C.c_int32, C.c_void_p, C.c_uint32, C.c_void_p],
    ),
    "expertd_repack_columns": (C.c_int32, [C.c_int32, C.c_int64, C.c_int64, C.c_int64, C.c_char_p, C.c_void_p]),
    "expertd_guard_add": (C.c_int32, [C.c_void_p, C.c_int64]),
    "expertd_guard_remove": (None, [C.c_int32]),
    "expertd_guard_lost": (C.c_int32, [C.c_int32]),
    "expertd_cpu_read_gb_s": (C.c_double, [C.c_void_p, C.c_void_p, C.c_int64]),
    "expertd_cpu_peak": (C.c_double, [C.c_void_p, C.c_int32, C.c_double]),
}


def _open(path: Path) -> C.CDLL:
    if not path.exists():
        raise KernelMissingError(f"{path.name} is not built")
    try:
        lib = C.CDLL(str(path))
    except OSError as e:
        raise KernelMissingError(f"{path.name} does not load: {e}") from None
    for name, (result, arguments) in _SIGNATURES.items():
        if not hasattr(lib, name):
            raise KernelMissingError(f"{path.name} has no {name}: built from other sources")
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


@cache
def library() -> C.CDLL:
    """The loaded shared object: $EXPERTD_CPU_LIBRARY, else the one beside the sources, which must have been built from
    them.  KernelMissingError says why there is none."""
    path = os.environ.get("EXPERTD_CPU_LIBRARY")
    lib = _open(Path(path) if path else source.HERE / source.LIBRARY)
    built, here = lib.expertd_cpu_sources().decode(), source.sources_hash()
    if lib.expertd_cpu_abi() != ABI or (path is None and built != here):
        raise KernelMissingError(
            f"{source.LIBRARY} was made of other sources than those that lie there: {built} (ABI"
            f" {lib.expertd_cpu_abi()}), not {here} (ABI {ABI})"
        )
    return lib


def kernel_error() -> str:
    """Why the shared object cannot be used; "" if it can."""
    try:
        library()
    except KernelMissingError as e:
        return e.why
    return ""


def levels() -> list[str]:
    """Instruction-set levels that run on this machine, best first."""
    text: bytes = library().expertd_cpu_levels()
    return text.decode().split(",")


def level_in_use() -> str:
    """The level of contexts that name none: $EXPERTD_CPU_ISA, else the best that runs here."""
    return os.environ.get("EXPERTD_CPU_ISA", "") or levels()[0]


@cache
def physical_cpus() -> tuple[int, ...]:
    """One CPU number for each physical core that this process may use, by memory node."""
    return tuple(core.cpu for core in physical_cores())


_threads: list[int] = []


def use_threads(threads: int) -> None:
    """The process's number of threads, for contexts made from now on without naming one; 0 = as at the start."""
    if threads < 0:
        raise ValueError(f"cpu kernel: {threads} threads: want a number, or 0 for one a core")
    _threads[:] = [threads] if threads else []


_node: ContextVar[int | None] = ContextVar("expertd_cpu_node", default=None)


@contextmanager
def on_node(node: int | None) -> Iterator[None]:
    """Inside, contexts that are asked for compute on the cores of that memory node alone; None = on those of all."""
    before = _node.set(node)
    try:
        yield
    finally:
        _node.reset(before)


_apart: ContextVar[bool] = ContextVar("expertd_cpu_apart", default=False)


def stand_apart() -> None:
    """From now on the calling thread packs and computes with threads of its own, which have its priority: who serves
    requests never waits for it."""
    _apart.set(True)


def _cores(node: int | None) -> tuple[Core, ...]:
    return tuple(core for core in physical_cores() if node is None or core.node == node)


def default_threads() -> int:
    """What use_threads said, else $EXPERTD_CPU_THREADS, else one a physical core within the container's quota; on a
    memory node at most one for each of its cores."""
    asked = _threads[0] if _threads else int(os.environ.get("EXPERTD_CPU_THREADS", "0"))
    node = _node.get()
    if node is None:
        return asked or most_threads(physical_cores(), cpu_quota())
    return max(1, min(asked or len(physical_cores()), most_threads(_cores(node), cpu_quota())))


class Context:
    """Threads and scratch memory.  One call at a time (the library holds a lock)."""

    def __init__(self, level: str = "", threads: int = 0, node: int | None = None) -> None:
        """level: "" = the best that runs here.  threads: 0 = default_threads().  node: of whose memory the threads are
        to be, None = of all."""
        threads = threads or default_threads()
        self._asked = (level, threads, node)
        handle = C.c_void_p()
        sets = places(threads, _cores(node))
        flat = [cpu for cpus in sets for cpu in cpus]
        cpus, ends = (C.c_int32 * len(flat))(*flat), (C.c_int32 * threads)(*accumulate(map(len, sets)))
        error = library().expertd_cpu_create(level.encode(), threads, cpus, ends, C.byref(handle))
        if error:
            raise ValueError(
                f"cpu kernel: level {level or 'auto'!r} with {threads} threads cannot be had (code {error}); levels"
                f" here: {', '.join(levels())}"
            )
        self.handle = handle
        weakref.finalize(self, library().expertd_cpu_destroy, handle)
        self.threads = threads
        self.level: str = library().expertd_cpu_level(handle).decode()

    def threads_in_use(self) -> int:
        """Threads that work on a call at present: `threads`, or fewer while other processes use the cores."""
        return int(library().expertd_cpu_threads(self.handle))

    @property
    def here(self) -> Context:
        """This one, or on a thread that stands apart one that is like it and serves no requests."""
        return _context(*self._asked, apart=True) if _apart.get() else self

    def check(self, error: int, what: str) -> None:
        """Raises for an error code of the library."""
        if error == 2:
            raise MemoryError(f"cpu kernel: {what}: out of memory")
        if error:
            raise ValueError(f"cpu kernel: {what}: bad argument (sizes, ids outside 0..E-1, or missing tensors)")


def context(level: str | None = None, threads: int | None = None) -> Context:
    """The process's context for a level and a number of threads; None = $EXPERTD_CPU_ISA, default_threads().  Inside of
    on_node(): that of the memory node."""
    level = os.environ.get("EXPERTD_CPU_ISA", "") if level is None else level
    return _context(level, threads or default_threads(), _node.get())


@cache
def _context(level: str, threads: int, node: int | None, apart: bool = False) -> Context:
    return Context(level, threads, node)


def allocate(shape: tuple[int, ...]) -> Tensor:
    """An uninitialized u8 tensor, in huge pages where it is large enough to have them."""
    count = 1
    for size in shape:
        count *= size
    if count < 2 * HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=torch.uint8)
    # Private: what is shared by default counts as a file, and files are not given huge pages.
    memory = mmap.mmap(-1, count + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    start = C.addressof(C.c_char.from_buffer(memory))
    return torch.frombuffer(memory, dtype=torch.uint8, offset=-start % HUGE_PAGE, count=count).view(shape)
