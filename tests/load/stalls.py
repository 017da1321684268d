"""What held up the engine of a server in this process, and for how long: work between batches, callers wait for it.

with stalls.recorded(0.5e-3) as found:
    ...
print(stalls.table(found))
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from expertd_server.engine.engine import Engine

__all__ = ["Stall", "recorded", "table"]

_FRAMES = 4


class Stall(NamedTuple):
    """where: the functions that asked for the work, the nearest first."""

    where: str
    seconds: float


@contextlib.contextmanager
def recorded(least_s: float) -> Iterator[list[Stall]]:
    """A list that grows by each piece of work that took longer than least_s on an engine's thread."""
    found: list[Stall] = []
    between = Engine.between

    def timed(self: Engine, work: Callable[[], Any], timeout_s: float | None = None) -> Any:
        frames = traceback.extract_stack(limit=_FRAMES + 1)[-2::-1]
        where = " < ".join(f"{f.name}:{f.lineno}" for f in frames)

        def run() -> Any:
            begin = time.perf_counter()
            try:
                return work()
            finally:
                if (took := time.perf_counter() - begin) > least_s:
                    found.append(Stall(where, took))

        return between(self, run, timeout_s)

    Engine.between = timed  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Engine.between = between  # type: ignore[method-assign]


def table(found: list[Stall]) -> str:
    """One line for each place, the longest sum first."""
    places: defaultdict[str, list[float]] = defaultdict(list)
    for stall in list(found):
        places[stall.where].append(1e3 * stall.seconds)
    lines = ["    the engine was held up by (ms: sum, longest; how often):"]
    for where, took in sorted(places.items(), key=lambda place: -sum(place[1])):
        lines.append(f"    {sum(took):9.1f} {max(took):8.1f} {len(took):6d}  {where}")
    return "\n".join(lines)
