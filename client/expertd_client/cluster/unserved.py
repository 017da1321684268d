"""Parts of a call that nobody can serve: what is said of them, and which routes they are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expertd.common.ranges import format_ranges
from expertd.errors import ExpertdError, PlacementError, UnavailableError
from expertd_client.cluster.members import Members
from expertd_client.cluster.policy import OnMissing
from expertd_client.cluster.split import SubBatch
from expertd_client.cluster.sub_request import SubRequest
from expertd_client.requests.request import Request

__all__ = ["Unserved"]


class Unserved:
    """parts: those that are left out of the sum; fails: there must be none."""

    def __init__(self, members: Members, request: Request, on_missing: OnMissing) -> None:
        self.parts: list[SubBatch] = []
        self._members = members
        self._request = request
        self.fails = on_missing is OnMissing.FAIL
        self.look()

    def look(self) -> None:
        """Before a table is read: what a server says after this may stand in the next one alone."""
        self._unknown = self._members.unknown

    def sub_requests(self, orphan: SubBatch) -> list[SubRequest]:
        """Of a part whose experts no server of the cluster holds; where one did not answer yet, it may.  Raises
        PlacementError."""
        if not self.fails:
            self.parts.append(orphan)
            return []
        if self._unknown:
            return [SubRequest(orphan, (), int(orphan.request.topk_ids.max()), None)]
        raise self._nobody_holds(orphan)

    def error(self, sub: SubRequest) -> ExpertdError:
        """Why a sub-request finds no server."""
        if not sub.replicas:
            return self._nobody_holds(sub.part)
        why = self._members.troubles(sub.replicas) or f"{', '.join(sub.replicas)}: all are busy"
        return UnavailableError(
            f"layer {self._request.layer}: got no server that takes requests, want one of {len(sub.replicas)}: {why}"
        )

    def _nobody_holds(self, part: SubBatch) -> ExpertdError:
        """Of a placement that lacks experts, or of a server that has never said what it holds: that one may have them
        a moment later."""
        ids = part.request.topk_ids
        kind: type[ExpertdError] = UnavailableError if self._members.unknown else PlacementError
        return kind.about(
            f"layer {self._request.layer}",
            got=f"no server for experts {format_ranges(np.unique(ids[ids >= 0]).tolist())}",
            want="a replica for every expert",
            remedy=self._members.troubles() or "start servers for them, or call with SKIP or RENORMALIZE",
        )

    def missing(self) -> NDArray[np.bool_]:
        """[M, top_k]: routes that were not computed."""
        gone = np.zeros(self._request.topk_ids.shape, bool)
        for part in self.parts:
            rows = slice(None) if part.rows is None else part.rows
            gone[rows] |= part.request.topk_ids >= 0
        return gone
