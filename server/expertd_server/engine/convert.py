"""Between the dtypes of the wire and those of the kernels, with plain numpy arrays on one side.  The core converts the
tensors of requests itself (csrc/gather.cpp)."""

from __future__ import annotations

import zlib

import numpy as np
import torch
from torch import Tensor

from expertd.common.dtypes import FLOAT_DTYPES
from expertd.e4m3 import quantizer
from expertd_server.engine.request import STORAGE, Array

__all__ = ["bits_of", "digest", "output_dtypes", "round_floats"]

_TORCH = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}


def output_dtypes() -> tuple[str, ...]:
    """What requests may ask for."""
    return FLOAT_DTYPES if quantizer() is None else (*FLOAT_DTYPES, "e4m3")


def bits_of(t: Tensor) -> Array:
    """A host tensor [...] as a numpy array of the same shape and memory; bf16 and e4m3 as their bits, u2 and u1."""
    if t.dtype is torch.float8_e4m3fn:
        return t.view(torch.uint8).numpy()
    return t.view(torch.uint16).numpy() if t.dtype is torch.bfloat16 else t.numpy()


def round_floats(values: Array, dtype: str) -> Array:
    """f32 [n] -> STORAGE[dtype] [n], rounded to nearest even.  May share memory."""
    if dtype == "f32":
        return values
    return bits_of(torch.from_numpy(np.array(values, dtype=np.float32)).to(_TORCH[dtype]))


def digest(output: Array, dtype: str) -> tuple[float, float, int]:
    """(sum, sum of squares, both in float64; zlib CRC-32 of the bytes) of an output in STORAGE[dtype]."""
    if dtype == "bf16":
        wide = np.left_shift(output, 16, dtype=np.uint32).view(np.float32).astype(np.float64)
    else:
        wide = output.astype(np.float64)
    raw = np.ascontiguousarray(output, dtype=STORAGE[dtype])
    return float(wide.sum()), float(np.dot(wide, wide)), zlib.crc32(raw.view(np.uint8).data)
