"""A layer whose inputs are brought into its own form before it is timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["Prepared"]


@dataclass(frozen=True)
class Prepared:
    """prepare: (x [M, H] bf16, ids [M, k] int32, weights [M, k] f32) -> what run takes; run: -> [M, H].  A caller in
    its own program would have them in that form already.  eight_bits: it rounds activations to 8 bits."""

    prepare: Callable[[Tensor, Tensor, Tensor], Any]
    run: Callable[[Any], Tensor]
    eight_bits: bool = False

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self.run(self.prepare(x, ids, weights))
