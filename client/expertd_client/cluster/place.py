"""Where the parts of a request go: legs, each with the servers that could answer it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from expertd_client.cluster.member import Member
from expertd_client.cluster.members import Members
from expertd_client.cluster.policy import choose
from expertd_client.cluster.split import Part, cut, split
from expertd_client.cluster.table import LayerTable
from expertd_client.request import Request
from expertd_client.result import ForwardResult

if TYPE_CHECKING:
    from expertd_client.cluster.flight import Try

__all__ = ["Leg", "place"]


class Leg:
    """A part under way.

    holders   addresses of the servers that hold all of its experts; chosen: the first to be asked, None = any
    first     the lowest expert of its groups
    apart     nobody else holds all of its experts, but others hold them among themselves
    tries     where it is in flight now; asked: servers that were asked so far; spurned: where it failed
    due_s     when something is to be done about it; infinite = when an event comes
    since_s   when it was first found that nobody can be asked; 0 = never
    result    its answer, from `server`, `seconds` after the call began; None until it came
    """

    __slots__ = (
        "apart",
        "asked",
        "chosen",
        "due_s",
        "first",
        "holders",
        "part",
        "result",
        "seconds",
        "server",
        "since_s",
        "spurned",
        "tries",
    )

    def __init__(
        self, part: Part, holders: Sequence[str], first: int, chosen: Member | None, apart: bool = False
    ) -> None:
        self.part = part
        self.apart = apart
        self.chosen = chosen
        self.holders = holders
        self.first = first
        self.tries: list[Try] = []
        self.asked = 0
        self.spurned: list[Member] = []
        self.due_s = math.inf
        self.since_s = 0.0
        self.result: ForwardResult | None = None
        self.server: Member | None = None
        self.seconds = 0.0


def place(
    members: Members,
    rng: random.Random,
    request: Request,
    rows: NDArray[np.int64] | None,
    routes: int,
    table: LayerTable,
) -> tuple[list[Leg], list[Part]]:
    """Legs for a request, and the parts of it that nobody holds.  rows: its tokens in the batch; routes: how many."""
    chosen: dict[str, Member | None] = {}
    number: dict[str, int] = {}
    owner_of_group = [-1] * len(table.holders)
    meant = [0] if table.whole else _groups(table, request)
    for group in meant:
        holders = table.holders[group]
        there = members.usable(holders)
        member = choose(there, request.tokens, members.clock(), rng) if there else None
        address = holders[0] if member is None else member.address
        chosen.setdefault(address, member)
        owner_of_group[group] = number.setdefault(address, len(number))
    if table.whole:
        parts = [Part(0, None, request, routes)] if request.tokens else []
    else:
        parts = split(request, table, owner_of_group, len(chosen))
    legs: list[Leg] = []
    orphans: list[Part] = []
    for part in parts:
        if rows is not None:
            part = replace(part, rows=rows if part.rows is None else rows[part.rows])
        if part.owner < 0:
            orphans.append(part)
        else:
            groups = [group for group in meant if owner_of_group[group] == part.owner]
            legs += _legs(members, part, groups, table, list(chosen.values())[part.owner])
    return legs, orphans


def _groups(table: LayerTable, request: Request) -> list[int]:
    """Those of the experts that a request means, ascending: a large cluster has many more."""
    routes = np.bincount(table.group_of.take(request.topk_ids.ravel()) + 1, minlength=1)[1:]
    found: list[int] = np.flatnonzero(routes).tolist()
    return found


def _legs(members: Members, part: Part, groups: list[int], table: LayerTable, chosen: Member | None) -> list[Leg]:
    """Those of one part, cut to what each of its holders takes."""
    holders: Sequence[str] = table.holders[groups[0]]
    if len(groups) > 1:
        holders = [a for a in holders if all(a in table.holders[g] for g in groups)]
    known = members.by_address
    bounds = [known[a].max_tokens for a in holders if a in known and known[a].max_tokens]
    first = table.first[groups[0]]
    pieces = cut(part, min(bounds, default=0))
    apart = len(holders) < 2 and all(len(table.holders[g]) > 1 for g in groups)
    return [Leg(piece, holders, first, chosen if n == 0 else None, apart) for n, piece in enumerate(pieces)]
