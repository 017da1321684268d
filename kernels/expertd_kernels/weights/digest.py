"""A number for the weights of each expert: equal where two servers hold the same, whatever they packed them to.

Of all bytes of the canonical tensors, so a hole in a file that was copied badly shows as well as another fine-tune, at
the speed of memory and on whatever device they are: 64-bit words are added by blocks of BLOCK_BYTES, and the blocks'
sums with a factor of their place, modulo 2 ** 64; 32 bits of it are told.  It tells mistakes, not forgeries.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

from expertd_kernels.weights.canonical import Weights

# Why it is so: decision 115 in DECISIONS.md.
__all__ = ["digests_of", "expert_digests", "expert_totals"]

BLOCK_BYTES = 4096
_ODD = 0x9E3779B97F4A7C15 - 2**64
"""2 ** 64 / the golden ratio, odd, as torch's int64 has it."""


def expert_digests(weights: Weights) -> Tensor:
    """[E] int64, 0 to 2 ** 32 - 1, on the CPU; of the weights that `weights` were rounded from, where they know."""
    return weights.origin if weights.origin is not None else digests_of(expert_totals(weights))


def expert_totals(weights: Weights) -> Tensor:
    """[E] int64 on the weights' device, which is not waited for: what digests_of() takes."""
    total = torch.zeros(weights.num_experts, dtype=torch.int64, device=weights.device)
    for name, tensor in _tensors(weights):
        total += _sums(tensor) * (zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape[1:])}".encode()) | 1)
    return total


def digests_of(totals: Tensor) -> Tensor:
    """[E] int64 on the CPU."""
    total = totals.cpu()
    total = (total ^ (total >> 29)) * _ODD  # the low bits of a sum depend on low bits alone
    return (total >> 32) & 0xFFFFFFFF


def _tensors(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    for matrix in ("w13", "w2"):
        for name, tensor in getattr(weights, matrix).tensors():
            yield f"{matrix}.{name}", tensor
    if weights.input_scales is not None:
        yield "input_scales", weights.input_scales


def _sums(tensor: Tensor) -> Tensor:
    """[E] int64 of [E, ...]."""
    raw = tensor.reshape(tensor.shape[0], -1).view(torch.uint8)
    whole = raw.shape[1] // BLOCK_BYTES * BLOCK_BYTES
    rest = raw[:, whole:]
    parts = [_blocks(torch.nn.functional.pad(rest, (0, BLOCK_BYTES - rest.shape[1])))]
    if whole:
        body = raw[:, :whole]
        parts.append(_blocks(body if raw.shape[1] % 8 == 0 and body.data_ptr() % 8 == 0 else body.contiguous()))
    sums = torch.cat(parts, dim=1)
    place = torch.arange(1, sums.shape[1] + 1, dtype=torch.int64, device=sums.device) * _ODD | 1
    return (sums * place).sum(dim=1)


def _blocks(raw: Tensor) -> Tensor:
    """[E, n * BLOCK_BYTES] u8 -> [E, n] int64."""
    return raw.view(torch.int64).view(raw.shape[0], -1, BLOCK_BYTES // 8).sum(dim=2)
