"""A plan for people: what each server has to do before and after, as bars in a terminal or as SVG."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
import rich.bar
from rich.console import RenderableType
from rich.table import Table

from expertctl.planner.expected import Expected
from expertctl.planner.plan import PlacementPlan
from expertctl.planner.problem import Held, Problem

__all__ = ["Bar", "bars", "sentence", "svg", "table", "times"]

_WIDTH = 18
_NUMBERS = 52
"""Columns of all but the names, with bars of ten."""
_MOST_ROWS = 40
_BEFORE, _AFTER = "#9ab4cc", "#2f7d4f"
_MEAN = 'stroke="#a33" stroke-dasharray="3 3"'


@dataclass(frozen=True, slots=True)
class Bar:
    """One server: seconds of work for the load, and experts held, before (None: not known) and after."""

    server: str
    before_s: float | None
    after_s: float
    held_before: int
    held_after: int


def bars(problem: Problem, current: Held | None, found: PlacementPlan) -> list[Bar]:
    """Of every server."""
    before = None if found.before is None else found.before.busy_s
    held = problem.nothing() if current is None else current
    count = [h.sum(axis=(0, 2)) for h in (held, found.held)]
    return [
        Bar(p.address, None if before is None else float(before[s]), float(busy), int(count[0][s]), int(count[1][s]))
        for s, (p, busy) in enumerate(zip(problem.places, found.after.busy_s, strict=True))
    ]


def sentence(found: PlacementPlan) -> str:
    """What the plan is good for."""
    after = f"{found.after.balance:.0%} of the servers' time used"
    text = f"{found.moves:,} moves, {found.after.copies:,} copies of experts in all; {after}"
    if found.before is None:
        return text
    times = found.after.rate / max(found.before.rate, 1e-300)
    return f"{text} ({found.before.balance:.0%} before), {times:.2f} times as many routes a second"


def table(rows: Sequence[Bar], width: int) -> Table:
    """The busiest servers, where there are many.  width: columns that there are for it."""
    longest = max((max(r.before_s or 0.0, r.after_s) for r in rows), default=0.0) or 1.0
    out = Table(
        title="time of each server for the load; 100% is the longest",
        title_justify="left",
        show_edge=False,
        pad_edge=False,
    )
    out.add_column("server", no_wrap=True)
    out.add_column("experts", justify="right", no_wrap=True)
    for name in ("before", "after"):
        out.add_column(name, justify="right", no_wrap=True)
        out.add_column("", max_width=_WIDTH)
    shown = sorted(rows, key=lambda r: -max(r.before_s or 0.0, r.after_s))[:_MOST_ROWS]
    for r in [r for r in rows if r in shown]:
        experts = f"{r.held_before} -> {r.held_after}" if r.held_before != r.held_after else str(r.held_after)
        cells: list[RenderableType] = []
        for busy_s, colour in ((r.before_s, _BEFORE), (r.after_s, _AFTER)):
            part = 0.0 if busy_s is None else busy_s / longest
            cells += ["-" if busy_s is None else f"{part:.0%}", rich.bar.Bar(1.0, 0.0, part, color=colour)]
        out.add_row(_broken(r.server, max(16, width - _NUMBERS)), experts, *cells)
    if len(shown) < len(rows):
        out.caption = f"{len(rows) - len(shown)} servers that do less are left out"
    return out


def times(before: Sequence[Expected], after: Sequence[Expected]) -> Table:
    """What a layer takes, before (empty: not known) and after."""
    out = Table(title="expected time of a layer", title_justify="left", show_edge=False, pad_edge=False)
    for name in ("callers", "before", "after", "tokens/s"):
        out.add_column(name, justify="right", no_wrap=True)
    known = {e.callers: f"{e.layer_us:,.0f} us" for e in before}
    for e in after:
        out.add_row(str(e.callers), known.get(e.callers, "-"), f"{e.layer_us:,.0f} us", f"{e.tokens_per_s:,.0f}")
    out.caption = "callers: with one token each, in one batch"
    return out


def _broken(address: str, width: int) -> str:
    """Between the parts of its name, where it is longer than that; a part that is longer itself anywhere."""
    lines = [""]
    whole = re.split(r"(?<=[.:])", address)
    for part in (w[n : n + width] for w in whole for n in range(0, len(w), width)):
        if lines[-1] and len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def svg(rows: Sequence[Bar], title: str) -> str:
    """Two bars for each server; a line at the mean after; as wide as names of servers and the title ask."""
    longest = max((max(r.before_s or 0.0, r.after_s) for r in rows), default=0.0) or 1.0
    left = max(180, 7 * max((len(r.server) for r in rows), default=0) + 20)
    width, high, top = 520, 30, 58
    mean = float(np.mean([r.after_s for r in rows])) if rows else 0.0
    height, across = top + high * len(rows) + 16, max(left + width + 80, 8 * len(title) + 24)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{across}" height="{height}" font-family="Verdana,sans-serif"'
        ' font-size="11" fill="#222">',
        f'<rect width="100%" height="100%" fill="#fff"/><text x="12" y="22" font-size="13">{escape(title)}</text>',
        f'<rect x="{left}" y="34" width="10" height="10" fill="{_BEFORE}"/><text x="{left + 14}" y="43">before</text>',
        f'<rect x="{left + 70}" y="34" width="10" height="10" fill="{_AFTER}"/>'
        f'<text x="{left + 84}" y="43">after</text>',
        f'<path d="M{left + 130} 32V46" {_MEAN}/><text x="{left + 138}" y="43">mean after</text>',
        f'<text x="{left + 220}" y="43">time for the load; 100% is the longest</text>',
    ]
    for n, r in enumerate(rows):
        y = top + n * high
        out.append(f'<text x="{left - 8}" y="{y + 16}" text-anchor="end">{escape(r.server)}</text>')
        for k, (busy_s, colour) in enumerate(((r.before_s, _BEFORE), (r.after_s, _AFTER))):
            if busy_s is not None:
                part = busy_s / longest
                out.append(
                    f'<rect x="{left}" y="{y + 2 + 11 * k}" width="{max(1.0, part * width):.1f}" height="10"'
                    f' fill="{colour}"/><text x="{left + part * width + 5:.1f}" y="{y + 11 + 11 * k}"'
                    f' font-size="9">{part:.0%}</text>'
                )
    x = left + mean / longest * width
    line = f'<line x1="{x:.1f}" y1="{top - 4}" x2="{x:.1f}" y2="{height - 10}"'
    out.append(f"{line} {_MEAN}/>")
    return "\n".join([*out, "</svg>"]) + "\n"
