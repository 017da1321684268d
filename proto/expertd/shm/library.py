"""The C++ of the client's side, through ctypes."""

from __future__ import annotations

import ctypes as C
from functools import cache
from pathlib import Path

from expertd.cxx import stale

__all__ = ["LIBRARY", "LibraryMissingError", "library"]

LIBRARY = Path(__file__).parent / "csrc" / "libexpertd_shm.so"


class LibraryMissingError(ImportError):
    """The library is not built, or does not load."""


@cache
def library() -> C.CDLL:
    """Raises LibraryMissingError."""
    if why := stale(LIBRARY.name):
        raise LibraryMissingError(f"shared memory: {why}")
    try:
        lib = C.CDLL(str(LIBRARY))
    except OSError as e:
        raise LibraryMissingError(
            "shared memory: its library is not built; install a C++17 compiler and expertd again"
        ) from e
    p, u32, u64, i64, fd = C.c_void_p, C.c_uint32, C.c_uint64, C.c_int64, C.c_int
    for name, result, arguments in (
        ("sizes", None, (p,)),
        ("client", p, (p, u64, u32, fd, fd)),
        ("free", None, (p,)),
        ("take", i64, (p, u64)),
        ("exchange", fd, (p, p, i64, i64, p, p)),
        ("give", None, (p, u64)),
        ("submit", u64, (p, p, i64, fd)),
        ("send", fd, (p, p, p, fd, p)),
        ("call", fd, (p, p, p, i64, i64, p, p)),
        ("wait", fd, (p, u64, i64, i64, p)),
        ("drain", u32, (p, p, u32)),
        ("watch", u32, (p, fd, p, u32, i64, i64)),
        ("answer", None, (p, u64, p)),
        ("announce", fd, (p, u64)),
        ("release", None, (p, u64)),
        ("abandon", None, (p, u64)),
        ("end", None, (p,)),
        ("wake", None, (p,)),
        ("over", fd, (p,)),
        ("blocks", u64, (p,)),
    ):
        function = getattr(lib, "expertd_shm_" + name)
        function.restype, function.argtypes = result, arguments
    return lib
