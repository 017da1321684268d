"""Tests that are marked `alone` run while no other test runs, in whichever process of pytest-xdist."""

from __future__ import annotations

import fcntl
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOM, DOOR = "room", "door"


@contextmanager
def turn(folder: Path, alone: bool) -> Iterator[None]:
    """Hold the room together with others, or alone.  Who waits for it alone keeps the door, so that nobody slips in."""
    with (folder / ROOM).open("w") as room:
        with (folder / DOOR).open("w") as door:
            fcntl.flock(door, fcntl.LOCK_EX)
            fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        try:
            yield
        finally:
            fcntl.flock(room, fcntl.LOCK_UN)  # for children that were forked, too


class Turns:
    """A plugin for a worker.  folder: the same for all workers of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest-timeout's clock begins
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        with turn(self.folder, item.get_closest_marker("alone") is not None):
            return (yield)
