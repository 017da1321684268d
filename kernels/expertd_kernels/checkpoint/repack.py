"""Moving packed fields into canonical place, fast: through the C++ library where it is built, else with torch.

Both ways give the same bits (the tests compare them); only the speed differs, by a factor of 3 to 8.  The library
works on pieces that stay in the cache between being read from the file and being written to their place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertd_kernels.backends.cpu_native import kernel_error, library
from expertd_kernels.checkpoint import bits
from expertd_kernels.checkpoint.tensors import Stored

__all__ = ["Repacked", "gather_rows", "transpose_columns", "transpose_rows", "uses_library"]

PIECE_BYTES = 192 << 10
"""Of a tensor that is read, and still in the second-level cache (256 KiB and more today) when it is repacked."""


@cache
def uses_library() -> bool:
    return not kernel_error()


@dataclass(frozen=True, eq=False)
class Repacked:
    """[rows, cols] int32 words that are made where they are wanted: fill(address) writes them there."""

    shape: tuple[int, int]
    fill: Callable[[int], None]

    def read(self) -> Tensor:
        out = torch.empty(self.shape, dtype=torch.int32)
        self.read_into(out)
        return out

    def read_into(self, out: Tensor) -> None:
        """Fill a contiguous tensor of the same number of bytes."""
        if out.numel() * out.element_size() != 4 * self.shape[0] * self.shape[1] or not out.is_contiguous():
            raise ValueError(f"repacking: {self.shape} words into {out.dtype} {tuple(out.shape)}")
        self.fill(out.data_ptr())


def transpose_rows(words: Stored, flip: int = 0) -> Tensor | Repacked:
    """[K/8, N] int32 packed along K (or [K/4, N] with bytes) -> [N, K/8], each word XORed with `flip`."""
    rows, cols = words.shape
    if not uses_library():
        read = words.read()
        return (read ^ flip if flip else read).t()
    run, mask = library().expertd_repack_rows, flip & 0xFFFFFFFF

    def fill(out: int) -> None:
        for first, count, piece in _pieces(words, multiple=16):
            _check(run(piece, count, cols, mask, out + 4 * first, rows))

    return Repacked((cols, rows), fill)


def gather_rows(words: Stored, columns: Tensor, field_bits: int, flip: int = 0) -> Tensor | Repacked:
    """The same, with field j along K taken from field columns[j] ([K] int32, field_bits 4 or 8)."""
    rows, cols = words.shape
    if not uses_library():
        return (bits.gather_fields(words.read(), columns, field_bits) ^ flip).t()
    order, run = columns.contiguous(), library().expertd_repack_gather
    k, mask = rows * 32 // field_bits, flip & 0xFFFFFFFF

    def fill(out: int) -> None:
        read = words.read()
        _check(run(read.data_ptr(), k, cols, field_bits, order.data_ptr(), mask, out))

    return Repacked((cols, rows), fill)


def transpose_columns(words: Stored, order: Sequence[int]) -> Tensor | Repacked:
    """[K, C] int32, nibble i of word c in column 8c + order[i] -> [8C, K/8] int32 packed along K (K % 8 == 0)."""
    K, C = words.shape
    if uses_library():
        run, places = library().expertd_repack_columns, bytes(order)

        def fill(out: int) -> None:
            for first, count, piece in _pieces(words, multiple=128):
                _check(run(piece, count, C, places, out + first // 2, K // 8))

        return Repacked((8 * C, K // 8), fill)
    turned = bits.transpose_packed_rows(words.read())
    made = torch.empty(8 * C, K // 8, dtype=torch.int32)
    for i, column in enumerate(order):
        made[column::8] = turned[:, i].t()
    return made


_scratch = threading.local()


def _pieces(words: Stored, multiple: int) -> Iterator[tuple[int, int, int]]:
    """(first row, rows, address) of a stored matrix of words, piece by piece of a multiple of so many rows.

    The buffer is the thread's own and used again for each piece: it stays in the cache, and no page is fresh.
    """
    rows, row_bytes = words.shape[0], 4 * words.shape[1]
    step = max(PIECE_BYTES // max(row_bytes, 1) // multiple, 1) * multiple
    need = min(step, rows) * row_bytes
    buffer: NDArray[np.uint8] | None = getattr(_scratch, "buffer", None)
    if buffer is None or buffer.nbytes < need:
        buffer = _scratch.buffer = np.empty(need, np.uint8)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        words.shard.fill(buffer[: count * row_bytes], words.offset + first * row_bytes, words.name)
        yield first, count, buffer.ctypes.data


def _check(error: int) -> None:
    if error:
        raise MemoryError("repacking") if error == 2 else ValueError("repacking: sizes or columns out of range")
