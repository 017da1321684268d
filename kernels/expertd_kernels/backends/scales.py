"""Scales as f32 for packages that read nothing else, and back to what was stored, bit for bit; signs that they do not
read."""

from __future__ import annotations

import torch
from torch import Tensor

from expertd_kernels.common.refused import Refused
from expertd_kernels.weights.canonical import SCALE_DTYPE, powers_of_two
from expertd_kernels.weights.scheme import ScaleType

__all__ = ["as_f32", "as_stored", "refuse_signs"]


def as_f32(scales: Tensor, kind: ScaleType) -> Tensor:
    """Stored scales as f32 numbers, exact: an e8m0 byte b is 2 ** (b - 127)."""
    return powers_of_two(scales.to(torch.int32) - 127) if kind is ScaleType.E8M0 else scales.float()


def as_stored(numbers: Tensor, kind: ScaleType) -> Tensor:
    """The inverse of as_f32."""
    if kind is not ScaleType.E8M0:
        return numbers.to(SCALE_DTYPE[kind])
    mantissa, exponent = torch.frexp(numbers)  # a power of two is 0.5 * 2 ** exponent
    assert bool((mantissa == 0.5).all()), "these scales were no powers of two"
    return (exponent + 126).to(torch.uint8)


def refuse_signs(scales: Tensor) -> None:
    """Refused where e4m3 scales of nvfp4 weights have a sign, which packages' kernels do not read."""
    if bool((scales.view(torch.uint8) & 0x80).any()):
        raise Refused("negative scales of nvfp4 weights are not computed: the kernel reads them without sign")
