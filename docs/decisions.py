"""The index at the top of DECISIONS.md, from its headings."""

from __future__ import annotations

import re

__all__ = ["indexed"]

BEGIN, END = "<!-- index -->\n", "<!-- end of the index -->\n"
HEADING = re.compile(r"## (\d+)\. (.+) \((\d{4}-\d{2}-\d{2})\)")


def indexed(text: str) -> str:
    """The text of DECISIONS.md with its index made anew.  ValueError for a heading of another form, or a number out of
    turn."""
    before, rest = text.split(BEGIN)
    _, body = rest.split(END)
    lines = []
    for number, heading in enumerate((line for line in body.splitlines() if line.startswith("## ")), 1):
        found = HEADING.fullmatch(heading)
        if found is None or int(found[1]) != number:
            raise ValueError(f"DECISIONS.md: {heading!r}: want '## {number}. Title (2026-12-31)'")
        lines.append(f"{number}. [{found[2]}](#{_anchor(heading[3:])}) {found[3]}\n")
    return before + BEGIN + "".join(lines) + END + body


def _anchor(heading: str) -> str:
    """The name under which Markdown pages link to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
