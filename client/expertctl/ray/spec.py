"""What is wanted of Ray: every part of the experts, so many replicas of it, and what each of their servers needs.

Spec("experts", ("--checkpoint", "/models/m"), shards=8, replicas=2, needs=((None, {"GPU": 1}), ((7,), {"xpu": 1})))
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from expertd.common.ranges import parse_ranges
from expertd.errors import PlacementError

__all__ = ["Needs", "Place", "Spec", "needs_of", "strategy_of"]

Needs = tuple[tuple[int, ...] | None, Mapping[str, float]]
"""Parts, None = all, and what a server of each takes of a node: {"CPU": 4, "GPU": 1, "memory": 2e10, "xpu": 1}."""


@dataclass(frozen=True, order=True)
class Place:
    """Where a server belongs: part 0.., replica 0.."""

    part: int
    replica: int

    def __str__(self) -> str:
        return f"{self.part}.{self.replica}"


@dataclass(frozen=True)
class Spec:
    """name      of the whole, and of its coordinator
    argv      options of expertd serve for every server; {node}, {part} and {replica} stand for its own
    shards    parts of the experts
    replicas  of each part
    needs     the last one that names a part says what its servers need; none: one CPU
    """

    name: str
    argv: tuple[str, ...]
    shards: int = 1
    replicas: int = 1
    needs: tuple[Needs, ...] = ()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", self.name):
            raise PlacementError.about("name", got=repr(self.name), want="letters, digits, '-', '_' and '.'")
        for parts, _ in self.needs:
            wrong = [p for p in parts or () if p >= self.shards]
            if wrong:
                raise PlacementError.about(
                    "resources", got=f"part {wrong[0]}", want=f"parts 0-{self.shards - 1} of {self.shards} shards"
                )

    def places(self) -> tuple[Place, ...]:
        """All of them, part by part."""
        return tuple(Place(part, replica) for part in range(self.shards) for replica in range(self.replicas))

    def needs_of(self, part: int) -> dict[str, float]:
        """What a server of it takes of its node."""
        said = [needs for parts, needs in self.needs if parts is None or part in parts]
        return dict(said[-1]) if said else {"CPU": 1.0}

    def argv_of(self, place: Place, node: str) -> list[str]:
        """Options of its server on the node with that address."""
        host = f"[{node}]" if ":" in node else node
        own = {"{node}": host, "{part}": str(place.part), "{replica}": str(place.replica)}
        given = [_filled(word, own) for word in self.argv]
        out = ["--listen", f"{host}:0", "--shard", f"{place.part}/{self.shards}"]
        needs = self.needs_of(place.part)
        if not needs.keys() - {"CPU", "memory"}:
            out += ["--device", "cpu"]  # on whatever node; threads: what Ray keeps free for it there
            out += ["--threads", str(int(needs["CPU"]))] if needs.get("CPU", 0) >= 1 else []
        return out + given  # the last one of an option counts


def _filled(word: str, own: Mapping[str, str]) -> str:
    for key, value in own.items():
        word = word.replace(key, value)
    return word


def strategy_of(needs: Mapping[str, float], replicas: int, nodes: Sequence[Mapping[str, float]]) -> str:
    """How Ray is to place the replicas of a part, given what each node has in all: apart for ever where there are nodes
    enough that could take one each, else as far apart as it goes."""
    able = sum(all(node.get(name, 0) >= n for name, n in needs.items()) for node in nodes)
    return "STRICT_SPREAD" if able >= replicas else "SPREAD"


def needs_of(texts: Sequence[str]) -> tuple[Needs, ...]:
    """ "GPU=1", "6-7:xpu=1,CPU=4" as --resources has them.  Raises PlacementError."""
    return tuple(_needs(text) for text in texts)


def _needs(text: str) -> Needs:
    parts, colon, rest = text.rpartition(":")
    words = [word.partition("=") for word in rest.split(",")]
    try:
        ids = tuple(parse_ranges(parts)) if colon else None
        needs = {name: float(number) for name, _, number in words}
    except ValueError:
        ids, needs = None, {}
    if not all(needs) or not all(0 < n < float("inf") for n in needs.values()) or not needs:
        raise PlacementError.about(
            "--resources", got=repr(text), want="NAME=NUMBER,... or PARTS:NAME=NUMBER,..., as GPU=1 or 6-7:xpu=1,CPU=4"
        )
    return ids, needs
