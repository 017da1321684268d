"""The oracle: which backend serves a layer, and why not the others.  Pure: imports no torch and no backend.

A backend is a record of facts (backend.py).  A rule is a function (backend, problem) -> refusal | None (rules.py).
Every rule runs for every backend, so the answer is a table and not the last reason.  `decide` takes the first eligible
backend: the best known one (backend.Grade), and of equals the first of the platform's order.  A pinned backend is used
or refused, never replaced.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from expertd_kernels.common.problem import Device, Problem
from expertd_kernels.oracle import table
from expertd_kernels.oracle.backend import Backend, DeviceRange, Grade, SchemeSupport
from expertd_kernels.oracle.refusal import Refusal, RefusalKind, Remedy
from expertd_kernels.oracle.rules import RULES, grade, judge

__all__ = [
    "Backend",
    "Decision",
    "DeviceRange",
    "Grade",
    "NoBackendError",
    "RULES",
    "Refusal",
    "RefusalKind",
    "Remedy",
    "SchemeSupport",
    "Verdict",
    "decide",
    "order_for",
]


@dataclass(frozen=True)
class Verdict:
    """What the rules say of one row, and what is known of it there.  Filled by a measurement: times, microseconds by
    token count; microseconds, their geometric mean; relative_error, against the float32 reference."""

    backend: str
    refusals: tuple[Refusal, ...] = ()
    grade: Grade = Grade.RUN
    microseconds: float | None = None
    relative_error: float | None = None
    times: tuple[tuple[int, float], ...] = ()

    @property
    def eligible(self) -> bool:
        return not self.refusals

    @property
    def elsewhere(self) -> bool:
        """Whether the row is for other kinds of devices."""
        return any(r.kind is RefusalKind.DEVICE for r in self.refusals)


@dataclass(frozen=True)
class Decision:
    """The answer: the row chosen (None if nothing fits) and the verdict on every row, in the order of preference.
    pin: the row that the user demands, None where the choice is the oracle's."""

    problem: Problem
    chosen: Backend | None
    verdicts: tuple[Verdict, ...]
    pin: str | None = None

    @property
    def grade(self) -> Grade | None:
        """What is known of the chosen row on this device; None where nothing is chosen."""
        return next((v.grade for v in self.verdicts if self.chosen is not None and v.backend == self.chosen.name), None)

    @property
    def pinned(self) -> bool:
        return self.pin is not None

    def require(self) -> Backend:
        """The chosen row; raises NoBackendError with every refusal where there is none."""
        if self.chosen is None:
            raise NoBackendError(self)
        return self.chosen


class NoBackendError(Exception):
    """No backend serves the layer, or the pinned one does not.  The text holds the whole table."""

    def __init__(self, decision: Decision) -> None:
        self.decision = decision
        p = decision.problem
        rows = "\n".join(f"  {v.backend}: {'; '.join(v.refusals) or 'eligible'}" for v in decision.verdicts)
        what = f"the pinned backend {decision.pin} does not serve" if decision.pinned else "no backend serves"
        super().__init__(f"{what} {p.scheme_name} with {p.activation.name} on {p.device}:\n{rows}")


def order_for(device: Device, backends: Sequence[Backend], order: Mapping[str, Sequence[str]]) -> list[Backend]:
    """The rows in the order of preference on `device`: the names of order[arch], else order[kind], then the rest."""
    names = list(order.get(device.arch, order.get(device.kind, ())))
    by_name = {b.name: b for b in backends}
    first = [by_name[n] for n in names if n in by_name]
    return first + [b for b in backends if b.name not in names]


def decide(
    problem: Problem,
    backends: Sequence[Backend] | None = None,
    pin: str | None = None,
    order: Mapping[str, Sequence[str]] | None = None,
) -> Decision:
    """Judge every row and choose the first eligible one: rows of a higher grade first, fallbacks last.

    backends, order: the table and the platform orders; default: expertd_kernels.oracle.table.
    pin: a backend's name: it is chosen if it is eligible, else nothing is.  ValueError for an unknown name.
    """
    rows = order_for(
        problem.device, table.BACKENDS if backends is None else backends, table.ORDER if order is None else order
    )
    if pin is not None and pin not in {b.name for b in rows}:
        raise ValueError(f"backend {pin!r}: known are {', '.join(sorted(b.name for b in rows))}")
    grades = {b.name: grade(b, problem) for b in rows}
    rows.sort(key=lambda b: (b.fallback, -grades[b.name]))  # stable: equals keep the platform's order
    verdicts = tuple(Verdict(b.name, judge(b, problem), grades[b.name]) for b in rows)
    eligible = {v.backend for v in verdicts if v.eligible}
    chosen = next((b for b in rows if b.name in eligible and pin in (None, b.name)), None)
    return Decision(problem, chosen, verdicts, pin)


def backend_module(backend: Backend) -> Any:
    """The backend's module.  ImportError passes through: it is a refusal that the caller records."""
    return importlib.import_module(backend.target)
