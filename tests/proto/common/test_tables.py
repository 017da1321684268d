"""What others say stands in tables, and a terminal obeys none of it."""

from __future__ import annotations

import io

import pytest
from rich.table import Table
from rich.text import Text

from expertd.common.tables import VerdictRow, console, print_sentence, print_table, print_verdicts

EVIL = "a\x1b[2J\x1b]0;title\x07\x9b31m\x00\u202e\u2028b"
FORBIDDEN = ("\x1b[2J", "\x1b]", "\x07", "\x9b", "\x00", "\u202e", "\u2028")


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("how", ["text", "str", "cell", "header", "sentence", "verdict"])
def test_no_text_is_obeyed_by_a_terminal(monkeypatch, terminal, how):
    paper = io.StringIO()
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1" if terminal else "")
    out = console()
    out.file = paper
    table = Table()
    table.add_column(EVIL if how == "header" else "name")
    table.add_row(Text(EVIL, "bold") if how == "cell" else "x")
    if how in ("text", "str"):
        out.print(Text(EVIL, "bold red") if how == "text" else EVIL)
    elif how == "sentence":
        print_sentence(out, EVIL)
    elif how == "verdict":
        print_verdicts(out, [VerdictRow(Text(EVIL), Text(EVIL))], [])
    else:
        print_table(out, table)
    said = paper.getvalue()
    assert "\\x1b[2J" in said
    assert [piece for piece in FORBIDDEN if piece in said] == []


def test_lines_and_letters_stay_what_they_are(capsys):
    console().print("one\ntwo \u00e4 \u2713 \u754c")
    assert capsys.readouterr().out == "one\ntwo \u00e4 \u2713 \u754c\n"
