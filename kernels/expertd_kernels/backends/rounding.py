"""Activations rounded for packages whose kernels take them rounded: plain torch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from expertd_kernels.weights.canonical import pack_nibbles
from expertd_kernels.weights.quantize import round_e2m1

__all__ = ["E4M3_MAX", "round_groups", "round_mx", "round_nvfp4", "round_static"]

E4M3_MAX = 448.0


def round_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """[M, H] -> e4m3 [M, H], f32 [M, H / 128]: one scale for 128 columns of a row, largest value at 448."""
    M, H = x.shape
    groups = x.float().view(M, H // 128, 128)
    scale = (groups.abs().amax(dim=2) / E4M3_MAX).clamp_min(1e-12)
    codes = (groups / scale[..., None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.view(M, H), scale


def round_mx(x: Tensor) -> tuple[Tensor, Tensor]:
    """[M, H] -> e4m3 [M, H], u8 exponents [M, H / 32]: the smallest power of two under which nothing exceeds 448."""
    M, H = x.shape
    groups = x.float().view(M, H // 32, 32)
    mantissa, exponent = torch.frexp(groups.abs().amax(dim=2) / E4M3_MAX)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    exponent = torch.where(mantissa == 0, 0, exponent).clamp(-127, 127)
    codes = (groups * torch.exp2(-exponent.float())[..., None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.view(M, H), (exponent + 127).to(torch.uint8)


def round_static(x: Tensor, scale: Tensor) -> Tensor:
    """[M, H], one f32 scale -> e4m3 [M, H]: x / scale, saturating at 448."""
    return (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def round_nvfp4(x: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """[M, H], one f32 second-level scale -> e2m1 [M, H / 2] u8, e4m3 scales [M, H / 16]: for 16 columns the scale that
    takes their largest value to 6, as far as e4m3 holds it; low nibble = even column."""
    M, H = x.shape
    groups = x.float().view(M, H // 16, 16)
    scale = (groups.abs().amax(dim=2) / (6.0 * second)).clamp_max(E4M3_MAX).to(torch.float8_e4m3fn)
    step = (scale.float() * second)[..., None]
    numbers = round_e2m1(torch.where(step > 0, groups / step, 0.0))
    a = numbers.abs()
    codes = torch.where(a < 2, a * 2, torch.where(a < 4, a + 2, a * 0.5 + 4)) + 8 * (numbers < 0)
    return pack_nibbles(codes.view(M, H)), scale
