"""What the coordinator knows of one server, and what becomes of it.  Values; nothing of Ray."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Watched"]

_FIRST_S, _LONGEST_S = 1.0, 60.0
"""Until a server that could not serve is started again; doubled each time it could not."""


@dataclass
class Watched:
    """phase     "pending" (Ray has not started it: it waits for room, or is being started), "loading", "serving",
              "away" (its process or node is gone, and Ray starts it again), "failed" or "drained"
    why       the sentence, where it failed
    again_s   when a failed one is to be started again, by the coordinator's clock
    starts    how often its process was seen to start
    """

    phase: str = "pending"
    address: str = ""
    metrics: str = ""
    node: str = ""
    pid: int = 0
    why: str = ""
    starts: int = 0
    again_s: float = float("inf")
    _rest_s: float = field(default=_FIRST_S, repr=False)

    def heard(self, state: Any, now_s: float) -> bool:
        """What its actor said (Hosted.state with its node).  Whether it changed."""
        before = self.as_row()
        started = (state["node"], state["pid"]) != (self.node, self.pid)
        self.starts += started
        if state["phase"] == "failed" and (started or self.phase != "failed"):
            self._rest(now_s)
        elif state["phase"] == "serving":
            self._rest_s = _FIRST_S
        self.phase, self.why, self.address = state["phase"], state["why"], state["address"]
        self.metrics, self.node, self.pid = state["metrics"], state["node"], state["pid"]
        return self.as_row() != before

    def lost(self) -> bool:
        """Its process is gone, and Ray starts another one.  Whether that is news."""
        before, self.phase = self.phase, "away" if self.starts else "pending"
        self.address = self.metrics = ""
        return before != self.phase

    def ended(self, why: str, now_s: float) -> bool:
        """Its actor is gone for good: it is to be made anew.  Whether that is news."""
        if self.phase == "failed":
            return False
        self.phase, self.why, self.address, self.metrics = "failed", why, "", ""
        self._rest(now_s)
        return True

    def due(self, now_s: float) -> bool:
        """Whether a failed one is to be started again now; asked until it says so once."""
        if now_s < self.again_s:
            return False
        self.again_s = float("inf")
        return True

    def as_row(self) -> dict[str, Any]:
        """For people and programs."""
        names = ("phase", "address", "metrics", "node", "pid", "why", "starts")
        return {name: getattr(self, name) for name in names}

    def _rest(self, now_s: float) -> None:
        self.again_s = now_s + self._rest_s
        self._rest_s = min(_LONGEST_S, 2 * self._rest_s)
