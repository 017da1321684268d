"""Threads that prepare weights beside those that serve."""

from __future__ import annotations

import contextlib
import os
import threading

from expertd_kernels.native.library import stand_apart

__all__ = ["stand_back"]

_NICE = 10
"""The nice value of such a thread: with the usual weights of Linux it gets about a tenth of a contended core."""


def stand_back() -> None:
    """The calling thread gets less of the cores than those that serve, where the system can do that for a thread, and
    on a CPU never holds their kernel's context."""
    stand_apart()
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
