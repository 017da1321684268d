"""Quantization schemes as values.  Pure: imports no torch, so that the oracle can be asked anywhere.

A scheme says how the stored codes of a weight matrix become numbers:

    value[n, k] = (code[n, k] - zero[n, k]) * scale[block of (n, k)] * global_scale[segment of n]

A *segment* is a projection inside a matrix: w13 has two (gate rows, then up rows), w2 has one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum

__all__ = ["ActivationQuant", "Element", "ScaleType", "Scheme", "WHOLE"]

WHOLE = 0
"""As the extent of a scale's block: all rows of the segment, or all columns."""


class Element(Enum):
    """What one stored weight is.  OCP names: "fp8" alone is not a type."""

    INT4 = "int4"  # unsigned code 0..15, two a byte along K, low nibble = even k; symmetric: zero point 8
    INT8 = "int8"  # signed code -128..127; symmetric: zero point 0
    E4M3 = "e4m3"  # OCP float8 e4m3fn, largest 448
    E2M1 = "e2m1"  # OCP float4: 0 .5 1 1.5 2 3 4 6 and negatives; two a byte, low nibble = even k
    BF16 = "bf16"
    F16 = "f16"
    F32 = "f32"

    @property
    def bits(self) -> int:
        return _BITS[self]

    @property
    def quantized(self) -> bool:
        """Whether codes need a scale to become numbers."""
        return self in (Element.INT4, Element.INT8, Element.E4M3, Element.E2M1)

    @property
    def integer(self) -> bool:
        return self in (Element.INT4, Element.INT8)

    @property
    def packed(self) -> bool:
        """Whether two codes share a byte."""
        return self.bits == 4


_BITS = {
    Element.INT4: 4,
    Element.E2M1: 4,
    Element.INT8: 8,
    Element.E4M3: 8,
    Element.BF16: 16,
    Element.F16: 16,
    Element.F32: 32,
}


class ScaleType(Enum):
    """What one stored scale is.  A scale is always a multiplier, whatever the checkpoint calls it."""

    NONE = "none"
    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    E8M0 = "e8m0"  # u8 exponent b: 2 ** (b - 127)
    E4M3 = "e4m3"

    @property
    def bits(self) -> int:
        return {"none": 0, "f32": 32, "f16": 16, "bf16": 16, "e8m0": 8, "e4m3": 8}[self.value]


class ActivationQuant(Enum):
    """How a kernel rounds the activations before each of the two GEMMs."""

    NONE = "none"  # computed in the compute dtype: "weight-only"
    E4M3_TOKEN = "e4m3_token"  # dynamic, one f32 scale a row
    E4M3_GROUP128 = "e4m3_group128"  # dynamic, one f32 scale for 128 columns of a row
    E4M3_TENSOR = "e4m3_tensor"  # static scale from the checkpoint
    MXFP8 = "mxfp8"  # dynamic e4m3, one e8m0 scale for 32 columns
    MXFP4 = "mxfp4"  # dynamic e2m1, one e8m0 scale for 32 columns
    NVFP4 = "nvfp4"  # e2m1, e4m3 scale for 16 columns, static f32 second-level scale
    INT8_TOKEN = "int8_token"  # dynamic, one f32 scale a row
    INT8_GROUP = "int8_group"  # dynamic, one f32 scale for each weight group of a row

    @property
    def static(self) -> bool:
        """Whether it needs scales that the checkpoint brings."""
        return self in (ActivationQuant.E4M3_TENSOR, ActivationQuant.NVFP4)


