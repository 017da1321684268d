"""Columns of a table, defined once: for the table itself and for what --help says of it."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

__all__ = ["Column", "IndentedFormatter", "explained", "table_of"]


@dataclass(frozen=True, slots=True)
class Column:
    """name: its head; text: what it means; key: in --json, "" = as the name; values: what each word in it means, None =
    it has numbers."""

    name: str
    text: str
    key: str = ""
    values: Mapping[str, str] | None = None

    def lines(self) -> list[str]:
        """For --help."""
        key = f" ({self.key})" if self.key and self.key != self.name else ""
        values = (f"    {word}: {text}" for word, text in (self.values or {}).items())
        return [f"  {self.name}{key}: {self.text}", *values]


def explained(columns: Sequence[Column], *more: str) -> str:
    """For --help: a line for each column and word, and `more` as lines after them.  It wants IndentedFormatter."""
    head = "Columns (their keys in --json, where these differ):"
    return "\n".join([head, *(line for column in columns for line in column.lines()), *more])


class IndentedFormatter(argparse.HelpFormatter):
    """Keeps the lines of texts, and their indentation where they are broken."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(self._filled(line, width, indent) for line in text.splitlines())

    @staticmethod
    def _filled(line: str, width: int, indent: str) -> str:
        words = line.lstrip()
        first = indent + " " * (len(line) - len(words))
        return textwrap.fill(" ".join(words.split()), width, initial_indent=first, subsequent_indent=f"{first}    ")


def table_of(columns: Sequence[Column], title: str) -> Table:
    """Without rows yet; columns of words to the left, numbers to the right."""
    table = Table(title=title, title_justify="left", show_edge=False)
    for column in columns:
        table.add_column(column.name, justify="right" if column.values is None else "left")
    return table
