"""Mapped files that survive being cut: guard.cpp, from Python.

A page of a mapping that cannot be had (the file was cut in place, its disk fails) ends a process in SIGBUS.  A guarded
mapping turns into zeros instead, and lost() says so from then on: whoever computes from it asks before it answers.
"""

from __future__ import annotations

import ctypes as C
import mmap
import weakref
from collections.abc import Callable

from expertd_kernels.native.library import kernel_error, library

__all__ = ["guard"]


def guard(memory: mmap.mmap) -> Callable[[], bool] | None:
    """Guards a writable mapping until it is closed.  Returns lost(); None where it cannot be guarded: the library is
    not there, or thousands of mappings are guarded already."""
    if kernel_error():
        return None
    lib = library()
    start = C.addressof(C.c_char.from_buffer(memory))
    number = lib.expertd_guard_add(start, len(memory))
    if number < 0:
        return None
    weakref.finalize(memory, lib.expertd_guard_remove, number)
    return lambda: bool(lib.expertd_guard_lost(number))
