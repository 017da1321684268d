"""What a cluster answers: the result of one server, and who had which part in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from expertd_client.requests.result import ForwardResult

__all__ = ["Answered", "ClusterResult"]


class Answered(NamedTuple):
    """One part of a call.

    server    address of the one that answered
    tokens    of the batch, that had a route there
    routes    computed there
    asked     servers that were asked, the one that answered included
    seconds   from the call's begin to this answer
    backend   the kernel's name
    """

    server: str
    tokens: int
    routes: int
    asked: int
    seconds: float
    backend: str


class ClusterResult(ForwardResult):
    """ForwardResult, the sum over all servers.  timing and load are those of the part that was answered last.

    parts     in the order in which they were added up
    missing   [n, 2] i64: (token, expert) of each route that was not computed, in the order of the batch; empty unless
              the call was made with SKIP or RENORMALIZE
    """

    __slots__ = ("_missing", "_parts")

    def __init__(
        self,
        *facts: Any,
        parts: tuple[Answered, ...] | Callable[[], tuple[Answered, ...]] = (),
        missing: NDArray[np.int64] | None = None,
    ) -> None:
        """facts: those of ForwardResult; parts: or what makes them when somebody asks; missing: None = none is."""
        super().__init__(*facts)
        self._parts, self._missing = parts, missing

    @property
    def parts(self) -> tuple[Answered, ...]:
        if not isinstance(self._parts, tuple):
            self._parts = self._parts()
        return self._parts

    @property
    def missing(self) -> NDArray[np.int64]:
        if self._missing is None:
            self._missing = np.empty((0, 2), np.int64)
        return self._missing
