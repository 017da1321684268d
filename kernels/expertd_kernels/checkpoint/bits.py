"""Fields of 2, 3, 4 or 8 bits in int32 words: unpacking, repacking, and narrow codes as int4 codes.

A packed dimension is one little-endian bit stream: field i occupies bits [i * bits, (i + 1) * bits), low bits first.
With 2, 4 and 8 bits no field straddles two words; with 3 bits 32 fields fill 3 words.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "add_to_fields",
    "every_field",
    "gather_fields",
    "int4_from_narrow",
    "transpose_packed_rows",
    "unpack_fields",
    "words_for",
]


def words_for(fields: int, bits: int) -> int:
    """32-bit words that hold `fields` fields."""
    return -(-fields * bits // 32)


def unpack_fields(words: Tensor, bits: int, count: int, dim: int) -> Tensor:
    """[..., words, ...] int32 packed along `dim` -> u8 values 0 .. 2**bits - 1, `count` of them along `dim`."""
    words = words.movedim(dim, -1)
    if 32 % bits == 0:
        # reshape: a last dimension of one word may have any stride, which view() of a narrower type refuses
        stream = words.reshape(-1).view(torch.uint8).view(*words.shape[:-1], -1)
        out = stream if bits == 8 else _fields_of_bytes(stream, bits).flatten(-2)
    else:
        out = _unpack_straddling(words, bits).flatten(-2)
    return out[..., :count].movedim(-1, dim)


def _fields_of_bytes(stream: Tensor, bits: int) -> Tensor:
    """[...] u8 -> [..., 8 / bits] u8 (bits 2, 4).  In numpy: half the time for a few kilobytes."""
    source, out = stream.numpy(), np.empty((*stream.shape, 8 // bits), np.uint8)
    for i in range(8 // bits):
        np.right_shift(source, i * bits, out=out[..., i])
    out &= (1 << bits) - 1
    return torch.from_numpy(out)


def _unpack_straddling(words: Tensor, bits: int) -> Tensor:
    """[..., W] int32 -> [..., W / bits, 32] u8; W is padded to a multiple of `bits` words."""
    spare = -words.shape[-1] % bits
    words = torch.nn.functional.pad(words, (0, spare)) if spare else words
    unit = words.reshape(*words.shape[:-1], -1, bits).to(torch.int64) & 0xFFFFFFFF
    out = torch.empty(*unit.shape[:-1], 32, dtype=torch.uint8)
    for i in range(32):
        word, shift = divmod(bits * i, 32)
        value = unit[..., word] >> shift
        if shift + bits > 32:
            value = value | (unit[..., word + 1] << (32 - shift))
        out[..., i] = value & ((1 << bits) - 1)
    return out


def add_to_fields(words: Tensor, bits: int) -> Tensor:
    """Undo "stored = zero - 1" on packed int32 words.

    The writers subtract 1 from every field by one 32-bit subtraction, so that a zero point of 0 borrows from its
    neighbour; adding the same constant with wrap-around is the exact inverse.  (bits 2, 4, 8.)
    """
    return words + every_field(1, bits)


def every_field(value: int, bits: int) -> int:
    """The int32 word whose fields are all `value` (bits 2, 4, 8)."""
    word = sum(value << at for at in range(0, 32, bits))
    return word - (1 << 32) if word >= 1 << 31 else word


def int4_from_narrow(codes: Tensor, bits: int) -> Tensor:
    """Codes of 2 or 3 bits, symmetric around 2**(bits - 1), as codes of 4 bits symmetric around 8: exact."""
    return codes + (8 - (1 << (bits - 1)))


def gather_fields(words: Tensor, columns: Tensor, bits: int) -> Tensor:
    """[K * bits / 32, N] int32 packed along K -> the same with field j taken from field columns[j] (bits 4 or 8)."""
    per_word = 32 // bits
    index = columns.long().view(-1, per_word)
    shift = (index % per_word * bits).to(torch.int32)
    out = torch.zeros_like(words)
    for i in range(per_word):
        field = words.index_select(0, index[:, i] // per_word)
        field >>= shift[:, i, None]
        field &= (1 << bits) - 1
        field <<= bits * i
        out |= field
    return out


def transpose_packed_rows(words: Tensor) -> Tensor:
    """[K, C] int32, eight columns a word -> [K/8, 8, C] int32, eight rows k a word (K % 8 == 0).

    Nibble i of word [k, c] becomes nibble k % 8 of word [k / 8, i, c]: an 8 x 8 transposition of nibbles in three
    steps, each of which swaps two off-diagonal blocks of ever smaller units: 16, 8 and 4 bits.
    """
    K, C = words.shape
    w = words.view(K // 8, 8, C)
    for half, mask in ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F)):
        shift = 4 * half
        pairs = w.view(K // 8, 4 // half, 2, half, C)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        w = torch.empty(K // 8, 8, C, dtype=torch.int32)
        out = w.view(K // 8, 4 // half, 2, half, C)
        torch.bitwise_or(low & mask, (high & mask) << shift, out=out[:, :, 0])
        torch.bitwise_or((low >> shift) & mask, high & ~mask, out=out[:, :, 1])
    return w
