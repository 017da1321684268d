"""A plan from nothing, for all layers at once.

    copies    an expert with w routes and n copies has w / n for each; the next copy goes to the largest of these
    pack      copies from the heaviest on, each to the server that would be done soonest with it and has room; not where
              the expert is already, and to another zone or host than its other copies where there is one
    groups    where routing is limited to groups of experts: whole groups to zones first, then each zone by itself

For equal servers that is the algorithm of DeepSeek's expert-parallel load balancer, and gives what it gives.

    load 90 60 30, room for 4        ->  copies 2 1 1, so 60 45 45 30
    two equal servers of 2 experts   ->  a: 60 + 30    b: 45, and the other 45 nowhere: a is full, b has it already
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from expertctl.planner.problem import Held, Problem
from expertd.errors import PlacementError

__all__ = ["copies", "fresh", "pack"]

_LEAST = 1e-9
"""Of the mean load: what an expert without load counts, so that copies are spread."""


def fresh(problem: Problem, least: int = 1, extra: int | None = None, groups: int = 0) -> Held:
    """A plan with at least so many copies of each expert, and `extra` more copies in each layer; None: as many as there
    is room for.  groups: of experts that stay together in a zone, 0 = none.  Raises PlacementError."""
    held = problem.nothing()
    if not groups:
        _fill(problem, held, problem.exists, np.arange(len(problem.places)), least, extra)
        return held
    zones = [np.flatnonzero(problem.zone_of == z) for z in range(int(problem.zone_of.max()) + 1)]
    for mine, members in zip(_zones(problem, groups, zones), zones, strict=True):
        _fill(problem, held, mine, members, least, None if extra is None else -(-extra // len(zones)))
    return held


def copies(
    load: NDArray[np.float64], exists: NDArray[np.bool_], most: NDArray[np.int64], least: int, servers: int
) -> NDArray[np.int64]:
    """[L, E]: copies of each expert, at least `least` and at most `servers`; most: [L], of a layer in all."""
    count = np.where(exists, min(least, servers), 0)
    rows = np.arange(len(load))
    for _ in range(int((most - count.sum(axis=1)).max(initial=0))):
        each = np.where(exists & (count < servers), load / np.maximum(count, 1), -1.0)
        hottest = each.argmax(axis=1)
        count[rows, hottest] += (count.sum(axis=1) < most) & (each[rows, hottest] >= 0)
    return count


def pack(
    problem: Problem,
    held: Held,
    count: NDArray[np.int64],
    members: NDArray[np.int64],
    room: NDArray[np.int64],
    busy: NDArray[np.float64],
    of: NDArray[np.int64] | None = None,
) -> None:
    """Puts `count` [L, E] more copies of each expert into `held`, at the servers `members` [n].

    room, busy   [L, n]: experts that each of them can still take, seconds of work that it has.  Both are changed
    of           [L, E]: copies that an expert has in the end; None = count
    """
    weights, experts, total = _items(problem, count, count if of is None else of)
    speed, host, zone = problem.speed[members], problem.host_of[members], problem.zone_of[members]
    hosts, zones = _used(problem, held, problem.host_of), _used(problem, held, problem.zone_of)
    rows = np.arange(len(held))
    far = 4.0 * (busy.max(initial=0.0) + float(problem.load.sum(axis=1).max(initial=0.0)) / float(speed.min()) + 1.0)
    for n in range(total):
        expert, weight = experts[:, n], weights[:, n]
        done_s = busy + weight[:, None] / speed
        near = hosts[rows, expert][:, host].astype(np.float64) + zones[rows, expert][:, zone]
        free = (room > 0) & ~held[rows[:, None], members, expert[:, None]]
        cost = np.where(free, done_s + far * near, np.inf)
        best = cost.argmin(axis=1)
        ok = rows[np.isfinite(cost[rows, best]) & (weight >= 0)]
        b, e = best[ok], expert[ok]
        held[ok, members[b], e] = True
        room[ok, b] -= 1
        busy[ok, b] = done_s[ok, b]
        hosts[ok, e, host[b]] = zones[ok, e, zone[b]] = True


def _items(
    problem: Problem, count: NDArray[np.int64], of: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.int64], int]:
    """(routes [L, n], expert [L, n], n) of each copy, the heaviest first; where a layer has fewer: -1 routes, last."""
    layers, most = len(count), int(count.sum(axis=1).max(initial=0))
    weights, experts = np.full((layers, most), -1.0), np.zeros((layers, most), np.int64)
    for i in range(layers):
        ids = np.repeat(np.arange(count.shape[1]), count[i])
        each = problem.load[i][ids] / of[i][ids]
        by_weight = np.argsort(-each, kind="stable")
        weights[i, : len(ids)], experts[i, : len(ids)] = each[by_weight], ids[by_weight]
    return weights, experts, most


def _used(problem: Problem, held: Held, label: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[L, E, labels]: whether a server with that label holds the expert."""
    used = np.zeros((len(held), held.shape[2], int(label.max(initial=0)) + 1), np.bool_)
    for s in np.flatnonzero(held.any(axis=(0, 2))):
        used[:, :, label[s]] |= held[:, s]
    return used


