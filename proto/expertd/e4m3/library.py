"""The library, through ctypes."""

from __future__ import annotations

import ctypes as C
from collections.abc import Callable
from functools import cache
from pathlib import Path

from expertd.cxx import stale

__all__ = ["LIBRARY", "quantizer"]

LIBRARY = Path(__file__).parent / "csrc" / "libexpertd_e4m3.so"


@cache
def quantizer() -> Callable[[int, int, int, int, int, int, int], None] | None:
    """quantize(from, DataType, rows, columns, stride in bytes, codes, scales), by addresses: f32, f16 or bf16 into e4m3
    [rows, columns] and f32 [rows, scales_of_row(columns)].  It releases the interpreter's lock.  None: not built."""
    if stale(LIBRARY.name):
        return None
    try:
        function = C.CDLL(str(LIBRARY)).expertd_e4m3_quantize
    except OSError:
        return None
    p, n = C.c_void_p, C.c_int64
    function.restype, function.argtypes = None, (p, C.c_int, n, n, n, p, p)
    return function
