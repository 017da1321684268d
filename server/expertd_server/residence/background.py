"""Threads that prepare weights beside those that serve."""

from __future__ import annotations

import contextlib
import os
import threading

__all__ = ["stand_back"]

_NICE = 10
"""How far such a thread stands back, where it shares cores."""


def stand_back() -> None:
    """The calling thread gets less of the cores than those that serve, where the system can do that for a thread."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
