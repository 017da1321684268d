"""Random weights made by counting: word i of a stream is a hash of i and of the stream's key.

So a part of a layer is drawn alone, experts in any order, and the bits are the same on every device: only integer
arithmetic modulo 2 ** 64, tables made on the CPU, and roundings that IEEE 754 fixes are used.

    h(i) = g(g(i * GOLDEN + key) * ODD)  with  g(z) = z ^ (z >> 32)      all modulo 2 ** 64
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import cache
from statistics import NormalDist

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertd_kernels.weights.canonical import CODE_DTYPE, SCALE_DTYPE, QuantTensor
from expertd_kernels.weights.scheme import Element, ScaleType, Scheme

# Why it is so: decision 77 in DECISIONS.md.
__all__ = ["CODE_SPREAD", "counted_matrix", "words"]

GOLDEN, ODD = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
CODE_SPREAD = {Element.INT4: 4.61, Element.INT8: 73.6, Element.E2M1: 2.93, Element.E4M3: 64.0}
"""Standard deviation of the codes that are drawn: uniform ones; of e4m3, normal ones."""
CPU_WORDS, DEVICE_WORDS = 1 << 15, 1 << 21
"""8-byte words that are made together: what stays in a core's cache; what fills an accelerator."""


def _key(seed: int, what: str) -> int:
    """Of a stream: its seed and what is drawn from it."""
    return int.from_bytes(hashlib.sha256(f"{seed} {what}".encode()).digest()[:8], "little")


def _signed(z: int) -> int:
    """The int64 with the bits of z modulo 2 ** 64."""
    z &= (1 << 64) - 1
    return z - (1 << 64) if z >> 63 else z


def words(keys: Sequence[int], first: int, count: int, device: torch.device) -> Tensor:
    """[len(keys), count] int64: words first.. of each key's stream."""
    if device.type == "cpu":
        return torch.from_numpy(np.stack([_words(k + first * GOLDEN, count) for k in keys]).view(np.int64))
    low = 0xFFFFFFFF  # torch shifts the sign in
    z = torch.arange(first, first + count, device=device).mul_(_signed(GOLDEN))
    z = z + torch.tensor([_signed(k) for k in keys], device=device)[:, None]
    z.bitwise_xor_((z >> 32).bitwise_and_(low)).mul_(_signed(ODD))
    return z.bitwise_xor_((z >> 32).bitwise_and_(low))


@cache
def _steps(count: int) -> NDArray[np.uint64]:
    steps: NDArray[np.uint64] = np.arange(count, dtype=np.uint64) * np.uint64(GOLDEN)
    return steps


def _words(start: int, count: int) -> NDArray[np.uint64]:
    """h of `start` and the count - 1 numbers that are GOLDEN apart."""
    z: NDArray[np.uint64] = _steps(count) + np.uint64(start & ((1 << 64) - 1))
    t = z >> np.uint64(32)
    z ^= t
    z *= np.uint64(ODD)
    np.right_shift(z, np.uint64(32), out=t)
    z ^= t
    return z


Take = Callable[[Tensor], Tensor]
"""Words [e, n] int64 -> values [e, n * a fixed number]."""


def _halves(z: Tensor) -> Tensor:
    """Numbers 0..65535 as int32, four a word."""
    return z.view(torch.int16).to(torch.int32).bitwise_and_(0xFFFF)


@cache
def _normal(spread: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[256] the means of 256 equal parts of a normal distribution of this standard deviation, as bits for e4m3."""
    of = NormalDist(0.0, spread).inv_cdf
    table = torch.tensor([of((i + 0.5) / 256) for i in range(256)]).to(dtype)
    return (table.view(torch.uint8) if dtype.itemsize == 1 else table).to(device)


def _normals(spread: float, out: Tensor) -> Take:
    """Normal numbers of out's type, eight a word."""
    table = _normal(spread, out.dtype, out.device)

    def take(z: Tensor) -> Tensor:
        found = torch.index_select(table, 0, z.view(torch.uint8).flatten().int())
        return found.view(out.dtype).view(len(z), -1)

    return take


def _fill(out: Tensor, seeds: Sequence[int], what: str, a_word: int, take: Take) -> Tensor:
    """out [E, ...]: for each seed its stream called `what`, as `take` reads it, a_word values a word."""
    flat = out.view(len(out), -1)
    keys, size = [_key(s, what) for s in seeds], flat.shape[1]
    count, at_once = -(-size // a_word), CPU_WORDS if out.device.type == "cpu" else DEVICE_WORDS
    experts, step = max(1, at_once // count), min(count, at_once)
    for e in range(0, len(keys), experts):
        for first in range(0, count, step):
            part = flat[e : e + experts, first * a_word : (first + step) * a_word]
            z = words(keys[e : e + experts], first, min(step, count - first), out.device)
            part.copy_(take(z)[:, : part.shape[1]])
    return out


def counted_matrix(
    scheme: Scheme,
    shape: tuple[int, int, int],
    seeds: Sequence[int],
    name: str,
    *,
    segments: int = 1,
    bias: bool = False,
    device: torch.device,
) -> QuantTensor:
    """[E, N, K]: expert i from seeds[i]; name: of the matrix, whose streams are its own."""
    E, N, K = shape
    element, std = scheme.element, 1.0 / math.sqrt(K)

    def empty(*size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((E, *size), dtype=dtype, device=device)

    def fill(out: Tensor, field: str, a_word: int, take: Take) -> Tensor:
        return _fill(out, seeds, f"{name} {field}", a_word, take)

    def around(unit: float) -> Take:
        """From half of the unit to one and a half."""
        return lambda z: _halves(z).to(torch.float32).mul_(2.0**-16).add_(0.5).mul_(unit)

    scales = zeros = global_scales = None
    if element.quantized:
        scale_shape = scheme.scale_shape(N, K, segments)
        unit = std / CODE_SPREAD[element]
        if scheme.global_scale:
            global_scales = fill(empty(segments, dtype=torch.float32), "global", 4, around(unit / 4.0))
            unit = 4.0
        take = around(unit)
        if scheme.scale is ScaleType.E8M0:
            least = 127 + round(math.log2(unit)) - 1
            take = lambda z: _halves(z).remainder_(3).add_(least)  # noqa: E731
        scales = fill(empty(*scale_shape, dtype=SCALE_DTYPE[scheme.scale]), "scales", 4, take)
        if scheme.zeros:
            zero: Take = lambda z: z.view(torch.uint8) & 15  # noqa: E731
            if element is Element.INT8:
                zero = lambda z: z.view(torch.uint8).to(torch.int16).remainder_(41).sub_(20)  # noqa: E731
            zeros = fill(empty(*scale_shape, dtype=CODE_DTYPE[element]), "zeros", 8, zero)
    codes = empty(N, -(-K // 2) if element.packed else K, dtype=CODE_DTYPE[element])
    if element.packed:
        fill(codes, "codes", 8, lambda z: z.view(torch.uint8))
        if K % 2:
            codes[..., -1] &= 15
    elif element is Element.INT8:
        fill(codes, "codes", 8, lambda z: z.view(torch.int8).clamp_(min=-127))
    else:
        fill(codes, "codes", 8, _normals(64.0 if element is Element.E4M3 else std, codes))
    b = None
    if bias:
        b = empty(N, dtype=torch.float32)
        fill(b, "bias", 8, _normals(0.1, b))
    return QuantTensor(scheme, shape, codes, scales, zeros, global_scales, None, b, segments)
