"""Tests that are marked `alone` run while no other test runs, in whichever process of pytest-xdist.

The locks are POSIX record locks: they belong to a process and end with it.  A lock by flock() would live on in each
child that a killed worker has forked, and the next test that is to be alone would wait for ever.
"""

from __future__ import annotations

import fcntl
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOM, DOOR = "room", "door"


@contextmanager
def turn(folder: Path, alone: bool) -> Iterator[None]:
    """Hold the room together with other processes, or alone.  A process that waits to be alone holds the listener
    meanwhile, so that no other enters before it.  One turn at a time in a process."""
    with (folder / ROOM).open("a+") as room:
        with (folder / DOOR).open("a+") as listener:
            fcntl.lockf(listener, fcntl.LOCK_EX)
            fcntl.lockf(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


class Turns:
    """A plugin for a worker.  folder: the same for all workers of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest-timeout's clock begins
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        with turn(self.folder, item.get_closest_marker("alone") is not None):
            return (yield)