def _fill(
    problem: Problem,
    held: Held,
    exists: NDArray[np.bool_],
    members: NDArray[np.int64],
    least: int,
    extra: int | None,
) -> None:
    room = problem.slots[:, members].copy()
    experts, slots = exists.sum(axis=1), room.sum(axis=1)
    wanted = slots if extra is None else np.minimum(slots, least * experts + extra)
    if (least * experts > slots).any() or least > len(members):
        layer = int(np.argmax(least * experts - slots))
        raise PlacementError.about(
            f"layer {problem.layers[layer]}",
            got=f"room for {int(slots[layer])} experts at {len(members)} servers",
            want=f"room for {least} copies of {int(experts[layer])} experts, each at another server",
        )
    floor = _LEAST * problem.load.mean(axis=1, keepdims=True) + 1e-300
    count = copies(np.maximum(problem.load, floor), exists, wanted, least, len(members))
    busy = np.zeros(room.shape)
    if least == 1:
        pack(problem, held, count, members, room, busy)
        return
    needed = np.minimum(count, least)  # first, so that what may be there takes no place of what must
    pack(problem, held, needed, members, room, busy, count)
    _exchange(held, exists, members, room, least)
    pack(problem, held, count - needed, members, room, busy, count)


def _exchange(
    held: Held, exists: NDArray[np.bool_], members: NDArray[np.int64], room: NDArray[np.int64], least: int
) -> None:
    """Where room is left only at servers that have an expert which lacks a copy: one that has not gets it, and gives
    another one there."""
    for n, e in np.argwhere(exists & (held[:, members].sum(axis=1) < least)):
        mine = held[n, members]
        for s, t in itertools.product(np.flatnonzero(room[n] > 0), np.flatnonzero(~mine[:, e])):
            gives = np.flatnonzero(mine[t] & ~mine[s])
            if len(gives):
                held[n, members[s], gives[0]], held[n, members[t], gives[0]] = True, False
                held[n, members[t], e] = True
                room[n, s] -= 1
                break
        else:
            raise PlacementError.about(
                f"expert {e}", got=f"no server for copy {least}", want="one", remedy="more servers, or more memory"
            )


def _zones(problem: Problem, groups: int, zones: list[NDArray[np.int64]]) -> list[NDArray[np.bool_]]:
    """For each zone: [L, E], which experts belong there.  As many groups for each zone, the heaviest group first, to
    the zone that would be done soonest with it."""
    experts = problem.load.shape[1]
    if groups % len(zones) or any(n % groups for n in problem.num_experts):
        raise PlacementError.about(
            "groups",
            got=f"{groups} of {', '.join(map(str, sorted(set(problem.num_experts))))} experts, for {len(zones)} zones",
            want="a number that divides the experts, and that the zones divide",
        )
    size = np.array(problem.num_experts)[:, None] // groups
    group_of = np.minimum(np.arange(experts) // size, groups - 1)  # [L, E]
    rows = np.arange(len(problem.layers))
    load = np.zeros((len(rows), groups))
    np.add.at(load, (rows[:, None], group_of), problem.load)
    speed = np.array([problem.speed[members].sum() for members in zones])
    busy, room = np.zeros((len(rows), len(zones))), np.full((len(rows), len(zones)), groups // len(zones))
    zone_of = np.zeros((len(rows), groups), np.int64)
    for group in np.argsort(-load, axis=1, kind="stable").T:
        done_s = np.where(room > 0, busy + load[rows, group][:, None] / speed, np.inf)
        best = done_s.argmin(axis=1)
        zone_of[rows, group] = best
        busy[rows, best] = done_s[rows, best]
        room[rows, best] -= 1
    of_expert = np.take_along_axis(zone_of, group_of, axis=1)
    return [(of_expert == z) & problem.exists for z in range(len(zones))]
