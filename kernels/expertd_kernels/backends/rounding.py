"""Activations rounded for packages whose kernels take them rounded: plain torch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["E4M3_MAX", "round_groups", "round_mx"]

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
