"""The activation between the two GEMMs, as a value.  Pure: imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Activation", "ActivationKind"]


class ActivationKind(Enum):
    """g = gate, u = up.  Canonical weights are always de-interleaved: gate rows first, then up rows."""

    SILU_AND_MUL = "silu_and_mul"  # silu(g) * u
    GELU_AND_MUL = "gelu_and_mul"  # gelu(g) * u, exact (erf)
    GELU_TANH_AND_MUL = "gelu_tanh_and_mul"  # gelu(g) * u, tanh approximation
    SWIGLUOAI = "swigluoai"  # g = min(g, limit), u = clamp(u, -limit, limit): (u + beta) * g * sigmoid(alpha * g)
    RELU2 = "relu2"  # relu(h) ** 2 without mul: w13 is one projection of I rows

    @property
    def gated(self) -> bool:
        return self is not ActivationKind.RELU2


@dataclass(frozen=True)
class Activation:
    """limit: clamp before the activation; None = none.  With SWIGLUOAI gate from above, up on both sides; the same
    clamps with SILU_AND_MUL (DeepSeek-V4 style).  alpha, beta: SWIGLUOAI only (gpt-oss: 1.702, 1.0, limit 7.0)."""

    kind: ActivationKind = ActivationKind.SILU_AND_MUL
    alpha: float = 1.702
    beta: float = 1.0
    limit: float | None = None

    @property
    def gated(self) -> bool:
        """Whether w13 holds gate and up rows (2I) or only one projection (I)."""
        return self.kind.gated

    @property
    def segments(self) -> int:
        """Projections in w13."""
        return 2 if self.gated else 1

    @property
    def name(self) -> str:
        """Stable name: "silu_and_mul", "swigluoai", "silu_and_mul_limit10"."""
        if self.kind is ActivationKind.SWIGLUOAI or self.limit is None:
            return self.kind.value
        return f"{self.kind.value}_limit{self.limit:g}"

    @classmethod
    def parse(cls, name: str) -> Activation:
        """The activation called `name`; swigluoai comes with gpt-oss's constants."""
        base, sep, limit = name.partition("_limit")
        try:
            kind = ActivationKind(base)
        except ValueError:
            known = ", ".join(k.value for k in ActivationKind)
            raise ValueError(f"activation {name!r}: known are {known}") from None
        if kind is ActivationKind.SWIGLUOAI and not sep:
            return cls(kind, limit=7.0)
        return cls(kind, limit=float(limit) if sep else None)
