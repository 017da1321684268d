"""Why a row does not serve a problem, and what the user can do about it.  Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Refusal", "RefusalKind", "Remedy"]


class RefusalKind(Enum):
    """What would have to be another for the row to serve."""

    ROW = "row"  # what it computes: against the weights, their sizes, the device's generation, what is asked
    DEVICE = "device"  # the kind of device
    INSTALL = "install"  # what is installed, which the user can change: a package, its version, a compiled library


@dataclass(frozen=True)
class Remedy:
    """What an install lacks.  needs: for a sentence, "triton >=3.6,<3.10"; command: for a shell."""

    needs: str
    command: str


class Refusal(str):
    """One sentence on why a row does not serve; a text, so that it is printed, joined and sent as it is.  remedy: of
    the kind INSTALL, None of the others."""

    __slots__ = ("kind", "remedy")
    kind: RefusalKind
    remedy: Remedy | None

    def __new__(cls, text: str, kind: RefusalKind = RefusalKind.ROW, remedy: Remedy | None = None) -> Refusal:
        if (kind is RefusalKind.INSTALL) != (remedy is not None):
            raise ValueError(f"refusal {text!r}: of kind {kind.value}, remedy {remedy}: want one for an install alone")
        self = super().__new__(cls, text)
        self.kind, self.remedy = kind, remedy
        return self

    def __getnewargs__(self) -> tuple[str, RefusalKind, Remedy | None]:  # type: ignore[override]
        return str(self), self.kind, self.remedy