@dataclass(frozen=True)
class Scheme:
    """The storage of one weight matrix.

    rows, cols: extent of the block of weights that shares one scale (and zero point), inside a segment;
    1 = each its own, WHOLE = all.  (1, 128) is group 128, (1, WHOLE) channel, (WHOLE, WHOLE) tensor.
    scale: type of the stored scale.  zeros: stored zero points (integer elements only).
    global_scale: one more f32 multiplier for each expert and segment.
    """

    element: Element
    rows: int = 1
    cols: int = WHOLE
    scale: ScaleType = ScaleType.NONE
    zeros: bool = False
    global_scale: bool = False

    def __post_init__(self) -> None:
        if self.rows < 0 or self.cols < 0:
            raise ValueError(f"scheme: block of {self.rows} x {self.cols}: an extent is >= 0 (0 = whole)")
        if self.element.quantized == (self.scale is ScaleType.NONE):
            raise ValueError(f"scheme: {self.element.value} with scale type {self.scale.value}")
        if self.zeros and not self.element.integer:
            raise ValueError(f"scheme: zero points with {self.element.value}: only integer codes have them")

    @property
    def group_size(self) -> int | None:
        """Columns a scale when each row has its own scales; None for other blocks."""
        return self.cols if self.rows == 1 and self.cols != WHOLE else None

    @property
    def name(self) -> str:
        """Stable name: "int4_g128", "int4_channel_zp", "e4m3_block128", "mxfp4", "bf16", ..."""
        e = self.element.value
        if not self.element.quantized:
            return e
        if self.scale is ScaleType.E8M0 and (self.rows, self.cols) == (1, 32) and not self.element.integer:
            return "mxfp4" if self.element is Element.E2M1 else "mxfp8"
        if (self.element, self.rows, self.cols, self.scale) == (Element.E2M1, 1, 16, ScaleType.E4M3):
            return "nvfp4" if self.global_scale else "nvfp4_single"
        match (self.rows, self.cols):
            case (1, 0):
                block = "channel"
            case (0, 0):
                block = "tensor"
            case (1, g):
                block = f"g{g}"
            case (r, c):
                block = f"block{r}" if r == c else f"block{r}x{c}"
        return f"{e}_{block}" + ("_zp" if self.zeros else "") + ("_2nd" if self.global_scale else "")

    @classmethod
    def parse(cls, name: str, scale: ScaleType | None = None) -> Scheme:
        """The scheme called `name`; scale types where the name leaves them open: bf16 for integers, f32 for
        e4m3.  Raises ValueError naming what was expected."""
        if name in ("bf16", "f16", "f32"):
            return cls(Element(name))
        if name in ("mxfp4", "mxfp8"):
            return cls(Element.E2M1 if name == "mxfp4" else Element.E4M3, 1, 32, ScaleType.E8M0)
        if name == "nvfp4":
            return cls(Element.E2M1, 1, 16, ScaleType.E4M3, global_scale=True)
        m = re.fullmatch(r"(int4|int8|e4m3)_(channel|tensor|g(\d+)|block(\d+)(?:x(\d+))?)(_zp)?", name)
        if m is None:
            raise ValueError(
                f"scheme {name!r}: want int4|int8 with _gN or _channel and optional _zp, e4m3_channel|tensor|block128,"
                " mxfp8, mxfp4, nvfp4, bf16, f16 or f32"
            )
        element = Element(m[1])
        rows, cols = 1, WHOLE
        if m[2] == "tensor":
            rows = WHOLE
        elif m[3]:
            cols = int(m[3])
        elif m[4]:
            rows, cols = int(m[4]), int(m[5] or m[4])
        kind = scale or (ScaleType.F32 if element is Element.E4M3 else ScaleType.BF16)
        return cls(element, rows, cols, kind, zeros=bool(m[6]))

    def scale_shape(self, n: int, k: int, segments: int = 1) -> tuple[int, int]:
        """(scale rows, scale columns) of an [n, k] matrix of `segments` equal segments."""
        seg = n // segments
        return segments * (1 if self.rows == WHOLE else -(-seg // self.rows)), (
            1 if self.cols == WHOLE else -(-k // self.cols)
        )

    def nbytes(self, n: int, k: int, segments: int = 1) -> int:
        """Bytes of one expert's [n, k] matrix as formats store it: codes, scales, 4- or 8-bit zero points."""
        sn, sk = self.scale_shape(n, k, segments)
        bits = n * k * self.element.bits + sn * sk * self.scale.bits
        bits += sn * sk * self.element.bits if self.zeros else 0
        return -(-bits // 8) + (4 * segments if self.global_scale else 0)

    def with_scale(self, scale: ScaleType) -> Scheme:
        """The same scheme with another type of scale."""
        return replace(self, scale=scale)
