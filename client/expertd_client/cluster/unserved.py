"""Parts of a call that nobody can serve: what is said of them, and which routes they are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expertd.errors import ExpertdError, PlacementError, UnavailableError
from expertd.ranges import format_ranges
from expertd_client.cluster.leg import Leg
from expertd_client.cluster.members import Members
from expertd_client.cluster.policy import OnMissing
from expertd_client.cluster.split import Part
from expertd_client.requests.request import Request

__all__ = ["Unserved"]


class Unserved:
    """parts: those that are left out of the sum; fails: there must be none."""

    def __init__(self, members: Members, request: Request, on_missing: OnMissing) -> None:
        self.parts: list[Part] = []
        self._members = members
        self._request = request
        self.fails = on_missing is OnMissing.FAIL
        self.look()

    def look(self) -> None:
        """Before a table is read: what a server says after this may stand in the next one alone."""
        self._unknown = self._members.unknown

    def legs(self, orphan: Part) -> list[Leg]:
        """Of a part whose experts no server of the cluster holds; where one did not answer yet, it may.  Raises
        PlacementError."""
        if not self.fails:
            self.parts.append(orphan)
            return []
        if self._unknown:
            return [Leg(orphan, (), int(orphan.request.topk_ids.max()), None)]
        raise self._nobody_holds(orphan)

    def error(self, leg: Leg) -> ExpertdError:
        """Why a leg finds no server."""
        if not leg.holders:
            return self._nobody_holds(leg.part)
        why = self._members.troubles() or "all are busy"
        text = f"layer {self._request.layer}: got no answer from {', '.join(leg.holders)}, want one of them ({why})"
        return UnavailableError(text)

    def _nobody_holds(self, part: Part) -> PlacementError:
        ids = part.request.topk_ids
        return PlacementError.about(
            f"layer {self._request.layer}",
            got=f"no server for experts {format_ranges(np.unique(ids[ids >= 0]).tolist())}",
            want="a holder for every expert",
            remedy=self._members.troubles() or "start servers for them, or call with SKIP or RENORMALIZE",
        )

    def missing(self) -> NDArray[np.bool_]:
        """[M, top_k]: routes that were not computed."""
        gone = np.zeros(self._request.topk_ids.shape, bool)
        for part in self.parts:
            rows = slice(None) if part.rows is None else part.rows
            gone[rows] |= part.request.topk_ids >= 0
        return gone
