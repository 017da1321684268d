"""Whether numbers are finite, by their bits: a third of the time of isfinite, and of e4m3 and e8m0, too."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertd_kernels.weights.scheme import ScaleType

__all__ = ["Watch", "not_finite"]

_EXPONENT = {
    torch.float16: (torch.int16, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float32: (torch.int32, 0x7F800000),
    torch.float64: (torch.int64, 0x7FF0000000000000),
    torch.float8_e4m3fn: (torch.int8, 0x7F),
}
"""Integers of the same width, and the least magnitude, as an integer, of what is infinite or NaN."""


def not_finite(t: Tensor, scale: ScaleType = ScaleType.NONE) -> Tensor | None:
    """A mask of what is NaN or infinite; None if nothing is.  scale: E8M0 if bytes are exponents."""
    if t.dtype is torch.uint8:
        bad = t == 0xFF if scale is ScaleType.E8M0 else torch.zeros((), dtype=torch.bool)
        return bad if bool(bad.any()) else None
    kind, least = _EXPONENT[t.dtype]
    magnitude = t.view(kind) & torch.iinfo(kind).max
    return magnitude >= least if t.numel() and int(magnitude.max()) >= least else None


class Watch:
    """Looks at the bytes of numbers as they pass, piece by piece, while they are in the processor's cache.

    seen: whether a NaN or an infinity was among them.  Positive ones are the largest signed integers, negative ones the
    largest unsigned: two maxima without anything in memory between.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        """dtype: one of of()'s."""
        width, least = dtype.itemsize, _EXPONENT[dtype][1]
        self._signed, self._unsigned = np.dtype(f"i{width}"), np.dtype(f"u{width}")
        self._least, self._least_negative = least, least | 1 << (8 * width - 1)
        self.seen = False

    @classmethod
    def of(cls, dtype: torch.dtype) -> Watch | None:
        """None for integers, which are always finite."""
        return cls(dtype) if dtype in _EXPONENT else None

    def look(self, piece: NDArray[np.uint8]) -> None:
        """piece [bytes], whole numbers."""
        if piece.view(self._signed).max() >= self._least or piece.view(self._unsigned).max() >= self._least_negative:
            self.seen = True
