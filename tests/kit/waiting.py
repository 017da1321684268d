"""Waiting for what another thread or process does."""

import gc
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType


def until(so: Callable[[], object], within_s: float = 20.0) -> None:
    end_s = time.monotonic() + within_s
    while not so():
        assert time.monotonic() < end_s, f"it did not happen within {within_s} s"
        time.sleep(0.002)


def until_inside(thread: threading.Thread, function: str) -> None:
    """Waits until `thread` stays in a call of a Python function of that name, as it has come to where it is to wait.
    Fails where it ends without."""
    seen = 0

    def stays() -> bool:
        nonlocal seen
        assert thread.is_alive(), f"it ended, and does not wait in {function}()"
        gc.disable()  # CPython 3.11 makes the dict under a lock that a collection in it waits for
        try:
            frame: FrameType | None = sys._current_frames().get(thread.ident or 0)
        finally:
            gc.enable()
        while frame is not None and frame.f_code.co_name != function:
            frame = frame.f_back
        seen = seen + 1 if frame is not None else 0
        return seen == 5

    until(stays)


def until_asleep(thread: threading.Thread) -> None:
    """Waits until `thread` stays asleep: it neither runs nor waits for a core."""
    stat, seen = Path(f"/proc/self/task/{thread.native_id}/stat"), 0

    def stays() -> bool:
        nonlocal seen
        seen = seen + 1 if stat.read_text().rpartition(")")[2].split()[0] == "S" else 0
        return seen == 5

    until(stays)
