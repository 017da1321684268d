"""The C++ of the client's side, through ctypes."""

from __future__ import annotations

import ctypes as C
from functools import cache
from pathlib import Path

from expertd.cxx import stale

__all__ = ["LIBRARY", "LibraryMissingError", "library"]

LIBRARY = Path(__file__).parent / "csrc" / "libexpertd_tcp.so"


class LibraryMissingError(ImportError):
    """The library is not built, or does not load."""


@cache
def library() -> C.CDLL:
    """Raises LibraryMissingError."""
    if why := stale(LIBRARY.name):
        raise LibraryMissingError(f"tcp: {why}")
    try:
        lib = C.CDLL(str(LIBRARY))
    except OSError as e:
        raise LibraryMissingError("tcp: its library is not built; install a C++17 compiler and expertd again") from e
    p, u32, u64, i64, number = C.c_void_p, C.c_uint32, C.c_uint64, C.c_int64, C.c_int
    for name, result, arguments in (
        ("sizes", None, (p,)),
        ("client", p, (number,)),
        ("free", None, (p,)),
        ("send", number, (p, p, p, number, p)),
        ("call", number, (p, p, p, i64, i64, p, p)),
        ("wait", number, (p, u64, i64, i64, p)),
        ("announce", number, (p, u64)),
        ("watch", u32, (p, p, u32, i64)),
        ("drain", u32, (p, p, u32)),
        ("waiting", u64, (p,)),
        ("answer", None, (p, u64, p)),
        ("output", u64, (p, u64)),
        ("release", None, (p, u64)),
        ("abandon", None, (p, u64)),
        ("end", None, (p,)),
        ("over", number, (p,)),
        ("taken", u64, (p,)),
    ):
        function = getattr(lib, "expertd_tcp_" + name)
        function.restype, function.argtypes = result, arguments
    return lib
