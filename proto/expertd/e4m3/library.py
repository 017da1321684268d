"""The library, through ctypes."""

from __future__ import annotations

import ctypes as C
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

from expertd.cxx import stale

__all__ = ["LIBRARY", "quantizer", "widener"]

LIBRARY = Path(__file__).parent / "csrc" / "libexpertd_e4m3.so"


@cache
def quantizer() -> Callable[[int, int, int, int, int, int, int], None] | None:
    """quantize(from, DataType, rows, columns, stride in bytes, codes, scales), by addresses: f32, f16 or bf16 into e4m3
    [rows, columns] and f32 [rows, scales_of_row(columns)].  It releases the interpreter's lock.  None: not built."""
    p, n = C.c_void_p, C.c_int64
    return _function("expertd_e4m3_quantize", p, C.c_int, n, n, n, p, p)


@cache
def widener() -> Callable[[int, int, int, int, int, int], None] | None:
    """widen(codes, scales, rows, columns, to, DataType), by addresses: the way back, f32 or bf16.  None: not built."""
    p, n = C.c_void_p, C.c_int64
    return _function("expertd_e4m3_widen", p, p, n, n, p, C.c_int)


def _function(name: str, *arguments: Any) -> Callable[..., None] | None:
    if stale(LIBRARY.name):
        return None
    try:
        function = getattr(C.CDLL(str(LIBRARY)), name)
    except OSError:
        return None
    function.restype, function.argtypes = None, arguments
    return cast(Callable[..., None], function)
