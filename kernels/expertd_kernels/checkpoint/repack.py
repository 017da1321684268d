"""Moving packed fields into canonical place, fast: through the C++ library where it is built, else with torch.

Both ways give the same bits (the tests compare them); only the speed differs, by a factor of 3 to 8.  The library
reads the file itself, in pieces that stay in the cache until they are written to their place, without the interpreter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from expertd_kernels.checkpoint import bits
from expertd_kernels.checkpoint.errors import CheckpointError
from expertd_kernels.checkpoint.tensors import Stored
from expertd_kernels.native.library import kernel_error, library

log = logging.getLogger(__name__)

__all__ = ["Repacked", "gather_rows", "transpose_columns", "transpose_rows", "uses_library"]


@cache
def uses_library() -> bool:
    """Whether the C++ library is there; says so once where it is not, because loading takes longer then."""
    error = kernel_error()
    if error:
        log.warning("checkpoint: packed weights are repacked with torch, 3 to 8 times slower, because %s", error)
    return not error


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
    if not uses_library() or not words.nbytes:
        read = words.read()
        return (read ^ flip if flip else read).t()
    run = library().expertd_repack_rows
    return Repacked((cols, rows), lambda out: _run(words, run, rows, cols, flip & 0xFFFFFFFF, out))


def gather_rows(words: Stored, columns: Tensor, field_bits: int, flip: int = 0) -> Tensor | Repacked:
    """The same, with field j along K taken from field columns[j] ([K] int32, field_bits 4 or 8)."""
    rows, cols = words.shape
    if not uses_library() or not words.nbytes:
        return (bits.gather_fields(words.read(), columns, field_bits) ^ flip).t()
    order, run, k = columns.contiguous(), library().expertd_repack_gather, rows * 32 // field_bits

    def fill(out: int) -> None:
        _run(words, run, k, cols, field_bits, order.data_ptr(), flip & 0xFFFFFFFF, out)

    return Repacked((cols, rows), fill)


def transpose_columns(words: Stored, order: Sequence[int]) -> Tensor | Repacked:
    """[K, C] int32, nibble i of word c in column 8c + order[i] -> [8C, K/8] int32 packed along K (K % 8 == 0)."""
    K, C = words.shape
    if uses_library() and words.nbytes:
        run, places = library().expertd_repack_columns, bytes(order)
        return Repacked((8 * C, K // 8), lambda out: _run(words, run, K, C, places, out))
    turned = bits.transpose_packed_rows(words.read())
    made = torch.empty(8 * C, K // 8, dtype=torch.int32)
    for i, column in enumerate(order):
        made[column::8] = turned[:, i].t()
    return made


def _run(words: Stored, function: Callable[..., int], *arguments: object) -> None:
    """Call a function of the library on a tensor's bytes in its file."""
    error = function(words.shard.fd, words.offset, *arguments)
    if error == _READ_FAILED:
        words.read()  # says what is wrong with the file
        raise CheckpointError(f"{words.name}: reading {words.file} failed once and then did not; try again")
    if error:
        raise (
            MemoryError("repacking") if error == _NO_MEMORY else ValueError("repacking: sizes or columns out of range")
        )
    words.shard.counter.add(words.nbytes)


_NO_MEMORY, _READ_FAILED = 2, 4  # of csrc/abi.h
