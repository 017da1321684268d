"""The picture of `expertctl plan`: nothing that it says is cut off."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from expertd_client.planner.picture import Bar, svg

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
