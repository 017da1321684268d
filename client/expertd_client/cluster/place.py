"""Where the parts of a request go: legs, each with the servers that could answer it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from expertd_client.cluster.assign import Assigned, assignment
from expertd_client.cluster.leg import Leg
from expertd_client.cluster.member import Member
from expertd_client.cluster.members import Members
from expertd_client.cluster.policy import choose
from expertd_client.cluster.split import Meant, Part, cut, split
from expertd_client.cluster.table import LayerTable
from expertd_client.requests.request import Request

__all__ = ["most_tokens", "place"]


def place(
    members: Members,
    rng: random.Random,
    request: Request,
    rows: NDArray[np.int64] | None,
    meant: Meant,
    table: LayerTable,
) -> tuple[list[Leg], list[Part]]:
    """Legs for a request, and the parts of it that nobody holds.  rows: its tokens in the batch."""
    chosen: dict[str, Member | None] = {}
    servers = []
    for group in meant.groups:
        holders = table.holders[group]
        there = members.usable(holders, version=request.weights_version)
        member = choose(there, request.tokens, members.clock(), rng) if there else None
        servers.append(holders[0] if member is None else member.address)
        chosen.setdefault(servers[-1], member)
    assigned = assignment(table, meant.groups, tuple(servers))
    if table.whole:
        parts = [Part(0, None, request, meant.routes)] if request.tokens and meant.groups else []
    else:
        parts = split(request, table, assigned.owner_of_group, len(assigned.servers))
    legs: list[Leg] = []
    orphans: list[Part] = []
    for part in parts:
        if rows is not None:
            part = replace(part, rows=rows if part.rows is None else rows[part.rows])
        if part.owner < 0:
            orphans.append(part)
        else:
            server = assigned.servers[part.owner]
            legs += _legs(members, part, server, chosen[server.server])
    return legs, orphans


def most_tokens(members: Members, holders: Sequence[str]) -> int:
    """That each of the servers takes at once; 0 = no bound."""
    known = members.by_address
    if len(holders) == 1:
        return known[holders[0]].max_tokens if holders[0] in known else 0
    return min((m for a in holders if a in known and (m := known[a].max_tokens)), default=0)


def _legs(members: Members, part: Part, server: Assigned, chosen: Member | None) -> list[Leg]:
    """Those of one part, cut to what each of its holders takes."""
    one = part.request.tokens == 1  # it fits everywhere
    pieces = [part] if one else cut(part, most_tokens(members, server.holders))
    return [
        Leg(piece, server.holders, server.first, chosen if n == 0 else None, server.apart)
        for n, piece in enumerate(pieces)
    ]
