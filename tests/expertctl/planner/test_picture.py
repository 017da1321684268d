"""The picture of `expertctl plan`: nothing that it says is cut off."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from rich.console import Console

from expertctl.planner.picture import Bar, svg, table

LONG = "experts-0.experts.models.svc.cluster.local:50051"
TITLE = "3 moves, 24 copies of experts in all; 100% of the servers' time used (86% before), 1.10 times as many routes"


def test_names_and_title_have_room():
    """A glyph of Verdana at 11 px is some 6.5 px wide on average, at 13 px some 7.5."""
    drawn = ET.fromstring(svg([Bar(LONG, 1.0, 0.9, 16, 13), Bar("b", None, 0.9, 8, 11)], TITLE))
    texts = {t.text: t for t in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert float(texts[LONG].attrib["x"]) >= 6.5 * len(LONG), "it ends there"
    assert float(drawn.attrib["width"]) >= 12 + 7.5 * len(TITLE)
    assert "time for the load; 100% is the longest" in texts
    assert "mean after" in texts
    assert [t for t in texts if t.endswith("%")] == ["100%", "90%"]


def test_names_are_broken_between_their_parts(capsys):
    rows = [Bar(LONG, 1.0, 0.9, 16, 13), Bar("10.0.0.1:50051", None, 0.9, 8, 11)]
    out = Console(width=80, highlight=False)
    out.print(table(rows, out.width))
    lines = capsys.readouterr().out.splitlines()
    names = [line.partition("│")[0].strip() for line in lines[3:]]
    assert names == ["experts-0.experts.models.", "svc.cluster.local:50051", "10.0.0.1:50051"]
    assert all(len(line) <= 80 and "…" not in line for line in lines)
    assert "16 -> 13" in lines[3]
    assert "100%" in lines[3]
    assert "█" in lines[3]
    out.print(table([Bar("z" * 100, 1.0, 0.9, 16, 13)], out.width))
    text = capsys.readouterr().out
    assert text.count("z") == 100
    assert "…" not in text
    wide = Console(width=120)
    wide.print(table(rows, wide.width))
    assert LONG in capsys.readouterr().out
