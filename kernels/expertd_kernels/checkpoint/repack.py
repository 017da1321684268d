"""Moving packed fields into canonical place, fast: through the C++ library where it is built, else with torch.

Both ways give the same bits (the tests compare them); only the speed differs, by a factor of 3 to 8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from expertd_kernels.backends.cpu_native import kernel_error, library
from expertd_kernels.checkpoint import bits

__all__ = ["Repacked", "gather_rows", "transpose_columns", "transpose_rows", "uses_library"]


@cache
def uses_library() -> bool:
    return not kernel_error()


@dataclass(frozen=True, eq=False)
class Repacked:
    """[rows, cols] int32 words that are made where they are wanted: fill(address) writes them there."""

    shape: tuple[int, int]
    fill: Callable[[int], int]

    def read(self) -> Tensor:
        out = torch.empty(self.shape, dtype=torch.int32)
        self.read_into(out)
        return out

    def read_into(self, out: Tensor) -> None:
        """Fill a contiguous tensor of the same number of bytes."""
        if out.numel() * out.element_size() != 4 * self.shape[0] * self.shape[1] or not out.is_contiguous():
            raise ValueError(f"repacking: {self.shape} words into {out.dtype} {tuple(out.shape)}")
        if error := self.fill(out.data_ptr()):
            raise MemoryError("repacking") if error == 2 else ValueError("repacking: sizes or columns out of range")


def transpose_rows(words: Tensor, flip: int = 0) -> Tensor | Repacked:
    """[K/8, N] int32 packed along K (or [K/4, N] with bytes) -> [N, K/8], each word XORed with `flip`."""
    rows, cols = words.shape
    if not uses_library():
        return (words ^ flip if flip else words).t()
    words, run = words.contiguous(), library().expertd_repack_rows
    return Repacked((cols, rows), lambda out: run(words.data_ptr(), rows, cols, flip & 0xFFFFFFFF, out))


def gather_rows(words: Tensor, columns: Tensor, field_bits: int, flip: int = 0) -> Tensor | Repacked:
    """The same, with field j along K taken from field columns[j] ([K] int32, field_bits 4 or 8)."""
    rows, cols = words.shape
    if not uses_library():
        return (bits.gather_fields(words, columns, field_bits) ^ flip).t()
    words, order, run = words.contiguous(), columns.contiguous(), library().expertd_repack_gather
    k, mask = rows * 32 // field_bits, flip & 0xFFFFFFFF
    return Repacked((cols, rows), lambda out: run(words.data_ptr(), k, cols, field_bits, order.data_ptr(), mask, out))


def transpose_columns(words: Tensor, order: Sequence[int]) -> Tensor | Repacked:
    """[K, C] int32, nibble i of word c in column 8c + order[i] -> [8C, K/8] int32 packed along K (K % 8 == 0)."""
    K, C = words.shape
    if uses_library():
        words, run = words.contiguous(), library().expertd_repack_columns
        return Repacked((8 * C, K // 8), lambda out: run(words.data_ptr(), K, C, bytes(order), out))
    out = torch.empty(8 * C, K // 8, dtype=torch.int32)
    turned = bits.transpose_packed_rows(words)
    for i, column in enumerate(order):
        out[column::8] = turned[:, i].t()
    return out
