"""What every trace must be: a document that viewers read, with events that lie inside each other or apart."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections import defaultdict

from expertctl.pictures.trace import by_layer, draw
from expertd_client.tracing.chrome import as_json
from expertd_client.tracing.stages import STAGES, stages_of


def checked(trace):
    """Its events, by (process, track), by the names of both; in nanoseconds since the trace began."""
    document = json.loads(as_json(trace))
    names = {}
    for e in document["traceEvents"]:
        if e["ph"] == "M":
            names[e["name"], e["pid"], e["tid"]] = e["args"]["name"]
    tracks = defaultdict(list)
    for e in document["traceEvents"]:
        assert e["ph"] in "MX"
        if e["ph"] == "X":
            begin_ns, end_ns = round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000)
            assert 0 <= begin_ns <= end_ns
            key = names["process_name", e["pid"], 0], names["thread_name", e["pid"], e["tid"]]
            tracks[key].append((begin_ns, end_ns, e["name"], e.get("args", {})))
    for events in tracks.values():
        _nested(events)
    for call in trace.finished:
        stages = stages_of(call)
        assert set(stages) <= set(STAGES)
        assert min(stages.values()) >= 0
        assert sum(stages.values()) == call.end_ns - call.begin_ns
    bars = ET.fromstring(draw(trace)).findall(".//{*}text[@class]")
    assert len(bars) == 1 + bool(by_layer(trace))
    return document, dict(tracks)


def _nested(events):
    """Viewers draw what begins inside of another event as part of it: it must end there, too."""
    open_ns = []
    for begin_ns, end_ns, name, _ in sorted(events, key=lambda e: (e[0], -e[1])):
        while open_ns and open_ns[-1] <= begin_ns:
            open_ns.pop()
        assert not open_ns or end_ns <= open_ns[-1], f"{name} crosses the end of what it lies in"
        open_ns.append(end_ns)
