"""Who holds the experts of a layer, as arrays: what a batch is split by.

Experts with the same replicas form a group.  Two servers of one half each and a replica of the first:

    a: 0-3   b: 4-7   c: 0-3      ->  group 0 = experts 0-3 at (a, c), group 1 = experts 4-7 at (b,)

A group is served by one of its replicas at a time, whole, so a partial sum has the same terms whoever computes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from expertd_client.cluster.assignment import Assignment, assign

__all__ = ["LayerTable", "layer_table"]

_MOST = 512
"""Assignments that are remembered of a table: where groups have replicas, choices differ from call to call."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerTable:
    """One layer.  Immutable, but for what is remembered of it.

    num_experts   E, of the model
    group_of      [E + 1] i64: expert -> group, -1 = nobody holds it.  The last entry is -1, too: that of the id -1
    replicas      by group: addresses of the servers that hold all of its experts, in the order of the placement
    first         by group: its lowest expert.  Groups are in this order
    whole         whether one group has all experts: then nothing is split
    single        whether every group has one replica, so that groups are servers: addresses [groups], else none
    groups        all of them
    group_of_at   address of group_of
    remembered    what assignment() found; groups_of_bits: of expertd_client.cluster.split
    """

    num_experts: int
    group_of: NDArray[np.int64]
    replicas: tuple[tuple[str, ...], ...]
    first: tuple[int, ...]
    whole: bool
    single: bool
    addresses: tuple[str, ...]
    groups: tuple[int, ...]
    group_of_at: int
    groups_of_bits: dict[int, tuple[tuple[int, ...], bool]] = field(default_factory=dict, repr=False)
    remembered: dict[tuple[tuple[int, ...], tuple[str, ...]], Assignment] = field(default_factory=dict, repr=False)

    def assignment(self, groups: tuple[int, ...], chosen: tuple[str, ...]) -> Assignment:
        """groups: ascending; chosen: the server of each."""
        key = groups, chosen
        found = self.remembered.get(key)
        if found is None:
            found = assign(self.replicas, self.first, groups, chosen)
            if len(self.remembered) >= _MOST:
                self.remembered.clear()
            self.remembered[key] = found
        return found


def layer_table(num_experts: int, held: Mapping[str, tuple[int, ...]]) -> LayerTable:
    """The table of a layer with num_experts experts.  held: address -> ids of the experts that the server holds."""
    addresses = list(held)
    holds = np.zeros((num_experts, len(addresses)), bool)
    for column, experts in enumerate(held.values()):
        holds[list(experts), column] = True
    bits = np.packbits(holds, axis=1)
    rows = bits.tobytes()
    groups: dict[bytes, int] = {bytes(bits.shape[1]): -1}
    first: list[int] = []
    group_of = np.full(num_experts + 1, -1, np.int64)
    for expert in range(num_experts):
        row = rows[expert * bits.shape[1] : (expert + 1) * bits.shape[1]]
        number = groups.get(row)
        if number is None:
            number = groups[row] = len(first)
            first.append(expert)
        group_of[expert] = number
    replicas = tuple(tuple(addresses[n] for n in np.flatnonzero(holds[expert])) for expert in first)
    whole = len(replicas) == 1 and bool((group_of[:-1] >= 0).all())
    single = all(len(of_group) == 1 for of_group in replicas)
    return LayerTable(
        num_experts,
        group_of,
        replicas,
        tuple(first),
        whole,
        single,
        tuple(of_group[0] for of_group in replicas) if single else (),
        tuple(range(len(replicas))),
        group_of.__array_interface__["data"][0],
    )
