"""A trace in the JSON that chrome://tracing and ui.perfetto.dev read (the Trace Event Format: complete events "X",
microseconds).

One process stands for the caller, with a track for each thread and for each GPU whose tensors went to another one, and
one process for each server, with a track for each request that it had at once.  Events of one track lie one after
another or inside each other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

from expertd_client.tracing.records import Module, Recording, SubRequestTrace, TracedCall
from expertd_client.tracing.stages import Span, own_clock, placed

__all__ = ["as_json", "attention", "clocks", "events"]


def as_json(trace: Recording) -> str:
    """The document."""
    calls = trace.finished
    facts = {
        "calls": len(calls),
        "unfinished": len(trace.calls) - len(calls),
        "clocks": clocks(trace),
    }
    document = {"displayTimeUnit": "ns", "otherData": facts, "traceEvents": events(trace)}
    return json.dumps(document, separators=(",", ":"))


def clocks(trace: Recording) -> dict[str, str]:
    """Server -> how its stages are placed on the caller's clock."""
    return {server: _CLOCKS[same] for server, same in _same_clock(trace.finished).items()}


_CLOCKS = {True: "the clock of this host", False: "the midpoint of each round trip"}


def events(trace: Recording) -> list[dict[str, Any]]:
    """Those of the document, times from the trace's begin."""
    calls = trace.finished
    writer = _Writer(trace.begin_ns)
    caller = f"caller (process {os.getpid()})"
    for module in trace.modules:
        about = {"layer": module.layer, "tokens": module.tokens} if module.tokens else {}
        writer.put(caller, module.thread, Span(f"{module.name} {module.layer}", module.begin_ns, module.end_ns), about)
    for thread, gap in attention(trace.modules):
        writer.put(caller, thread, gap, {"what": "between two calls: attention, router, and what else the model does"})
    lanes = _Tracks((m.thread, m.begin_ns, m.end_ns) for m in trace.modules)
    for call in sorted(calls, key=lambda c: c.begin_ns):
        track = lanes.of(call.thread, call.begin_ns, call.end_ns)
        for n, span in enumerate(_caller_spans(call)):
            about = {"layer": call.layer, "tokens": call.tokens} if n == 0 else {}
            writer.put(caller, track, span, about)
    same = _same_clock(calls)
    at_servers = _Tracks(())
    answered = [(part, call) for call in calls for part in call.answers]
    for part, call in sorted(answered, key=lambda found: found[0].begin_ns):
        server = f"{part.server} (clock: {_CLOCKS[same[part.server]]})"
        track = at_servers.of(part.server, part.begin_ns, part.answered_ns).removeprefix(part.server).strip()
        _put_part(writer, server, f"requests {track}".strip(), part, call, same[part.server])
    return writer.events


def _put_part(writer: _Writer, server: str, track: str, part: SubRequestTrace, call: TracedCall, same: bool) -> None:
    assert part.timing is not None
    t = part.timing
    about = {"layer": call.layer, "tokens": part.tokens, "transport": part.transport, "backend": t.backend}
    about |= {"batch_tokens": t.batch_tokens, "batch_requests": t.batch_requests}
    writer.put(server, track, Span(f"layer {call.layer}", part.begin_ns, part.answered_ns), about)
    stages = placed(part, same).stages
    begin_ns, end_ns = stages[0].begin_ns, stages[-1].end_ns
    for span in (Span("to the server", part.begin_ns, begin_ns), *stages, Span("back", end_ns, part.answered_ns)):
        if span.end_ns > span.begin_ns:
            writer.put(server, track, span, about if span.name == "kernel" else {})


def _caller_spans(call: TracedCall) -> list[Span]:
    """The call, and what is inside of it."""
    spans = [Span(f"call {call.layer}", call.begin_ns, call.end_ns)]
    at_ns = min(call.split_ns or call.begin_ns, call.end_ns)
    spans.append(Span("split", call.begin_ns, at_ns))
    for part in sorted(call.answers, key=lambda p: p.begin_ns):
        begin_ns, end_ns = max(part.begin_ns, at_ns), min(part.sent_ns, call.end_ns)
        if end_ns > begin_ns:
            spans.append(Span(f"send {part.server}", begin_ns, end_ns))
            at_ns = end_ns
    joined_ns = min(max([call.joined_ns, at_ns, *(part.answered_ns for part in call.answers)]), call.end_ns)
    spans += [Span("wait", at_ns, joined_ns), Span("join", joined_ns, call.end_ns)]
    return [spans[0], *(span for span in spans[1:] if span.end_ns > span.begin_ns)]


def attention(modules: Iterable[Module]) -> list[tuple[str, Span]]:
    """What lies between two calls of modules on one thread: what the model itself does, before the layer that it is
    named for; between a start and its wait, what is computed meanwhile."""
    last: dict[str, Module] = {}
    found = []
    for module in sorted(modules, key=lambda m: m.begin_ns):
        before = last.get(module.thread)
        if before is not None and module.begin_ns > before.end_ns:
            name = "meanwhile" if module.name == "wait" else "attention"
            found.append((module.thread, Span(f"{name} {module.layer}", before.end_ns, module.begin_ns)))
        last[module.thread] = module
    return found


def _same_clock(calls: Iterable[TracedCall]) -> dict[str, bool]:
    """Server -> whether its clock is the caller's."""
    same: dict[str, bool] = {}
    for call in calls:
        for part in call.answers:
            same[part.server] = same.get(part.server, True) and own_clock(part)
    return same


class _Tracks:
    """Names of tracks on which what overlaps lies side by side.  modules: (thread, begin, end), which hold calls."""

    def __init__(self, modules: Iterable[tuple[str, int, int]]) -> None:
        self._modules = list(modules)
        self._free_ns: dict[str, list[int]] = {}

    def of(self, name: str, begin_ns: int, end_ns: int) -> str:
        """For something of the thread or server `name` that begins no earlier than what was asked for before."""
        lanes = self._free_ns.setdefault(name, [])
        crosses = any(t == name and (b < begin_ns < e < end_ns or begin_ns < b < end_ns) for t, b, e in self._modules)
        first = 1 if crosses else 0
        lane = next((n for n in range(first, len(lanes)) if lanes[n] <= begin_ns), max(first, len(lanes)))
        lanes += [0] * (lane + 1 - len(lanes))
        lanes[lane] = end_ns
        return name if lane == 0 else f"{name} {lane + 1}"


class _Writer:
    def __init__(self, zero_ns: int) -> None:
        self.events: list[dict[str, Any]] = []
        self._zero_ns = zero_ns
        self._processes: dict[str, int] = {}
        self._tracks: dict[tuple[int, str], int] = {}

    def put(self, process: str, track: str, span: Span, about: dict[str, Any] | None = None) -> None:
        """One event; its process and track get their names when they come first."""
        pid = self._processes.get(process)
        if pid is None:
            pid = self._processes[process] = len(self._processes) + 1
            self._name("process_name", process, pid, 0)
        tid = self._tracks.get((pid, track))
        if tid is None:
            tid = self._tracks[pid, track] = len(self._tracks) + 1
            self._name("thread_name", track, pid, tid)
        begin_us, end_us = ((ns - self._zero_ns) / 1000 for ns in span[1:])
        dur = round(end_us - begin_us, 3)
        event = {"ph": "X", "name": span.name, "pid": pid, "tid": tid, "ts": begin_us, "dur": dur}
        self.events.append({**event, "args": about} if about else event)

    def _name(self, what: str, name: str, pid: int, tid: int) -> None:
        self.events.append({"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}})
