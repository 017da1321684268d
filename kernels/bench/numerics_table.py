"""What numerics.py found, as a page to read and as a file that the next run takes up."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from expertd_kernels.weights.scheme import ActivationQuant
from numerics_grid import Layer

__all__ = ["ROUTINGS", "Outcome", "cells", "earlier", "markdown", "write_figures"]

ROUTINGS = ("uniform", "absent", "one", "few")
"""Kinds of routes; numerics.py says what they are."""
MAY_DIFFER = ("commit", "driver")
"""Facts of a machine that a table may mix; lines tell the commit."""
_BETWEEN_FAULTS = " || "


@dataclass(frozen=True)
class Outcome:
    """errors: worst relative error by tokens; faults: a sentence each; empty = right.  commit: of the code that was
    checked, where it is known and not this run's."""

    errors: Mapping[int, float] = field(default_factory=dict)
    tolerance: float = 0.0
    faults: tuple[str, ...] = ()
    seconds: float = 0.0
    ran: bool = True
    commit: str = ""


def cells(layer: Layer, outcome: Outcome, tokens: Sequence[int]) -> list[str]:
    """A layer's line of the page."""
    how = "" if layer.activations is ActivationQuant.NONE else f" x {layer.activations.value}"
    kind = layer.activation + (" + bias" if layer.bias else "")
    errors = [f"{outcome.errors[m]:.1e}" if m in outcome.errors else "-" for m in tokens]
    verdict = "right" if not outcome.faults else "WRONG" if outcome.ran else "not run"
    return [f"`{layer.backend}`", layer.scheme + how, layer.compute_dtype, str(layer.experts), str(layer.top_k),
            f"{layer.hidden} / {layer.intermediate}", kind, *errors, f"{outcome.tolerance:.0e}", verdict]  # fmt: skip


def markdown(
    facts: Mapping[str, str], tokens: Sequence[int], found: Sequence[tuple[Layer, Outcome]], refused: Mapping[str, str]
) -> str:
    """The committed page: facts, counts, a line a layer, the faults, the rows that were left out."""
    ran = [o for _, o in found if o.ran]
    commits = Counter(o.commit for o in ran if o.commit)
    before = "".join(f" {n} were checked at commit {commit}." for commit, n in commits.items())
    wrong = sum(bool(o.faults) for o in ran)
    head = ["backend", "weights", "compute", "E", "top_k", "H / I", "activation", *(f"M = {m}" for m in tokens),
            "tolerance", ""]  # fmt: skip
    lines = [head, ["---"] * len(head), *(cells(layer, o, tokens) for layer, o in found)]
    faults = [f"- `{layer.backend}` {layer.scheme} E {layer.experts}: {f}" for layer, o in found for f in o.faults]
    left = [f"- `{name}`: {why}" for name, why in refused.items()]
    parts = [
        "# Relative error against the float32 reference",
        "Written by `python kernels/bench/numerics.py`. " + "; ".join(f"{k} {v}" for k, v in facts.items()),
        f"{len(found)} layers, {len(ran)} checked, {wrong} wrong, {len(found) - len(ran)} not run. A cell is the worst"
        f" of {len(ROUTINGS)} kinds of routes ({', '.join(ROUTINGS)}).{before}",
        "\n".join("| " + " | ".join(line) + " |" for line in lines),
        *(["## Faults", "\n".join(faults)] if faults else []),
        *(["## Rows that do not run here", "\n".join(left)] if left else []),
    ]
    return "\n\n".join(parts) + "\n"


def write_figures(
    path: Path, facts: Mapping[str, str], tokens: Sequence[int], found: Sequence[tuple[Layer, Outcome]]
) -> None:
    """One CSV line a layer: what it is, the worst error of each number of tokens, the verdict, the machine.  commit is
    that of the code which was checked."""
    with path.open("w", newline="") as f:
        writer = None
        for layer, o in found:
            line = {
                **asdict(layer),
                "activations": layer.activations.value,
                "bias": int(layer.bias),
                **{f"M={m}": o.errors.get(m, "") for m in tokens},
                "tolerance": o.tolerance,
                "seconds": round(o.seconds, 2),
                "ran": int(o.ran),
                "faults": _BETWEEN_FAULTS.join(o.faults),
                **facts,
            }
            line["commit"] = o.commit or facts.get("commit", "")
            if writer is None:
                writer = csv.DictWriter(f, list(line), lineterminator="\n")
                writer.writeheader()
            writer.writerow(line)


def earlier(path: Path, facts: Mapping[str, str], tokens: Sequence[int], todo: Sequence[Layer]) -> dict[Layer, Outcome]:
    """What an earlier run found right of the layers in `todo`, at all of these numbers of tokens.  ValueError where it
    ran on another machine or with other versions than `facts` tell."""
    with path.open(newline="") as f:
        lines = list(csv.DictReader(f))
    other = [
        f"{k} {line.get(k) or 'none'}, here {v}"
        for line in lines
        for k, v in facts.items()
        if k not in MAY_DIFFER and line.get(k) != v
    ]
    if other:
        raise ValueError(f"it is of another machine: {'; '.join(dict.fromkeys(other))}")
    wanted, out = set(todo), {}
    for line in lines:
        layer = Layer(
            backend=line["backend"],
            scheme=line["scheme"],
            activations=ActivationQuant(line["activations"]),
            compute_dtype=line["compute_dtype"],
            experts=int(line["experts"]),
            top_k=int(line["top_k"]),
            hidden=int(line["hidden"]),
            intermediate=int(line["intermediate"]),
            activation=line["activation"],
            bias=line["bias"] == "1",
        )
        errors = {int(name[2:]): float(e) for name, e in line.items() if name.startswith("M=") and e}
        if layer in wanted and line["ran"] == "1" and not line["faults"] and set(tokens) <= set(errors):
            out[layer] = Outcome(errors, float(line["tolerance"]), (), float(line["seconds"]), commit=line["commit"])
    return out
