"""Weights that tell apart two ways of rounding: ties, zeros of both signs, subnormals, the largest numbers, powers of
two; and the bits that the schemes' rules give for them, step by step in numpy's f32."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float32]
F32 = np.float32


def adversarial(experts: int, rows: int, columns: int, seed: int = 0) -> Tensor:
    """[experts, rows, columns] f32, rows >= 16; finite."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    def whole(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (experts, columns), generator=g).float()

    w = draw(experts, rows, columns) * torch.exp2(whole(-30, 30)[:, :1, None])
    w[:, 0], w[:, 1] = 0.0, -0.0
    w[:, 2] = 1e-40 * draw(experts, columns)  # subnormal in f32
    w[:, 3], w[:, 4] = whole(-8, 8), whole(-16, 16) / 2  # ties of the scales, ties of the codes
    w[:, 5] = 3e38 * draw(experts, columns).clamp(-1, 1)
    w[:, 6] = torch.exp2(whole(-140, 127))
    w[:, 7], w[:, 8, ::2] = 2.0**-127, -(2.0**-126)
    w[:, 9] = whole(-448, 449)
    w[:, 10] = whole(-6, 7) + 0.25 * whole(-1, 2)
    w[:, 11, 1:] = 0.0  # one weight that is not zero
    w[:, 12] = torch.nextafter(whole(-16, 16) / 2, torch.tensor(torch.inf))
    w[:, 13] = w[:, 13].bfloat16().float()
    return w


def _stored(scale: Floats) -> Floats:
    s = scale.astype(ml_dtypes.bfloat16).astype(F32)
    return np.where(s == 0, F32(1), s)


def _least(b: Floats, tries: list[tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
    """(numbers, scale) of the try with the least error; errors in Python's whole numbers."""
    a = np.abs(b).max(1)
    exponent = np.where(a >= 2.0**-126, np.frexp(a)[1], -126)
    unit = np.ldexp(F32(1), np.minimum(11 - exponent, 126)).astype(F32)[:, None]
    errors = []
    for numbers, scale in tries:
        whole = np.rint(numbers * (scale[:, None] * unit) - b * unit)
        errors.append((whole.astype(np.int64) ** 2).sum(1))
    best = np.argmin(np.stack(errors), 0)  # of equal ones the first
    pick = np.arange(len(b))
    return np.stack([n for n, _ in tries])[best, pick], np.stack([s for _, s in tries])[best, pick]


def int4_bits(b: Floats) -> tuple[NDArray[np.uint8], Floats]:
    """Blocks [R, C] -> codes 0 to 15 [R, C], bf16 scales as f32 [R]."""
    low, high = b.min(1), b.max(1)
    extreme = np.where(high >= -low, -high, -low)
    tries = []
    for divisor in (8.0, 8.5, 9.0, 9.75, 10.5):
        s = _stored(extreme / F32(divisor))
        tries.append((np.clip(np.rint(b / s[:, None]), -8, 7), s))
    numbers, scale = _least(b, tries)
    return (numbers + 8).astype(np.uint8), scale


def mxfp4_bits(b: Floats) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Blocks [R, 32] -> e2m1 codes [R, 32], e8m0 scales [R]."""
    a = np.abs(b).max(1)
    floor = np.where(a == 0, 0, np.maximum(np.frexp(a)[1] - 3, -127))
    exponents = [floor, np.minimum(floor + 1, 127)]
    scales = [np.ldexp(F32(1), e).astype(F32) for e in exponents]
    tries = [((b / s[:, None]).astype(ml_dtypes.float4_e2m1fn).astype(F32), s) for s in scales]
    numbers, scale = _least(b, tries)
    codes = np.where(numbers == 0, F32(0), numbers).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return codes, (np.frexp(scale)[1] - 1 + 127).astype(np.uint8)


def int8_bits(b: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Blocks [R, C] -> codes [R, C], bf16 scales as f32 [R]."""
    s = _stored(np.abs(b).max(1) / F32(127))
    return np.clip(np.rint(b / s[:, None]), -128, 127).astype(np.int8), s


def e4m3_bits(b: Floats) -> tuple[NDArray[np.uint8], Floats]:
    """Blocks [R, C] -> e4m3 codes' bytes [R, C], f32 scales [R]."""
    s = np.abs(b).max(1) / F32(448)
    s = np.where(s == 0, F32(1), s)
    return np.clip(b / s[:, None], -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8), s
