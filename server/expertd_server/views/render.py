"""The oracle's answer for people (a table) and for programs (JSON).  Imports no torch by itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from expertd.common.ranges import format_ranges
from expertd.common.tables import VerdictRow, print_sentence, print_verdicts
from expertd_kernels.oracle.advice import advice
from expertd_kernels.oracle.decision import Decision, Grade, Verdict
from expertd_server.boot.assignment import Assignment

__all__ = ["decisions_json", "print_decisions"]


def decisions_json(assignments: Sequence[Assignment]) -> dict[str, Any]:
    """{"layers": [{"layer", "scheme", "chosen", "verdicts": [{"backend", "eligible", "refusals", "grade",
    "microseconds", "relative_error"}], "advice": {"backend", "needs", "command"} | None, ...}]}; microseconds by token
    count, empty where nothing was measured."""
    return {
        "layers": [
            {
                "layer": p.info.layer,
                "scheme": p.decision.problem.scheme_name,
                "chosen": None if p.decision.chosen is None else p.decision.chosen.name,
                "chosen_by": p.chosen_by,
                "verdicts": [_verdict_json(v) for v in p.decision.verdicts],
                "advice": _advice_json(p.decision),
                "device": str(p.decision.problem.device),
                "pinned": p.decision.pinned,
                "activation": p.info.activation.name,
                "activation_scheme": p.decision.problem.activation_quant.value,
                "checkpoint_activation_scheme": p.info.checkpoint_activation.value,
                "num_experts": p.info.num_experts,
                "held_experts": len(p.held),
                "hidden_size": p.info.hidden_size,
                "intermediate_size": p.info.intermediate_size,
                "top_k": p.info.top_k,
                "notes": list(p.info.notes),
            }
            for p in assignments
        ]
    }


def _verdict_json(v: Verdict) -> Mapping[str, Any]:
    finite = v.relative_error is not None and math.isfinite(v.relative_error)
    return {
        "backend": v.backend,
        "eligible": v.eligible,
        "refusals": list(v.refusals),
        "grade": v.grade.name.lower(),
        "microseconds": {str(m): round(us, 1) for m, us in v.times},
        "relative_error": v.relative_error if finite else None,
    }


def _advice_json(d: Decision) -> Mapping[str, str] | None:
    found = advice(d)
    return None if found is None else {"backend": found.backend, "needs": found.needs, "command": found.command}


def print_decisions(
    console: Console, assignments: Sequence[Assignment], pending: bool = False, every_row: bool = False
) -> None:
    """One table for each group of layers that pose the same problem and got the same answer.  pending: what is eligible
    and neither pinned nor measured will be measured.  every_row: rows for other kinds of devices get a line each."""
    groups: dict[tuple[Any, ...], list[Assignment]] = {}
    for p in assignments:
        d = p.decision
        name = None if d.chosen is None else d.chosen.name
        key = (d.problem.schemes, d.problem.num_experts, d.problem.activation, name, d.verdicts, p.info.notes)
        groups.setdefault(key, []).append(p)
    for members in groups.values():
        _print_group(console, members, pending, every_row)


def _print_group(console: Console, assignments: Sequence[Assignment], pending: bool, every_row: bool) -> None:
    first, d = assignments[0], assignments[0].decision
    p = d.problem
    layers = format_ranges(x.info.layer for x in assignments)
    print_sentence(
        console,
        f"layer{'s' if len(assignments) > 1 else ''} {layers}: {p.scheme_name},"
        f" {p.num_experts} of {first.info.num_experts} experts,"
        f" H {p.hidden_size}, I {p.intermediate_size}, top-{p.top_k}, {p.activation.name}, compute {p.compute_dtype},"
        f" on {p.device}: {p.weight_bytes / 2**20:,.1f} MiB a layer",
    )
    folded = [] if every_row else [v.backend for v in d.verdicts if v.elsewhere and v.backend != d.pin]
    _print_verdicts(console, first, folded, pending and first.chosen_by == "order")
    if folded:
        print_sentence(console, f"backends for other devices (expertd explain --all shows them): {', '.join(folded)}")
    if found := advice(d):
        console.print(str(found), style="bold", markup=False, highlight=False, soft_wrap=True)  # it ends in a command
    for note in _notes(first):
        print_sentence(console, f"note: {note}")


def _print_verdicts(console: Console, assignment: Assignment, folded: Sequence[str], pending: bool) -> None:
    d = assignment.decision
    tokens = max(([m for m, _ in v.times] for v in d.verdicts), key=len, default=[])
    errors = any(v.relative_error is not None for v in d.verdicts)
    rows = []
    for v in d.verdicts:
        if v.backend in folded:
            continue
        chosen = d.chosen is not None and v.backend == d.chosen.name
        times = dict(v.times)
        cells = [f"{times[m]:,.0f}" if m in times else "" for m in tokens]
        if errors:
            cells.append("" if v.relative_error is None else f"{v.relative_error:.1e}")
        name = Text(v.backend, "bold" if chosen and not pending else "")
        verdict = _verdict(d, v.backend, v.refusals, pending)
        if v.eligible and v.grade is not Grade.RUN:
            verdict = verdict + Text(f" ({v.grade})", "dim")
        rows.append(VerdictRow(name, verdict, cells))
    print_verdicts(console, rows, [f"us at {m}" for m in tokens] + ["error"] * errors)


def _verdict(d: Decision, backend: str, refusals: Sequence[str], pending: bool) -> Text:
    if refusals:
        pinned = d.pin == backend
        return Text(("pinned, refused: " if pinned else "") + "; ".join(refusals), "bold red" if pinned else "dim")
    if pending:
        return Text("eligible, to be measured")
    if d.chosen is not None and backend == d.chosen.name:
        return Text("chosen" + (" (pinned)" if d.pinned else ""), "bold green")
    return Text("eligible")


def _notes(p: Assignment) -> list[str]:
    notes = list(p.info.notes)
    wants, does = p.info.checkpoint_activation.value, p.decision.problem.activation_quant.value
    if wants != does:
        notes.append(
            f"the checkpoint asks for activations quantized to {wants}; they are"
            f" {'not quantized' if does == 'none' else does} (--activations checkpoint quantizes them)"
        )
    chosen = p.decision.chosen
    if chosen is None:
        who = f"the pinned backend {p.decision.pin}" if p.decision.pinned else "no backend"
        serves = "does not serve" if p.decision.pinned else "serves"
        way_out = "" if does == "none" else " (--activations weight-only asks for no quantized activations)"
        notes.append(f"{who} {serves} this layer: expertd serve would not start{way_out}")
    if chosen is not None and p.decision.grade is not Grade.RUN:
        notes.append(f"backend {chosen.name}: {p.decision.grade}")
    if chosen is not None and chosen.name == "reference" and not p.decision.pinned:
        notes.append("only the slow float32 reference serves this layer: the table has the reasons")
    return notes
