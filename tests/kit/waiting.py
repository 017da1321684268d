"""Waiting for what another thread or process does."""

import time
from collections.abc import Callable


def until(so: Callable[[], object], within_s: float = 20.0) -> None:
    end_s = time.monotonic() + within_s
    while not so():
        assert time.monotonic() < end_s, f"it did not happen within {within_s} s"
        time.sleep(0.002)
