# mypy: ignore-errors
# (Triton device code: its types are checked by Triton's compiler, not by mypy.)
"""int4 groups and mxfp4 rounded on an NVIDIA GPU in one pass: the bits of quantize.py.

Torch's own operations read and write f32 intermediates some sixty times.  Division is IEEE's (div_rn), no
multiplication and addition are fused, and errors are summed as whole numbers, so the bits are those that the same steps
give on a CPU.
"""

import torch
import triton
import triton.language as tl

__all__ = ["round_int4", "round_mxfp4"]

_BLOCKS = 16
"""Blocks of weights that share a scale, of a program."""
_MAGIC = tl.constexpr(12582912.0)
"""1.5 * 2 ** 23: added and taken away again it rounds what is below 2 ** 22 to whole numbers, ties to even."""


@triton.jit
def _whole(x):
    return (x + _MAGIC) - _MAGIC


@triton.jit
def _power(exponent):
    """2 ** exponent of integers from -127 to 127."""
    return tl.where(exponent > -127, (exponent + 127) << 23, 1 << 22).to(tl.float32, bitcast=True)


@triton.jit
def _loaded(w, at, inside, C: tl.constexpr):
    """Weights [blocks, C] f32, and their largest magnitudes."""
    places = at.to(tl.int64)[:, None] * C + tl.arange(0, C)[None, :]
    found = tl.load(w + places, mask=inside[:, None], other=0)
    if w.dtype.element_ty == tl.int16:  # bf16's bits
        b = (found.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        b = found.to(tl.float32)
    return b, tl.max(tl.abs(b), 1)


@triton.jit
def _unit(a):
    """What makes the error of a block with largest magnitude `a` a whole number of 11 bits."""
    exponent = (a.to(tl.int32, bitcast=True) >> 23) - 126
    return _power(tl.minimum(11 - exponent, 126))


@triton.jit
def _error(numbers, scale, unit, b_units):
    """Squared errors summed, int32: 256 * 2 ** 22 at most."""
    whole = _whole(numbers * (scale * unit)[:, None] - b_units).to(tl.int32)
    return tl.sum(whole * whole, 1)


@triton.jit
def _store_nibbles(codes, numbers, at, inside, BLOCKS: tl.constexpr, C: tl.constexpr):
    """numbers [blocks, C] 0 to 15, two a byte."""
    low, high = tl.split(tl.reshape(numbers.to(tl.int32), (BLOCKS, C // 2, 2)))
    places = at.to(tl.int64)[:, None] * (C // 2) + tl.arange(0, C // 2)[None, :]
    tl.store(codes + places, (low | (high << 4)).to(tl.uint8), mask=inside[:, None])


@triton.jit
def _bf16_bits(x):
    """The bits of finite f32 numbers rounded to bf16, ties to even: below 2 ** 16."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


@triton.jit
def _int4_of(b, b_units, unit, extreme, divisor):
    """(numbers, scale f32, error) of one divisor."""
    raw = tl.div_rn(extreme, tl.zeros_like(extreme) + divisor)
    scale = (_bf16_bits(raw) << 16).to(tl.float32, bitcast=True)
    scale = tl.where(scale == 0.0, 1.0, scale)
    numbers = tl.div_rn(b, tl.zeros_like(b) + scale[:, None])
    numbers = _whole(tl.minimum(tl.maximum(numbers, -8.0), 7.0))
    return numbers, scale, _error(numbers, scale, unit, b_units)


@triton.jit
def _better(numbers, scale, error, new_numbers, new_scale, new_error):
    """Of equal ones the first."""
    better = new_error < error
    return (
        tl.where(better[:, None], new_numbers, numbers),
        tl.where(better, new_scale, scale),
        tl.minimum(new_error, error),
    )


@triton.jit
def int4_kernel(w, codes, scales, blocks, d0, d1, d2, d3, d4, C: tl.constexpr, BLOCKS: tl.constexpr):
    """w [blocks, C]; codes [blocks, C / 2] u8; scales [blocks] int16: the bits of bf16."""
    at = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    inside = at < blocks
    b, a = _loaded(w, at, inside, C)
    low, high = tl.min(b, 1), tl.max(b, 1)
    extreme = tl.where(high >= -low, -high, -low)
    unit = _unit(a)
    b_units = b * unit[:, None]
    numbers, scale, error = _int4_of(b, b_units, unit, extreme, d0)
    new_numbers, new_scale, new_error = _int4_of(b, b_units, unit, extreme, d1)
    numbers, scale, error = _better(numbers, scale, error, new_numbers, new_scale, new_error)
    new_numbers, new_scale, new_error = _int4_of(b, b_units, unit, extreme, d2)
    numbers, scale, error = _better(numbers, scale, error, new_numbers, new_scale, new_error)
    new_numbers, new_scale, new_error = _int4_of(b, b_units, unit, extreme, d3)
    numbers, scale, error = _better(numbers, scale, error, new_numbers, new_scale, new_error)
    new_numbers, new_scale, new_error = _int4_of(b, b_units, unit, extreme, d4)
    numbers, scale, error = _better(numbers, scale, error, new_numbers, new_scale, new_error)
    _store_nibbles(codes, numbers + 8.0, at, inside, BLOCKS, C)
    tl.store(scales + at, _bf16_bits(scale).to(tl.int16), mask=inside)


@triton.jit
def _e2m1(x):
    """Nearest e2m1 numbers, ties to the even code, at most 6."""
    a = tl.minimum(tl.abs(x), 6.0)
    power = (a.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    step = tl.minimum(tl.maximum(power * 0.5, 0.5), 2.0)
    rounded = _whole(tl.div_rn(a, step)) * step
    return tl.where(x < 0.0, -rounded, rounded)


@triton.jit
def mxfp4_kernel(w, codes, scales, blocks, BLOCKS: tl.constexpr):
    """w [blocks, 32]; codes [blocks, 16] u8; scales [blocks] u8 exponents."""
    C: tl.constexpr = 32
    at = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    inside = at < blocks
    b, a = _loaded(w, at, inside, C)
    unit = _unit(a)
    b_units = b * unit[:, None]
    floor = tl.maximum((a.to(tl.int32, bitcast=True) >> 23) - 129, -127)
    floor = tl.where(a == 0.0, 0, floor)
    above = tl.minimum(floor + 1, 127)
    scale, new_scale = _power(floor), _power(above)
    numbers = _e2m1(tl.div_rn(b, tl.zeros_like(b) + scale[:, None]))
    new_numbers = _e2m1(tl.div_rn(b, tl.zeros_like(b) + new_scale[:, None]))
    better = _error(new_numbers, new_scale, unit, b_units) < _error(numbers, scale, unit, b_units)
    numbers = tl.where(better[:, None], new_numbers, numbers)
    size = tl.abs(numbers)
    code = tl.where(size < 2.0, size * 2.0, tl.where(size < 4.0, size + 2.0, size * 0.5 + 4.0))
    _store_nibbles(codes, tl.where(numbers < 0.0, code + 8.0, code), at, inside, BLOCKS, C)
    tl.store(scales + at, (tl.where(better, above, floor) + 127).to(tl.uint8), mask=inside)


def _bits(w):
    return w.view(torch.int16) if w.dtype is torch.bfloat16 else w


def round_int4(w, codes, scales, columns, divisors):
    """w [..., K] bf16 | f16 | f32, K a multiple of `columns`, contiguous like the others; codes [..., K / 2] u8;
    scales [..., K / columns] bf16; divisors: five."""
    blocks = w.numel() // columns
    grid = (triton.cdiv(blocks, _BLOCKS),)
    scales = scales.view(torch.int16)
    int4_kernel[grid](
        _bits(w), codes, scales, blocks, *divisors, C=columns, BLOCKS=_BLOCKS, num_warps=4, enable_fp_fusion=False
    )


def round_mxfp4(w, codes, scales):
    """w [..., K] bf16 | f16 | f32, K a multiple of 32, contiguous like the others; codes [..., K / 2] u8; scales
    [..., K / 32] u8."""
    blocks = w.numel() // 32
    grid = (triton.cdiv(blocks, 4 * _BLOCKS),)
    mxfp4_kernel[grid](_bits(w), codes, scales, blocks, BLOCKS=4 * _BLOCKS, num_warps=4, enable_fp_fusion=False)
