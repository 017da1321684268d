"""Which server is asked for which groups of experts, and what follows from that: the same for many batches, so a
LayerTable (table.py) remembers it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Assigned", "Assignment", "assign"]


@dataclass(frozen=True, slots=True)
class Assigned:
    """One server.

    server    its address
    replicas  addresses of the servers that hold all of its groups
    first     the lowest expert of its groups
    apart     nobody else holds all of its groups, but others hold them among themselves
    raced     somebody else can be asked when it is late
    """

    server: str
    replicas: tuple[str, ...]
    first: int
    apart: bool
    raced: bool


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """servers: in the order of the lowest expert of each, in which sums are added; raced: whether one of them is;
    owner_of_group [groups] i32: a number of them, -1 = none; owner_of_group_at: its address."""

    servers: tuple[Assigned, ...]
    raced: bool
    owner_of_group: NDArray[np.int32]
    owner_of_group_at: int


def assign(
    replicas_of: Sequence[tuple[str, ...]], first_of: Sequence[int], groups: tuple[int, ...], chosen: tuple[str, ...]
) -> Assignment:
    """groups: ascending; chosen: the server of each; the rest: of every group, as a LayerTable has it."""
    groups_of: dict[str, list[int]] = {}
    for group, address in zip(groups, chosen, strict=True):
        groups_of.setdefault(address, []).append(group)
    owner_of_group = np.full(len(replicas_of), -1, np.int32)
    servers = []
    for number, (address, mine) in enumerate(groups_of.items()):
        owner_of_group[mine] = number
        replicas = replicas_of[mine[0]]
        if len(mine) > 1:
            replicas = tuple(a for a in replicas if all(a in replicas_of[g] for g in mine))
        apart = len(replicas) < 2 and all(len(replicas_of[g]) > 1 for g in mine)
        servers.append(Assigned(address, replicas, first_of[mine[0]], apart, apart or len(replicas) > 1))
    raced = any(server.raced for server in servers)
    return Assignment(tuple(servers), raced, owner_of_group, owner_of_group.__array_interface__["data"][0])
