"""A directed graph in floors, so that its arrows point down: which node on which floor, and where on it.  Pure.

Nodes that nothing leads out of stand on the ground floor, every other one just above the highest that it leads to.
Where nodes lead in a circle, its arrow with the least weight is taken out first (`back`).  An arrow over several floors
passes each of them at a place of its own, so that it does not run behind a box.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["Layers", "layered", "room_of"]

Edge = tuple[str, str]
SWEEPS = 24


@dataclass(frozen=True)
class Layers:
    """floors: nodes and passing places of each floor, ground floor first, from left to right; floor and place (of the
    middle, in boxes' widths): of each of them; ways: arrow -> its nodes and passing places; back: arrows that close
    circles; width: of all floors."""

    floors: Sequence[Sequence[str]]
    floor: Mapping[str, int]
    place: Mapping[str, float]
    ways: Mapping[Edge, Sequence[str]]
    back: frozenset[Edge]
    width: float


def _circle(nodes: Iterable[str], edges: Iterable[Edge]) -> list[Edge]:
    """The arrows of one circle, or []."""
    to: dict[str, list[str]] = {n: [] for n in nodes}
    for a, b in sorted(edges):
        to[a].append(b)
    done: set[str] = set()

    def look(node: str, path: list[str]) -> list[Edge]:
        if node in path:
            ring = path[path.index(node) :]
            return list(zip(ring, [*ring[1:], node], strict=True))
        if node in done:
            return []
        for other in to[node]:
            found = look(other, [*path, node])
            if found:
                return found
        done.add(node)
        return []

    for node in sorted(to):
        found = look(node, [])
        if found:
            return found
    return []


def _floors(nodes: Sequence[str], edges: Iterable[Edge]) -> dict[str, int]:
    """Longest way down of each node; the arrows have no circle."""
    to: dict[str, list[str]] = {n: [] for n in nodes}
    for a, b in edges:
        to[a].append(b)
    floor: dict[str, int] = {}

    def of(node: str) -> int:
        if node not in floor:
            floor[node] = 1 + max((of(other) for other in to[node]), default=-1)
        return floor[node]

    for node in nodes:
        of(node)
    return floor


def layered(nodes: Sequence[str], weights: Mapping[Edge, int]) -> Layers:
    """nodes: in an order that settles ties; weights: of each arrow."""
    back: set[Edge] = set()
    while ring := _circle(nodes, [e for e in weights if e not in back]):
        back.add(min(ring, key=lambda e: (weights[e], e)))
    floor = _floors(nodes, [e for e in weights if e not in back])
    rows: list[list[str]] = [[] for _ in range(1 + max(floor.values(), default=0))]
    for node in nodes:
        rows[floor[node]].append(node)
    ways: dict[Edge, list[str]] = {}
    for a, b in sorted(weights):
        step = -1 if floor[a] > floor[b] else 1
        between = range(floor[a] + step, floor[b], step) if floor[a] != floor[b] else range(0)
        passing = [f"{a} > {b} @ {k}" for k in between]
        for name, k in zip(passing, between, strict=True):
            floor[name] = k
            rows[k].append(name)
        ways[a, b] = [a, *passing, b]
    _untangle(rows, ways.values())
    place = _places(rows, _neighbours(ways.values()))
    width = max(at + room_of(n) / 2 for n, at in place.items())
    return Layers(rows, floor, place, ways, frozenset(back), width)


def room_of(node: str) -> float:
    """Boxes' widths that it takes of its floor: a passing place is narrow."""
    return 0.16 if " > " in node else 1.2


def _neighbours(ways: Iterable[Sequence[str]]) -> dict[str, list[str]]:
    near: dict[str, list[str]] = {}
    for way in ways:
        for a, b in pairwise(way):
            near.setdefault(a, []).append(b)
            near.setdefault(b, []).append(a)
    return near


def _untangle(rows: list[list[str]], ways: Iterable[Sequence[str]]) -> None:
    """Orders each floor by the middle of what its nodes lead to on the floor next to it, down and up in turns."""
    near = _neighbours(ways)
    for sweep in range(SWEEPS):
        order = range(1, len(rows)) if sweep % 2 == 0 else range(len(rows) - 2, -1, -1)
        for k in order:
            other = rows[k - 1 if sweep % 2 == 0 else k + 1]
            beside = {n: i / max(1, len(other) - 1) for i, n in enumerate(other)}
            wanted = {}
            for i, node in enumerate(rows[k]):
                there = [beside[o] for o in near.get(node, ()) if o in beside]
                wanted[node] = sum(there) / len(there) if there else i / max(1, len(rows[k]) - 1)
            rows[k].sort(key=wanted.__getitem__)


def _places(rows: Sequence[Sequence[str]], near: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Middle of each node, in boxes' widths from the left: near its neighbours on other floors, apart on its own."""
    place: dict[str, float] = {}
    for row in rows:
        at = 0.0
        for node in row:
            place[node] = at + room_of(node) / 2
            at += room_of(node)
    for sweep in range(SWEEPS):
        for row in rows if sweep % 2 else reversed(rows):
            wanted = [sum(place[o] for o in near[n]) / len(near[n]) if near.get(n) else place[n] for n in row]
            place.update(zip(row, _apart(wanted, [room_of(n) for n in row]), strict=True))
    least = min(at - room_of(n) / 2 for n, at in place.items())
    return {n: at - least for n, at in place.items()}


def _apart(wanted: Sequence[float], widths: Sequence[float]) -> list[float]:
    """The places nearest to the wanted ones (least squares) at which things of these widths, in this order, do not
    overlap: blocks that touch move together to their mean."""
    offsets = [sum(widths[:i]) + widths[i] / 2 for i in range(len(widths))]
    blocks: list[tuple[float, int]] = []  # sum of (wanted - offset), members
    for want, offset in zip(wanted, offsets, strict=True):
        blocks.append((want - offset, 1))
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] > blocks[-1][0] / blocks[-1][1]:
            (s2, n2), (s1, n1) = blocks.pop(), blocks.pop()
            blocks.append((s1 + s2, n1 + n2))
    shifts = [s / n for s, n in blocks for _ in range(n)]
    return [shift + offset for shift, offset in zip(shifts, offsets, strict=True)]
