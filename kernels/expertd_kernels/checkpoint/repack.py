"""Moving packed fields into canonical place, fast: through the C++ library where it is built, else with torch.

Both ways give the same bits (the tests compare them); only the speed differs, by a factor of 3 to 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from expertd_kernels.backends.cpu_native import kernel_error, library
from expertd_kernels.checkpoint import bits

__all__ = ["gather_rows", "transpose_columns", "transpose_rows", "uses_library"]


@cache
def uses_library() -> bool:
    return not kernel_error()


def transpose_rows(words: Tensor, flip: int = 0) -> Tensor:
    """[K/8, N] int32 packed along K (or [K/4, N] with bytes) -> [N, K/8], each word XORed with `flip`."""
    rows, cols = words.shape
    if not uses_library():
        return (words ^ flip if flip else words).t()
    out = torch.empty(cols, rows, dtype=torch.int32)
    _check(library().expertd_repack_rows(words.data_ptr(), rows, cols, flip & 0xFFFFFFFF, out.data_ptr()))
    return out


def gather_rows(words: Tensor, columns: Tensor, field_bits: int, flip: int = 0) -> Tensor:
    """The same, with field j along K taken from field columns[j] ([K] int32, field_bits 4 or 8)."""
    rows, cols = words.shape
    k = rows * 32 // field_bits
    if not uses_library():
        return (bits.gather_fields(words, columns, field_bits) ^ flip).t()
    out = torch.empty(cols, rows, dtype=torch.int32)
    order = columns.contiguous()
    _check(
        library().expertd_repack_gather(
            words.data_ptr(), k, cols, field_bits, order.data_ptr(), flip & 0xFFFFFFFF, out.data_ptr()
        )
    )
    return out


def transpose_columns(words: Tensor, order: Sequence[int]) -> Tensor:
    """[K, C] int32, nibble i of word c in column 8c + order[i] -> [8C, K/8] int32 packed along K (K % 8 == 0)."""
    K, C = words.shape
    out = torch.empty(8 * C, K // 8, dtype=torch.int32)
    if uses_library():
        _check(library().expertd_repack_columns(words.data_ptr(), K, C, bytes(order), out.data_ptr()))
        return out
    turned = bits.transpose_packed_rows(words)
    for i, column in enumerate(order):
        out[column::8] = turned[:, i].t()
    return out


def _check(error: int) -> None:
    if error:
        raise MemoryError("repacking") if error == 2 else ValueError("repacking: sizes or columns out of range")
