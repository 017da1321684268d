"""What batches take at servers that do not run: recorded from some of their kind, read for a plan.

    write(path, described)                  what these servers measured when they started
    recorded = read(path)                   by address
    require_alike(path, recorded, described)    refused where they are of another version or model than the others

A file is {"10.0.0.7:50051": {"version": "0.9", "fingerprint": "...", "top_k": 8, "parts": [{"device": "xpu:0", "held":
"0-63", "surface": [[experts, routes, microseconds], ...]}]}}.  An address may be changed to that of another server of
the same kind.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import expertd
from expertctl.planner.expected import Part, parts_of
from expertd.common.ranges import format_ranges, parse_ranges
from expertd.common.surface import Surface
from expertd.errors import PlacementError
from expertd.v1 import expert_service_pb2 as pb

__all__ = ["Recorded", "read", "require_alike", "write"]

_AGAIN = "record it again from a server that is: expertctl plan ADDRESS --record-surfaces FILE"


@dataclass(frozen=True)
class Recorded:
    """Of one server.  parts: of a layer, those of all layers alike."""

    version: str
    fingerprint: str
    top_k: int
    parts: tuple[Part, ...]


def write(path: Path, described: Mapping[str, pb.DescribeResponse]) -> int:
    """Returns of how many servers; those that did not measure are left out."""
    out: dict[str, Any] = {}
    for address, layers in parts_of(described).items():
        d, (first, parts) = described[address], next(iter(layers.items()))
        out[address] = {
            "version": d.version,
            "fingerprint": d.model.fingerprint,
            "top_k": next(layer.top_k for layer in d.layers if layer.layer == first),
            "parts": [
                {"device": p.device, "held": format_ranges(p.held), "surface": [list(x) for x in p.surface.points]}
                for p in parts
            ],
        }
    path.write_text(json.dumps(out), encoding="utf-8")
    return len(out)


def read(path: Path) -> dict[str, Recorded]:
    """By address.  Raises PlacementError for what is no such file."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        return {str(address): _recorded(row) for address, row in rows.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise PlacementError(f"{path}: has no surfaces: {error}; want what --record-surfaces writes") from None


def require_alike(path: Path, found: Mapping[str, Recorded], described: Mapping[str, pb.DescribeResponse]) -> None:
    """described: servers of the same plan.  Raises PlacementError for surfaces of another version or another model than
    theirs, or than each other's."""
    versions = {d.version for d in described.values()} or {expertd.__version__}
    models = {d.model.fingerprint for d in described.values()} or {r.fingerprint for r in list(found.values())[:1]}
    for address, r in found.items():
        for what, got, want in (("version", r.version, versions), ("model", r.fingerprint, models)):
            if got not in want:
                text = " or ".join(sorted(want))
                raise PlacementError.about(f"{path}: {address}: {what}", got=got or "none", want=text, remedy=_AGAIN)


def _recorded(row: Mapping[str, Any]) -> Recorded:
    parts = []
    for p in row["parts"]:
        points = tuple((int(e), int(n), float(us)) for e, n, us in p["surface"])
        bad = next((x for x in points if x[0] < 1 or x[1] < x[0] or not 0 < x[2] < float("inf")), None)
        if bad is not None or not points:
            raise ValueError(f"{list(bad or ())} is no point of {p['device']}")
        parts.append(Part(str(p["device"]), frozenset(parse_ranges(p["held"])), Surface(points)))
    top_k = int(row["top_k"])
    if top_k < 1 or not parts:
        raise ValueError("no parts, or no experts a token")
    return Recorded(str(row["version"]), str(row["fingerprint"]), top_k, tuple(parts))
