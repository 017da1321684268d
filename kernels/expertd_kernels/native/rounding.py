"""Unquantized weights rounded on a CPU in one pass: the bits of weights/quantize.py, whose torch operations pass over
them some sixty times.  docs/log/rounding.md has what it takes.
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from expertd_kernels.native.library import Context, Rounding, context, kernel_error, library

__all__ = ["Kind", "round_rows", "rounds"]

Kind = Literal["int4", "int4_zeros", "mxfp4", "nvfp4", "e4m3"]
_KINDS: tuple[Kind, ...] = ("int4", "int4_zeros", "mxfp4", "nvfp4", "e4m3")
_SOURCES = {torch.bfloat16: 4, torch.float32: 6}
_SCALES = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3, torch.uint8: 4, torch.float8_e4m3fn: 5}
"""Numbers of abi.h."""
_LANES = 8


def rounds(columns: int, block: int) -> bool:
    """Whether round_rows() takes rows of so many columns, of which `block` share a scale, and is there."""
    return block % _LANES == 0 and columns % block == 0 and not kernel_error()


def round_rows(
    kind: Kind,
    weights: Tensor,
    block: int,
    tries: Sequence[float],
    second: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    on: Context | None = None,
) -> None:
    """Rounds weights [parts, rows, columns] bf16 or f32, finite and contiguous like the others.

    block   columns that share a scale: see rounds()
    tries   what is tried for each scale: divisors, shrinks for int4_zeros, factors for e4m3; none for mxfp4
    second  [parts] f32 second-level scales, 1 where there are none
    codes   [parts, rows, columns / 2] u8, e4m3: [parts, rows, columns]; scales, zeros: [parts, rows, columns / block]
    on      whose threads compute; None: the process's
    """
    parts, rows, columns = weights.shape
    numbers = (C.c_float * max(1, len(tries)))(*tries)
    asked = Rounding(
        weights.data_ptr(),
        codes.data_ptr(),
        scales.data_ptr(),
        None if zeros is None else zeros.data_ptr(),
        second.data_ptr(),
        C.cast(numbers, C.c_void_p),
        parts * rows,
        columns,
        block,
        rows,
        _KINDS.index(kind),
        _SCALES[scales.dtype],
        _SOURCES[weights.dtype],
        max(1, len(tries)),
    )
    on = on or context().here
    on.check(library().expertd_cpu_round(on.handle, C.byref(asked)), f"rounding to {kind}")
