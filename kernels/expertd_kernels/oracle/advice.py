"""Which row the user could have besides the chosen one, and by which command.  Pure: a function of a decision."""

from __future__ import annotations

from dataclasses import dataclass

from expertd_kernels.oracle.decision import Decision, Grade, Verdict
from expertd_kernels.oracle.refusal import Remedy

__all__ = ["Advice", "advice"]


@dataclass(frozen=True)
class Advice:
    """A row that only the install keeps from serving.

    earlier: it stands before the chosen row (else nothing is chosen); hardware: what is known of it, "" where it ran on
    this hardware.
    needs, command: as in Remedy, of everything that is missing.
    """

    backend: str
    earlier: bool
    hardware: str
    needs: str
    command: str

    def __str__(self) -> str:
        rank, name = "", self.backend
        if self.earlier:
            rank = "preferred " if self.hardware else "faster "  # how fast it is was not seen, then
        if self.hardware:
            name += f" ({self.hardware})"
        return f"{rank}backend {name} needs {self.needs}: {self.command}"


def advice(decision: Decision) -> Advice | None:
    """The first row before the chosen one that the user can have by changing the install; None where there is none.
    Of a pin that is refused: that row; one that is served is the user's own choice."""
    chosen = decision.chosen
    if decision.pinned:
        rows = [v for v in decision.verdicts if chosen is None and v.backend == decision.pin]
    else:
        names = [v.backend for v in decision.verdicts]
        rows = list(decision.verdicts[: None if chosen is None else names.index(chosen.name)])
    first = next((v for v in rows if _remedies(v)), None)
    if first is None:
        return None
    remedies = _remedies(first)
    return Advice(
        first.backend,
        chosen is not None,
        "" if first.grade is Grade.RUN else str(first.grade),
        " and ".join(r.needs for r in remedies),
        " && ".join(r.command for r in remedies),
    )


def _remedies(v: Verdict) -> list[Remedy]:
    """One for each refusal; empty where a refusal has none, or nothing is refused."""
    found = [r.remedy for r in v.refusals if r.remedy is not None]
    return found if len(found) == len(v.refusals) else []
