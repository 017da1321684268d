"""Which experts a drawn load asks for.

uniform          every expert alike
zipf:S           expert e with the weight 1 / (e + 1) ^ S
hot:K[:P]        K experts, drawn by the seed, have the share P of the weight together (0.9), the others the rest
incast           every token of every caller goes to the same top-k experts, drawn by the seed
recorded:FILE    the routes of a recording (`expertctl record`), token by token
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from expertctl.common.workload import LayerShape

__all__ = ["KINDS", "Routing", "parse_routing"]

KINDS = "uniform, zipf:S, hot:K[:P], incast or recorded:FILE"
_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Routing:
    """kind: of the module's list; exponent: of zipf; hot, share: of hot; path: of recorded; text: as asked for"""

    kind: str = "uniform"
    exponent: float = 0.0
    hot: int = 0
    share: float = _SHARE
    path: Path | None = None
    text: str = "uniform"

    @property
    def zipf(self) -> float | None:
        """As SyntheticValues can say it; None = it cannot."""
        return self.exponent if self.kind in ("uniform", "zipf") else None

    def log_weights(self, shape: LayerShape, seed: int) -> NDArray[np.float64]:
        """[num_experts] of a layer; -inf: never, unless nobody else is left.  Raises ValueError."""
        E = shape.num_experts
        if self.kind in ("uniform", "zipf"):
            return -self.exponent * np.log(np.arange(1, E + 1))
        hot, share = (shape.top_k, 1.0) if self.kind == "incast" else (self.hot, self.share)
        if not 1 <= hot <= E:
            raise ValueError(f"--routing {self.text}: got {hot} experts, want 1 to {E}, those of layer {shape.layer}")
        weights = np.full(E, (1.0 - share) / max(1, E - hot))
        chosen = np.random.default_rng((seed, shape.layer)).permutation(E)[:hot]
        weights[chosen] = share / hot
        with np.errstate(divide="ignore"):
            logs: NDArray[np.float64] = np.log(weights)
        return logs


def parse_routing(text: str) -> Routing:
    """As argparse's type."""
    kind, _, rest = text.partition(":")
    try:
        if kind in ("uniform", "incast") and not rest:
            return Routing(kind, text=text)
        if kind == "zipf" and 0 <= float(rest) < float("inf"):
            return Routing(kind, exponent=float(rest), text=text)
        if kind == "hot":
            hot, _, share = rest.partition(":")
            if int(hot) >= 1 and 0 < (part := float(share or _SHARE)) <= 1:
                return Routing(kind, hot=int(hot), share=part, text=text)
        if kind == "recorded" and rest:
            return Routing(kind, path=Path(rest), text=text)
    except ValueError:
        pass  # told below
    raise argparse.ArgumentTypeError(f"got {text!r}, want {KINDS}")
