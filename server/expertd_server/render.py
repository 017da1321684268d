"""The oracle's answer for people (a table) and for programs (JSON).  Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from expertd_kernels.oracle import Decision

if TYPE_CHECKING:
    from expertd_server.boot import LayerPlan

__all__ = ["decisions_json", "print_decisions", "span"]


def span(numbers: Sequence[int]) -> str:
    """(3, 4, 5, 9) -> "3-5, 9"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in runs)


def decisions_json(plans: Sequence[LayerPlan]) -> dict[str, Any]:
    """{"layers": [{"layer", "scheme", "chosen", "verdicts": [{"backend", "eligible", "refusals"}], ...}]}"""
    return {
        "layers": [
            {
                "layer": p.info.layer,
                "scheme": p.decision.problem.scheme_name,
                "chosen": None if p.decision.chosen is None else p.decision.chosen.name,
                "verdicts": [
                    {"backend": v.backend, "eligible": v.eligible, "refusals": list(v.refusals)}
                    for v in p.decision.verdicts
                ],
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
            for p in plans
        ]
    }


def print_decisions(console: Console, plans: Sequence[LayerPlan]) -> None:
    """One table for each group of layers that pose the same problem and got the same answer."""
    groups: dict[tuple[Any, ...], list[LayerPlan]] = {}
    for p in plans:
        d = p.decision
        name = None if d.chosen is None else d.chosen.name
        key = (d.problem.schemes, d.problem.num_experts, d.problem.activation, name, d.verdicts, p.info.notes)
        groups.setdefault(key, []).append(p)
    for members in groups.values():
        _print_group(console, members)


def _print_group(console: Console, plans: Sequence[LayerPlan]) -> None:
    first, d = plans[0], plans[0].decision
    p = d.problem
    layers = span([x.info.layer for x in plans])
    console.print(
        f"layer{'s' if len(plans) > 1 else ''} {layers}: {p.scheme_name},"
        f" {p.num_experts} of {first.info.num_experts} experts,"
        f" H {p.hidden_size}, I {p.intermediate_size}, top-{p.top_k}, {p.activation.name}, compute {p.compute_dtype},"
        f" on {p.device}: {p.weight_bytes / 2**20:,.1f} MiB a layer",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("backend", no_wrap=True)
    table.add_column("verdict")
    for v in d.verdicts:
        chosen = d.chosen is not None and v.backend == d.chosen.name
        table.add_row(Text(v.backend, "bold" if chosen else ""), _verdict(d, v.refusals, chosen))
    console.print(table)
    for note in _notes(first):
        console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)


def _verdict(d: Decision, refusals: Sequence[str], chosen: bool) -> Text:
    if refusals:
        return Text("; ".join(refusals), "dim")
    if chosen:
        return Text("chosen" + (" (pinned)" if d.pinned else ""), "bold green")
    return Text("eligible")


def _notes(p: LayerPlan) -> list[str]:
    notes = list(p.info.notes)
    wants, does = p.info.checkpoint_activation.value, p.decision.problem.activation_quant.value
    if wants != does:
        notes.append(
            f"the checkpoint asks for activations rounded to {wants}; they are"
            f" {'not rounded' if does == 'none' else does} (--activations checkpoint follows it)"
        )
    if p.decision.chosen is not None and p.decision.chosen.hardware:
        notes.append(f"backend {p.decision.chosen.name}: {p.decision.chosen.hardware}")
    return notes
