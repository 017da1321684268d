"""How weights of each scheme are stored for these kernels.  Pure: imports no torch.

A *unit* is 2 KiB: 64 rows x 64, 32 or 16 columns of 4-, 8- or 16-bit codes.  A *chunk* is the least run of columns
that holds whole groups and whole 64-column blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from expertd_kernels.weights.scheme import WHOLE, Element, ScaleType, Scheme

__all__ = ["Codec", "codec_of"]


@dataclass(frozen=True)
class Codec:
    """kind: "int" (one FMA makes (q - 8) * s), "zero" (q - z, then * s), "float" (bits * s), "float2" (bits * s with s
    as the sum of two bf16, for f32 scales) or "plain" (bf16).

    bits      of a code: 4, 8, 16
    group     columns a stored scale (channel, block and tensor scales are repeated every 128 columns)
    e8m0      scales are stored as exponent bytes, else as bf16
    """

    kind: str
    bits: int
    group: int = 128
    e8m0: bool = False

    @property
    def units(self) -> int:
        """2 KiB units a 64 x 64 block."""
        return self.bits // 4

    @property
    def planes(self) -> int:
        """Numbers a row and group: the scale, then the zero point or the rest of the scale."""
        return {"int": 1, "zero": 2, "float": 1, "float2": 2, "plain": 0}[self.kind]

    @property
    def integer(self) -> bool:
        return self.kind in ("int", "zero")

    @property
    def chunk(self) -> int:
        return max(64, self.group) if self.planes else 64

    @property
    def chunk_scales(self) -> int:
        """Stored numbers of 64 rows x one chunk."""
        return self.planes * 64 * (self.chunk // self.group) if self.planes else 0

    @property
    def scale_bytes(self) -> int:
        return 1 if self.e8m0 else 2

    def load_scales(self, sk: int) -> int:
        """Stored numbers of 64 rows that an operand of `sk` 64-column blocks reads."""
        return max(1, 64 * sk // self.chunk) * self.chunk_scales

    def load_groups(self, sk: int) -> int:
        """Groups across an operand of `sk` 64-column blocks."""
        return max(1, 64 * sk // self.group)

    @property
    def name(self) -> str:
        return f"{self.kind}{self.bits}" + (f"g{self.group}" if self.planes else "")


def codec_of(scheme: Scheme) -> Codec:
    """The storage of `scheme`.  ValueError for a scheme that these kernels do not read."""
    e = scheme.element
    if e is Element.BF16:
        return Codec("plain", 16)
    repeated = scheme.cols == WHOLE or scheme.cols % 128 == 0
    if e not in (Element.INT4, Element.INT8, Element.E2M1, Element.E4M3) or not (repeated or scheme.cols in (32, 64)):
        raise ValueError(f"scheme {scheme.name}: these kernels read no such weights")
    exact = scheme.scale in (ScaleType.E8M0, ScaleType.BF16, ScaleType.E4M3)
    kind = ("zero" if scheme.zeros else "int") if e.integer else "float" if exact else "float2"
    return Codec(kind, e.bits, 128 if repeated else scheme.cols, scheme.scale is ScaleType.E8M0)
