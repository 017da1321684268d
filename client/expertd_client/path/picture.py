"""The rows as a picture (SVG): a bar for each, cut into its stages; a black line is where the bare channel ends."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from expertd_client.path.rows import STAGES, Row

__all__ = ["draw"]

_COLOURS = ("#4e79a7", "#d3d3d0", "#9c755f", "#e8c547", "#76b7b2", "#e15759", "#59a14f", "#b07aa1", "#86bcb6")
_LABEL, _BAR, _NUMBERS, _ROW, _THICK, _HEAD = 330, 640, 210, 24, 16, 56
_STYLE = """text{font-family:"DejaVu Sans",Verdana,sans-serif;font-size:12px;fill:#222}
.title{font-size:15px;font-weight:bold}.group{font-weight:bold}.bare{stroke:#000;stroke-width:2}"""


def draw(rows: Sequence[Row]) -> str:
    """Bars of one number of tokens share a scale; the groups do not."""
    groups: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.tokens, row.hidden_size), []).append(row)
    parts, y = _legend(), _HEAD + _ROW
    for (tokens, hidden_size), members in groups.items():
        title = f"{tokens} x {hidden_size} bf16, {members[0].bytes:,} bytes each way"
        parts.append(f'<text class="group" x="10" y="{y + 12}">{title}</text>')
        y += _ROW
        most_us = max(max(r.p50_us, r.bare_us) for r in members)
        for row in members:
            parts += _bar(row, _BAR / most_us, y)
            y += _ROW
        y += _ROW // 2
    width = _LABEL + _BAR + _NUMBERS
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y}" viewBox="0 0 {width} {y}">'
    return "\n".join(
        [head, f"<style>{_STYLE}</style>", '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>"]
    )


def _legend() -> list[str]:
    parts = ['<text class="title" x="10" y="20">Where the time of a request goes (medians)</text>']
    x = 10
    for name, colour in zip(STAGES, _COLOURS, strict=True):
        parts.append(f'<rect x="{x}" y="34" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16}" y="45">{name.replace("_", " ")}</text>')
        x += 34 + 8 * len(name)
    parts.append(f'<path class="bare" d="M{x} 32V48"/><text x="{x + 8}" y="45">the bare channel</text>')
    return parts


def _bar(row: Row, scale: float, y: int) -> list[str]:
    label = f"{row.server}, {row.transport}, {row.client}, {row.callers} caller{'s' if row.callers > 1 else ''}"
    parts = [f'<text x="10" y="{y + 12}">{escape(label)}</text>']
    x = float(_LABEL)
    for (name, us), colour in zip(row.stages_us.items(), _COLOURS, strict=True):
        if us * scale >= 0.1:
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{us * scale:.1f}" height="{_THICK}" fill="{colour}">'
                f"<title>{name.replace('_', ' ')}: {us:,.1f} us</title></rect>"
            )
        x += us * scale
    bare = _LABEL + row.bare_us * scale
    parts.append(f'<path class="bare" d="M{bare:.1f} {y - 2}V{y + _THICK + 2}"/>')
    numbers = f"{row.p50_us:,.0f} us, bare {row.bare_us:,.0f}"
    parts.append(f'<text x="{_LABEL + _BAR + 10}" y="{y + 12}">{numbers}</text>')
    return parts
