"""Layers read one ahead: while a layer is packed, checked and warmed up, the next one comes from the disk.

    ahead.take(assignment)     its canonical weights, from the reading under way if there is one
    ahead.go_on(assignment)    begin to read what follows it, if that will be read at all

One layer ahead and no more, begun when the one before has been taken and, for an accelerator, has left the host.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from expertd_kernels.sources.source import ExpertSource
from expertd_server.boot.assignment import Assignment

if TYPE_CHECKING:
    from expertd_kernels.weights.canonical import Weights

__all__ = ["ReadAhead", "bound_text", "storage_bytes"]

WORDS = {
    "load": "reading",
    "copy": "copying to the device",
    "pack": "packing",
    "compile": "compiling",
    "check": "checking",
    "store": "writing the cache",
    "map": "mapping the cache",
    "measure": "measuring",
    "warm_up": "warming up",
}
"""Stages of a layer's boot in words."""


class _Reading:
    """A layer that a thread reads: a daemon, so that a server which is told to stop does not wait for a disk."""

    def __init__(self, read: Callable[[], Weights]) -> None:
        self._read = read
        self._weights: Weights | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="expertd-ahead", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._weights = self._read()
        except BaseException as e:
            self._error = e

    def wait(self) -> Weights:
        """Its weights, once; raises what reading raised."""
        self._thread.join()
        weights, self._weights = self._weights, None
        if self._error is not None:
            raise self._error
        assert weights is not None
        return weights

    def drop(self) -> None:
        """Nobody asks for that layer any more."""
        self._thread.join()
        self._weights = None


_Key = tuple[int, tuple[int, ...]]


def _key(assignment: Assignment) -> _Key:
    """Tells what is read from all else: a layer may be read in parts."""
    return assignment.info.layer, assignment.held


class ReadAhead:
    """assignments: in the order of loading; wanted: whether a layer will be read (none that is mapped from a cache).
    Without them nothing is read ahead.  seconds: spent in reading so far, whoever waited for it."""

    def __init__(
        self,
        source: ExpertSource,
        assignments: Sequence[Assignment] = (),
        wanted: Callable[[Assignment], bool] = lambda a: True,
    ) -> None:
        self._source, self._wanted = source, wanted
        self._following = dict(zip(map(_key, assignments), assignments[1:], strict=False))
        self._under_way: tuple[_Key, _Reading] | None = None
        self.seconds = 0.0

    def take(self, assignment: Assignment) -> Weights:
        """On the CPU, or where the source makes them.  Raises what the source raises."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None and under_way[0] == _key(assignment):
            return under_way[1].wait()
        if under_way is not None:
            under_way[1].drop()
        return self._read(assignment)

    def go_on(self, assignment: Assignment) -> None:
        """What follows the assignment, in a thread of its own."""
        following = self._following.get(_key(assignment))
        if following is not None and self._under_way is None and self._wanted(following):
            self._under_way = _key(following), _Reading(lambda: self._read(following))

    def close(self) -> None:
        """Nothing more will be taken."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way[1].drop()

    def _read(self, assignment: Assignment) -> Weights:
        start = time.perf_counter()
        try:
            return self._source.load(assignment.info.layer, None if assignment.whole else assignment.held)
        finally:
            self.seconds += time.perf_counter() - start


def storage_bytes(io: Path = Path("/proc/self/io")) -> int:
    """What this process has fetched from storage, not from the page cache; 0 where the system does not say."""
    try:
        lines = io.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), 0)


def bound_text(nbytes: int, seconds: float, fetched: int, stages: dict[str, float]) -> str:
    """ "read 13.95 GB at 2.71 GB/s (100% from storage); slowest step: packing": what was read in how many seconds of
    reading, how much of it came from storage, and the stage that the loading thread spent most time in."""
    slowest = max((s for s in stages if s in WORDS), key=lambda s: stages[s], default="load")
    word, share = WORDS[slowest], min(1.0, fetched / nbytes) if nbytes else 0.0
    if slowest == "load" and nbytes:
        word = "storage" if share > 0.5 else "reading from the page cache"
    if not nbytes or not seconds:
        return f"slowest step: {'generating weights' if slowest == 'load' else word}"
    return (
        f"read {nbytes / 1e9:.2f} GB at {nbytes / seconds / 1e9:.2f} GB/s ({share:.0%} from storage); slowest step:"
        f" {word}"
    )
