"""The C++ of the client's side, through ctypes."""

from __future__ import annotations

import ctypes as C
from functools import cache
from pathlib import Path
from typing import Any

from expertd.shm.library import TICKETS, LibraryMissingError, load

__all__ = ["LIBRARY", "LibraryMissingError", "library"]

LIBRARY = Path(__file__).parent / "csrc" / "libexpertd_tcp.so"


@cache
def library() -> Any:
    """Its functions, by their names without the prefix.  Raises LibraryMissingError."""
    own = (
        ("sizes", None, (C.c_void_p,)),
        ("client", C.c_void_p, (C.c_int,)),
        ("output", C.c_uint64, (C.c_void_p, C.c_uint64)),
        ("waiting", C.c_uint64, (C.c_void_p,)),
    )
    return load(LIBRARY, "tcp", "expertd_tcp_", (*TICKETS, *own))
