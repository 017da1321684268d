"""A plan, and what it changes: from nothing, or by few moves from what is there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from expertctl.planner.forecast import Forecast, evenly, forecast
from expertctl.planner.improve import improve
from expertctl.planner.pack import fresh, pack
from expertctl.planner.problem import Held, Problem
from expertd.errors import PlacementError

__all__ = ["PlacementPlan", "plan"]

_WORTH, _FEW = 0.95, 0.25
"""Where moves have no bound: what is there is changed by moves of at most so many of the experts, and a plan from
nothing is taken instead where its time is less than this part of that one's."""


@dataclass(frozen=True)
class PlacementPlan:
    """moves: experts that servers have to load; before, after: what is made of the load; before: None = some experts
    are nowhere."""

    held: Held
    moves: int
    before: Forecast | None
    after: Forecast


def plan(
    problem: Problem,
    current: Held | None = None,
    *,
    max_moves: int | None = None,
    least: int = 1,
    extra: int | None = None,
    groups: int = 0,
) -> PlacementPlan:
    """max_moves: from `current`, None = no bound; least: copies of each expert; extra: copies of a layer beyond those,
    None = as many as there is room for; groups: of experts that stay together in a zone, 0 = none.

    Raises PlacementError where there is no such plan."""
    start = problem.nothing() if current is None else current
    found = [_from_nothing(problem, least, extra, groups)] if max_moves is None or groups else []
    if start.any() and not groups:
        found.insert(0, _from_there(problem, start, max_moves, least, extra))
    times = [float(forecast(problem, held).step_s.sum()) for held in found]
    held = found[-1] if times[-1] <= _WORTH * times[0] else found[0]
    moves = int((held & ~start).sum())
    if max_moves is not None and moves > max_moves:
        raise PlacementError.about("groups", got=f"{moves} moves", want=f"at most {max_moves}")
    whole = bool((start.any(axis=1) | ~problem.exists).all())
    return PlacementPlan(held, moves, forecast(problem, start) if whole else None, forecast(problem, held))


def _from_nothing(problem: Problem, least: int, extra: int | None, groups: int) -> Held:
    held = fresh(problem, least, extra, groups)
    if not problem.equal and not groups:
        improve(problem, held, least=least, extra=extra)
    return held


def _from_there(problem: Problem, start: Held, max_moves: int | None, least: int, extra: int | None) -> Held:
    """What is missing is placed first: where a server goes, and where copies are too few."""
    held = start & problem.exists[:, None, :] & (problem.slots > 0)[:, :, None]
    few = np.where(problem.exists, np.maximum(0, least - held.sum(axis=1)), 0)
    needed = int(few.sum())
    if max_moves is not None and needed > max_moves:
        raise PlacementError.about(
            "moves", got=f"{needed} that are needed", want=f"at most {max_moves}", remedy="allow more (--max-moves)"
        )
    if needed:
        _make_room(problem, held, few.sum(axis=1), least)
        room = np.maximum(0, problem.slots - held.sum(axis=2))
        pack(problem, held, few, np.arange(len(problem.places)), room, evenly(problem, held))
        short = np.argwhere(problem.exists & (held.sum(axis=1) < least))
        if len(short):
            layer, expert = short[0].tolist()
            raise PlacementError.about(
                f"layer {problem.layers[layer]}, expert {expert}",
                got=f"{int(held[layer, :, expert].sum())} copies",
                want=least,
                remedy="more servers, or more memory for them",
            )
    most = int(_FEW * problem.exists.sum()) if max_moves is None else max_moves - needed
    improve(problem, held, most, least, extra)
    return held


def _make_room(
    problem: Problem, held: Held, wanted: np.ndarray[tuple[int, ...], np.dtype[np.int64]], least: int
) -> None:
    """Lets replicas go, those with the least to do first, until a layer has room for `wanted` [L] more."""
    for n in np.flatnonzero((problem.slots - held.sum(axis=2)).clip(0).sum(axis=1) < wanted):
        while int((problem.slots[n] - held[n].sum(axis=1)).clip(0).sum()) < wanted[n]:
            count = held[n].sum(axis=0)
            each = np.where(count > least, problem.load[n] / np.maximum(count, 1), np.inf)
            expert = int(each.argmin())
            if not np.isfinite(each[expert]):
                return
            replicas = np.flatnonzero(held[n, :, expert])
            full = replicas[np.argmax(evenly(problem, held)[n, replicas])]
            held[n, full, expert] = False
