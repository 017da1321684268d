"""Times as a picture (SVG): bars that are cut into stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

__all__ = ["COLOURS", "Bar", "stacked"]

COLOURS = {
    "client_encode": "#4e79a7", "client_decode": "#a0cbe8", "attention": "#f1a340", "split": "#274060",
    "send": "#4e79a7", "decode": "#9c755f", "queue": "#e8c547", "collect": "#499894", "kernel": "#e15759",
    "deliver": "#8cd17d", "encode": "#b07aa1", "wire": "#d3d3d0", "wake": "#8a8a8a", "join": "#a0cbe8",
    "from GPU to GPU": "#e377c2",
}  # fmt: skip
"""Of the stages, the same in every picture; what a client does before and after has the same two blues."""
_LABEL, _BAR, _NUMBERS, _ROW, _THICK, _HEAD = 330, 640, 210, 24, 16, 56
_STYLE = """text{font-family:"DejaVu Sans",Verdana,sans-serif;font-size:12px;fill:#222}
.title{font-size:15px;font-weight:bold}.group{font-weight:bold}.bare{stroke:#000;stroke-width:2}"""


class Bar(NamedTuple):
    """label, numbers: before and behind it; stages: name -> microseconds; mark_us: where a black line stands."""

    label: str
    stages: Mapping[str, float]
    numbers: str
    mark_us: float | None = None


def stacked(title: str, stages: Sequence[str], groups: Mapping[str, Sequence[Bar]], mark: str = "") -> str:
    """Bars of one group (by its heading) share a scale; the groups do not.  stages: names of COLOURS, in the order of
    the legend; mark: what the black lines mean."""
    colours = {name: COLOURS[name] for name in stages}
    if len(groups) > 1:
        title += "; each block has a scale of its own"
    parts, y = _legend(title, colours, mark), _HEAD + _ROW
    for heading, bars in groups.items():
        parts.append(f'<text class="group" x="10" y="{y + 12}">{escape(heading)}</text>')
        y += _ROW
        most_us = max(max(sum(bar.stages.values()), bar.mark_us or 0.0) for bar in bars) or 1.0
        for bar in bars:
            parts += _drawn(bar, colours, _BAR / most_us, y)
            y += _ROW
        y += _ROW // 2
    width = _LABEL + _BAR + _NUMBERS
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y}" viewBox="0 0 {width} {y}">'
    return "\n".join(
        [head, f"<style>{_STYLE}</style>", '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>"]
    )


def _legend(title: str, colours: Mapping[str, str], mark: str) -> list[str]:
    parts = [f'<text class="title" x="10" y="20">{escape(title)}</text>']
    x = 10
    for name, colour in colours.items():
        parts.append(f'<rect x="{x}" y="34" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16}" y="45">{name.replace("_", " ")}</text>')
        x += 34 + 8 * len(name)
    if mark:
        parts.append(f'<path class="bare" d="M{x} 32V48"/><text x="{x + 8}" y="45">{escape(mark)}</text>')
    return parts


def _drawn(bar: Bar, colours: Mapping[str, str], scale: float, y: int) -> list[str]:
    parts = [f'<text x="10" y="{y + 12}">{escape(bar.label)}</text>']
    x = float(_LABEL)
    for name, us in bar.stages.items():
        if us * scale >= 0.1:
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{us * scale:.1f}" height="{_THICK}" fill="{colours[name]}">'
                f"<title>{name.replace('_', ' ')}: {us:,.1f} us</title></rect>"
            )
        x += us * scale
    if bar.mark_us is not None:
        at = _LABEL + bar.mark_us * scale
        parts.append(f'<path class="bare" d="M{at:.1f} {y - 2}V{y + _THICK + 2}"/>')
    parts.append(f'<text x="{_LABEL + _BAR + 10}" y="{y + 12}">{escape(bar.numbers)}</text>')
    return parts
