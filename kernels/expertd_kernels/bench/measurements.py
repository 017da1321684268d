"""Which rows of the table a bench was told to take."""

from __future__ import annotations

from collections.abc import Sequence

from expertd_kernels.oracle.table import BACKENDS

__all__ = ["picked"]


def picked(names: Sequence[str], every: Sequence[str]) -> list[str]:
    """The rows that `names` name: themselves; "all": `every`; "-NAME": without it.  ValueError for an unknown name."""
    known = {b.name for b in BACKENDS}
    unknown = sorted({n.removeprefix("-") for n in names} - known - {"all"})
    if unknown:
        raise ValueError(
            f"backend {', '.join(unknown)}: known are all, {', '.join(sorted(known))}; -NAME leaves one out"
        )
    without = {n[1:] for n in names if n.startswith("-")}
    named = [n for n in names if not n.startswith("-")]
    found = [n for name in named for n in (every if name == "all" else [name])]
    return [n for n in dict.fromkeys(found) if n not in without]
