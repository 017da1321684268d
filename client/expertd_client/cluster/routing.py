"""Where the parts of a request go: sub-requests, each with the servers that could answer it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from expertd_client.cluster.assignment import Assigned
from expertd_client.cluster.member import Member
from expertd_client.cluster.members import Members
from expertd_client.cluster.policy import choose
from expertd_client.cluster.split import Destinations, SubBatch, cut, split
from expertd_client.cluster.sub_request import SubRequest
from expertd_client.cluster.table import LayerTable
from expertd_client.requests.request import Request

__all__ = ["most_tokens", "place"]


def place(
    members: Members,
    rng: random.Random,
    request: Request,
    rows: NDArray[np.int64] | None,
    meant: Destinations,
    table: LayerTable,
) -> tuple[list[SubRequest], list[SubBatch]]:
    """Sub-requests for a request, and the parts of it that nobody holds.  rows: its tokens in the batch."""
    chosen: dict[str, Member | None] = {}
    servers = []
    for group in meant.groups:
        replicas = table.replicas[group]
        there = members.usable(replicas, version=request.weights_version, layer=request.layer)
        member = choose(there, request.tokens, members.clock(), rng) if there else None
        servers.append(replicas[0] if member is None else member.address)
        chosen.setdefault(servers[-1], member)
    assigned = table.assignment(meant.groups, tuple(servers))
    if table.whole:
        parts = [SubBatch(0, None, request, meant.routes)] if request.tokens and meant.groups else []
    else:
        parts = split(request, table, assigned.owner_of_group, len(assigned.servers))
    sub_requests: list[SubRequest] = []
    orphans: list[SubBatch] = []
    for part in parts:
        if rows is not None:
            part = replace(part, rows=rows if part.rows is None else rows[part.rows])
        if part.owner < 0:
            orphans.append(part)
        else:
            server = assigned.servers[part.owner]
            sub_requests += _sub_requests(members, part, server, chosen[server.server])
    return sub_requests, orphans


def most_tokens(members: Members, replicas: Sequence[str]) -> int:
    """That each of the servers takes at once; 0 = no bound."""
    known = members.by_address
    if len(replicas) == 1:
        return known[replicas[0]].max_tokens if replicas[0] in known else 0
    return min((m for a in replicas if a in known and (m := known[a].max_tokens)), default=0)


def _sub_requests(members: Members, part: SubBatch, server: Assigned, chosen: Member | None) -> list[SubRequest]:
    """Those of one part, cut to what each of its replicas takes."""
    one = part.request.tokens == 1  # it fits everywhere
    pieces = [part] if one else cut(part, most_tokens(members, server.replicas))
    return [
        SubRequest(piece, server.replicas, server.first, chosen if n == 0 else None, server.apart)
        for n, piece in enumerate(pieces)
    ]
