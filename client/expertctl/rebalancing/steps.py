"""From what is held to what is to be held, so that every expert always has a replica.

For a few layers at a time: those that are to hold more get it first, on top of what they have (`add`); when clients
know of it, what is not to be held any more is let go of (`drop`).

    a: 0-3  b: 4-7   ->   a: 0-1,4  b: 2-3,5-7
    add    a: 0-4    b: 2-7
    drop   a: 0-1,4  b: 2-3,5-7
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from expertd.placement import Placement, Server

# Why it is so: decision 117 in DECISIONS.md.
__all__ = ["Holdings", "Step", "changed", "holdings", "kept", "loads", "step_of"]

Holdings = Mapping[str, Mapping[int, tuple[int, ...]]]
"""Address -> layer -> ids of the experts to be held, () = none."""


@dataclass(frozen=True)
class Step:
    """layers: those that change; add, drop: what each server that changes is to hold of them; moves: experts loaded."""

    layers: tuple[int, ...]
    add: Holdings
    drop: Holdings
    moves: int


def holdings(placement: Placement) -> dict[str, dict[int, tuple[int, ...]]]:
    """Of each server."""
    return {s.address: dict(s.layers) for s in placement.servers}


def changed(now: Placement, then: Placement) -> list[int]:
    """Layers that differ.  Servers that `then` does not name stay as they are, and so do layers that it has not."""
    before = holdings(now)
    return [
        n
        for n in sorted(then.num_experts)
        if any(before.get(s.address, {}).get(n, ()) != s.layers.get(n, ()) for s in then.servers)
    ]


def step_of(now: Placement, then: Placement, layers: Sequence[int]) -> Step:
    """From `now` to `then` in these layers."""
    before = holdings(now)
    add: dict[str, dict[int, tuple[int, ...]]] = {}
    drop: dict[str, dict[int, tuple[int, ...]]] = {}
    moves = 0
    for server in then.servers:
        for n in layers:
            old, new = set(before.get(server.address, {}).get(n, ())), set(server.layers.get(n, ()))
            both = old | new
            if both != old:
                add.setdefault(server.address, {})[n] = tuple(sorted(both))
            if both != new:
                drop.setdefault(server.address, {})[n] = tuple(sorted(new))
            moves += len(new - old)
    return Step(tuple(layers), add, drop, moves)


def kept(now: Placement, then: Placement) -> Placement:
    """`then`, but what nobody of its servers would hold any more stays where it is now."""
    after: dict[int, set[int]] = {}
    for server in then.servers:
        for n, experts in server.layers.items():
            after.setdefault(n, set()).update(experts)
    before, servers = holdings(now), []
    for server in then.servers:
        layers = {n: set(e) for n, e in server.layers.items()}
        for n, experts in before.get(server.address, {}).items():
            layers.setdefault(n, set()).update(set(experts) - after.get(n, set()))
        servers.append(Server(server.address, {n: tuple(sorted(e)) for n, e in sorted(layers.items()) if e}))
    return Placement(tuple(servers), then.num_experts, then.epoch, then.fingerprint)


def loads(step: Step) -> int:
    """Layers that servers pack for it."""
    return sum(bool(e) for part in (step.add, step.drop) for wanted in part.values() for e in wanted.values())
