"""Tables that stay whole where a terminal is narrow, and times in few characters."""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

__all__ = ["duration", "print_table"]

_NO_LIMIT = 10_000


def print_table(out: Console, table: Table) -> None:
    """As it is where its lines fit; else turned: a line for each column, and as many rows beside one another as fit."""
    if _width(out, table) <= out.width:
        out.print(table)
        return
    names = [str(column.header) for column in table.columns]
    columns = [list(column.cells) for column in table.columns]
    rows = list(zip(*columns, strict=True))
    out.print(Text(str(table.title or ""), "italic"))
    while rows:
        count = next((n for n in range(len(rows), 1, -1) if _width(out, _turned(names, rows[:n])) <= out.width), 1)
        out.print(_turned(names, rows[:count]))
        rows = rows[count:]


def _turned(names: list[str], rows: list[tuple[object, ...]]) -> Table:
    turned = Table(show_edge=False, pad_edge=False, show_header=False)
    turned.add_column(style="bold", no_wrap=True)
    for _ in rows:
        turned.add_column(justify="right")
    for name, cells in zip(names, zip(*rows, strict=True), strict=True):
        turned.add_row(name, *(str(cell) for cell in cells))
    return turned


def _width(out: Console, table: Table) -> int:
    """Of its lines, where nothing is wrapped."""
    return Measurement.get(out, out.options.update(max_width=_NO_LIMIT), table).maximum


def duration(seconds: float) -> str:
    """For people, in at most seven characters below three hours: "412 us", "3.21 ms", "44.2 ms", "1.04 s"."""
    if seconds < 999.5e-6:
        return f"{seconds * 1e6:.0f} us"
    value, unit = (seconds * 1e3, "ms") if seconds < 0.9995 else (seconds, "s")
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {unit}"
