"""What the readers of integer formats share: sizes, and the canonical scheme of a bit width."""

from __future__ import annotations

from dataclasses import dataclass

from expertd_kernels.checkpoint.readers.protocol import Unit
from expertd_kernels.checkpoint.tensors import Stored
from expertd_kernels.weights.scheme import Element, ScaleType, Scheme

__all__ = ["GroupInfo", "check_extent", "integer_scheme", "scale_type"]

_SCALE_TYPES = {"F16": ScaleType.F16, "BF16": ScaleType.BF16, "F32": ScaleType.F32}


@dataclass(frozen=True)
class GroupInfo:
    """[n, k] codes of `bits` bits in `groups` groups of `cols` columns (0 = one group).

    symmetric: the configuration says that every zero point is the middle of the range
    """

    n: int
    k: int
    bits: int
    cols: int
    groups: int
    scale: ScaleType
    symmetric: bool


def check_extent(unit: Unit, what: str, extent: int, size: int) -> None:
    """A block of `extent` rows or columns either divides `size` of them or is a power of two: any other one (129 where
    128 was meant) would fit the same number of scales and place each of them elsewhere."""
    if 0 < extent < size and size % extent and extent & (extent - 1):
        raise unit.error(f"{what} {extent} in the quantization config", f"a power of two, or what divides {size}")


def scale_type(scales: Stored) -> ScaleType:
    return _SCALE_TYPES[scales.dtype]


def integer_scheme(info: GroupInfo) -> tuple[Scheme, tuple[str, ...]]:
    """The canonical scheme, and what to tell the user: 2- and 3-bit codes are held as int4."""
    element = Element.INT8 if info.bits == 8 else Element.INT4
    notes = (f"{info.bits}-bit codes are held as int4 (exact)",) if info.bits < 4 else ()
    return Scheme(element, 1, info.cols, info.scale, zeros=not info.symmetric), notes
