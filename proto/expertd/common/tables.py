"""Tables that stay whole where a terminal is narrow, and times in few characters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from expertd.errors import printable

__all__ = ["VerdictRow", "console", "duration", "print_sentence", "print_table", "print_verdicts"]

_NO_LIMIT = 10_000
_READABLE = 36
"""Columns that sentences of a table want beside its numbers."""


class VerdictRow(NamedTuple):
    """A line of print_verdicts().  cells: numbers, none or as many as there are columns for them."""

    name: Text
    text: Text
    cells: Sequence[str] = ()


def console(columns: int = 120) -> Console:
    """Standard output: as wide as a terminal; so many columns in a file, so that no report is cut there.  Nothing in
    brackets or between colons has a meaning: [fd00::12:34]:50051 is an address."""
    plain = _Console(highlight=False, markup=False, emoji=False)
    return plain if plain.is_terminal else _Console(highlight=False, markup=False, emoji=False, width=columns)


class _Console(Console):
    """Escapes what a terminal would obey: texts of servers and files stand in tables.  rich lets escape sequences of a
    text through."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text.replace("\n", "").isprintable():
                yield segment
            else:
                yield Segment(_shown(segment.text), segment.style)


def _shown(text: str) -> str:
    return "\n".join(printable(line, len(line)) for line in text.split("\n"))


def print_table(out: Console, table: Table) -> None:
    """As it is where its lines fit; else turned: a line for each column, and as many rows beside one another as fit.
    Its title is a sentence before it: the table's width is none of its."""
    title, table.title = table.title, None
    if title:
        print_sentence(out, str(title), "italic")
    try:
        _print_whole(out, table)
    finally:
        table.title = title


def _print_whole(out: Console, table: Table) -> None:
    if _width(out, table) <= out.width:
        out.print(table)
        return
    names = [str(column.header) for column in table.columns]
    columns = [list(column.cells) for column in table.columns]
    rows = list(zip(*columns, strict=True))
    while rows:
        count = next((n for n in range(len(rows), 1, -1) if _width(out, _turned(names, rows[:n])) <= out.width), 1)
        out.print(_turned(names, rows[:count]))
        rows = rows[count:]


def print_verdicts(out: Console, rows: Sequence[VerdictRow], columns: Sequence[str]) -> None:
    """Names, sentences and numbers; where that is too much for a line, sentences without numbers in a table of their
    own.  columns: names of the cells."""
    lines = [VerdictRow(r.name, r.text, r.cells or [""] * len(columns)) for r in rows]
    spoken = _verdicts([VerdictRow(r.name, Text(), r.cells) for r in lines], columns)
    if not columns or _width(out, spoken) + _READABLE <= out.width:
        out.print(_verdicts(lines, columns))
        return
    if counted := [r for r in rows if any(r.cells)]:
        print_table(out, _verdicts(counted, columns))
    if said := [VerdictRow(r.name, r.text) for r in rows if not any(r.cells)]:
        out.print(_verdicts(said, ()))


def _verdicts(rows: Sequence[VerdictRow], columns: Sequence[str]) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("backend", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for r in rows:
        table.add_row(r.name, r.text, *r.cells)
    return table


def print_sentence(out: Console, text: str, style: str = "") -> None:
    """Broken between words on a terminal; one line, however long, in a file."""
    out.print(text, style=style, markup=False, highlight=False, soft_wrap=not out.is_terminal)


def _turned(names: list[str], rows: list[tuple[object, ...]]) -> Table:
    turned = Table(show_edge=False, pad_edge=False, show_header=False)
    turned.add_column(style="bold", no_wrap=True)
    for _ in rows:
        turned.add_column(justify="right", overflow="fold")
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
