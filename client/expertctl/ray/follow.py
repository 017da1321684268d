"""A placement's file that is kept up to date: clients that are not in the Ray cluster read it (PlacementFile)."""

from __future__ import annotations

import time
from pathlib import Path

from expertctl.planner.observe import ask
from expertd.errors import ExpertdError
from expertd.placement import Placement
from expertd_client.cluster.members import addresses_of
from expertd_client.cluster.sources import Source, publish
from expertd_client.transports.credentials import Credentials

__all__ = ["Follower"]

_PAUSE_S = 0.5
"""After somebody did not answer."""


class Follower:
    """source: of addresses; file: where the placement goes; epochs go on from what is there."""

    def __init__(self, source: Source, file: Path, credentials: Credentials | None, timeout_s: float) -> None:
        self._source, self._file, self._credentials, self._timeout_s = source, file, credentials, timeout_s
        self._last = Placement.from_file(file) if file.exists() else None

    def step(self) -> Placement | None:
        """Waits for news as the source does; what was written, None = nothing has changed, or somebody does not
        answer."""
        try:
            found = Placement.from_describe(ask(addresses_of(self._source.read()), self._credentials, self._timeout_s))
        except ExpertdError:
            time.sleep(_PAUSE_S)
            return None  # what is written stays in force
        last = self._last
        epoch = 1 if last is None else last.epoch + 1
        if last is not None and (found.servers, found.num_experts) == (last.servers, last.num_experts):
            return None
        self._last = Placement(found.servers, found.num_experts, epoch, found.fingerprint)
        publish(self._file, self._last)
        return self._last
