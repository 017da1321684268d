"""The rows as a picture (SVG): a bar for each, cut into its stages; a black line is where the bare channel ends."""

from __future__ import annotations

from collections.abc import Sequence

from expertctl.bench.path.measurements import STAGES, PathMeasurement
from expertctl.pictures.bars import Bar, stacked

__all__ = ["draw"]


def draw(rows: Sequence[PathMeasurement]) -> str:
    """Bars of one number of tokens share a scale; the groups do not."""
    groups: dict[str, list[Bar]] = {}
    for row in rows:
        heading = f"{row.tokens} x {row.hidden_size} bf16, {row.bytes:,} bytes each way"
        groups.setdefault(heading, []).append(_bar(row))
    return stacked("Where the time of a request goes (medians)", list(STAGES), groups, "the bare channel")


def _bar(row: PathMeasurement) -> Bar:
    label = f"{row.server}, {row.transport}, {row.client}, {row.callers} caller{'s' if row.callers > 1 else ''}"
    return Bar(label, row.stages_us, f"{row.p50_us:,.0f} us, bare {row.bare_us:,.0f}", row.bare_us)
