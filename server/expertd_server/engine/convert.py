"""Between the dtypes of the wire and those of the kernels, with plain numpy arrays on one side.

Received arrays are read-only views of messages and maybe unaligned.  numpy copies such arrays as they are; torch, which
rounds to bf16, wants writable and aligned memory, hence the copy before it.
"""

from __future__ import annotations

import zlib
from functools import cache

import numpy as np
import torch
from torch import Tensor

from expertd.dtypes import DTYPE_NUMBER, FLOAT_DTYPES, SCALED_COLUMNS, scales_at, tensor_bytes
from expertd.e4m3 import quantizer
from expertd_server.engine.request import STORAGE, Array, Operand

__all__ = ["bits_of", "digest", "output_array", "output_dtypes", "output_into", "put_floats", "round_floats"]

_TORCH = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
_WORD = {t: word for word, t in _TORCH.items()}


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


@cache
def _e4m3_values() -> Array:
    """[256] f32, by their codes."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


def put_floats(into: Array, dtype: str, operand: Operand, columns: int) -> None:
    """Write `operand`, rows of `columns`, to `into`, flat and of as many elements, which stores `dtype` ("bf16" or
    "f32")."""
    values = operand.values
    if operand.scales is not None:
        wide = _e4m3_values()[values].reshape(-1, columns)
        scales = operand.scales.reshape(len(wide), -1).repeat(SCALED_COLUMNS, axis=1)
        with np.errstate(invalid="ignore", over="ignore"):  # scales are a caller's: NaN and infinity are passed on
            np.multiply(wide, scales[:, :columns], out=wide)
        np.copyto(into, round_floats(wide.reshape(-1), dtype))
    elif operand.dtype == dtype:
        np.copyto(into, values)
    elif dtype == "bf16":
        np.copyto(into, round_floats(values, "bf16"))
    elif operand.dtype == "bf16":  # f32 has the same exponent: the bits move up
        np.left_shift(values, 16, out=into.view(np.uint32), dtype=np.uint32)
    else:
        np.copyto(into, values, casting="unsafe")


def output_array(out: Tensor, dtype: str) -> Array:
    """Rows [m, H] of a kernel's output -> flat STORAGE[dtype], e4m3 with its scales; shares memory where nothing has to
    be converted."""
    if dtype == "e4m3":
        return output_into(np.empty(tensor_bytes(DTYPE_NUMBER[dtype], *out.shape), np.uint8), out, dtype)
    return bits_of(out.reshape(-1).to(_TORCH[dtype]))


def output_into(into: Array, out: Tensor, dtype: str) -> Array:
    """Write rows [m, H] of a kernel's output to `into`, as output_array() makes it; returns it."""
    if dtype == "e4m3":
        quantize, (rows, columns) = quantizer(), out.shape
        assert quantize is not None  # else it is none of output_dtypes()
        out = out.contiguous()
        kind, to = DTYPE_NUMBER[_WORD[out.dtype]], into.ctypes.data
        stride = columns * out.element_size()
        quantize(out.data_ptr(), kind, rows, columns, stride, to, to + scales_at(rows, columns))
        return into
    bits = torch.from_numpy(into)
    (bits.view(torch.bfloat16) if dtype == "bf16" else bits).copy_(out.reshape(-1))
    return into


def digest(output: Array, dtype: str) -> tuple[float, float, int]:
    """(sum, sum of squares, both in float64; zlib CRC-32 of the bytes) of an output in STORAGE[dtype]."""
    if dtype == "bf16":
        wide = np.left_shift(output, 16, dtype=np.uint32).view(np.float32).astype(np.float64)
    else:
        wide = output.astype(np.float64)
    raw = np.ascontiguousarray(output, dtype=STORAGE[dtype])
    return float(wide.sum()), float(np.dot(wide, wide)), zlib.crc32(raw.view(np.uint8).data)
