"""The C++ of the client's side, through ctypes; what is common to all ways is TICKETS."""

from __future__ import annotations

import ctypes as C
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from expertd.cxx import stale

__all__ = ["LIBRARY", "TICKETS", "LibraryMissingError", "library", "load"]

LIBRARY = Path(__file__).parent / "csrc" / "libexpertd_shm.so"

_P, _U32, _U64, _I64, _INT = C.c_void_p, C.c_uint32, C.c_uint64, C.c_int64, C.c_int
Signature = tuple[str, Any, tuple[Any, ...]]

TICKETS: tuple[Signature, ...] = (
    ("free", None, (_P,)),
    ("send", _INT, (_P, _P, _P, _INT, _P)),
    ("call", _INT, (_P, _P, _P, _I64, _I64, _P, _P)),
    ("wait", _INT, (_P, _U64, _I64, _I64, _P)),
    ("see", _INT, (_P, _U64)),
    ("leave", None, (_P,)),
    ("announce", _INT, (_P, _U64)),
    ("answer", None, (_P, _U64, _P)),
    ("watch", _U32, (_P, _P, _U32, _I64)),
    ("poll", _U32, (_P, _P, _U32)),
    ("drain", _U32, (_P, _P, _U32)),
    ("release", None, (_P, _U64)),
    ("abandon", None, (_P, _U64)),
    ("end", None, (_P,)),
    ("over", _INT, (_P,)),
    ("taken", _U64, (_P,)),
)
"""Of tickets.h: name, result, arguments."""


class LibraryMissingError(ImportError):
    """The library is not built, or does not load."""


@cache
def library() -> Any:
    """Its functions, by their names without the prefix.  Raises LibraryMissingError."""
    own: tuple[Signature, ...] = (
        ("sizes", None, (_P,)),
        ("client", _P, (_P, _U64, _U32, _INT)),
        ("take", _I64, (_P, _U64)),
        ("give", None, (_P, _U64)),
        ("blocks", _U64, (_P,)),
        ("submit", _U64, (_P, _P, _I64, _INT)),
        ("exchange", _INT, (_P, _P, _I64, _I64, _P, _P)),
        ("wake", None, (_P,)),
        ("expect", None, (_P,)),
        ("recall", None, (_P, _U64)),
    )
    return load(LIBRARY, "shared memory", "expertd_shm_", (*TICKETS, *own))


def load(path: Path, what: str, prefix: str, signatures: Sequence[Signature]) -> SimpleNamespace:
    """The functions of a library, by their names without the prefix.  what: in texts of errors.  Raises
    LibraryMissingError."""
    if why := stale(path.name):
        raise LibraryMissingError(f"{what}: {why}")
    try:
        lib = C.CDLL(str(path))
    except OSError as e:
        raise LibraryMissingError(
            f"{what}: its library is not built; install a C++17 compiler and expertd again"
        ) from e
    found = SimpleNamespace()
    for name, result, arguments in signatures:
        function = getattr(lib, prefix + name)
        function.restype, function.argtypes = result, arguments
        setattr(found, name, function)
    return found
