"""Quantization of unquantized canonical weights, without data: round to nearest, with a small search of each scale.

For every block of weights that shares a scale a handful of scales is tried and the one with the least squared error is
kept.  A scale is rounded to its stored type before the codes are, so the codes belong to the scale that is stored.

    scheme                 scales tried for a block with largest magnitude a
    int4 (symmetric)       -m / c, m = the weight of largest magnitude, signed: m gets code -8; c > 8 clips
    int4, int8 with zeros  shrunken range / 15 or 255
    int8 (symmetric)       a / 127
    e4m3                   a / 448, for rows of their own also up to a factor 2 of it
    mxfp8                  2 ** ceil(log2(a / 448)): nothing saturates
    mxfp4                  2 ** (floor(log2 a) - 2), as the OCP text has it, and twice that
    nvfp4                  a / c with c from 3.5 to 7, as e4m3 below a second-level scale: the largest a is 6 * 448

The bits are the same on every device: each step is one that IEEE 754 defines, divisors are tensors (a GPU multiplies by
the reciprocal of a number), powers of two are made of their bits, and squared errors are summed as whole numbers, whose
sum does not depend on the order.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from expertd_kernels.native.rounding import Kind, round_rows, rounds
from expertd_kernels.weights.canonical import CODE_DTYPE, SCALE_DTYPE, QuantTensor, Weights, pack_nibbles, powers_of_two
from expertd_kernels.weights.scheme import WHOLE, ActivationQuant, Element, ScaleType, Scheme

# Why it is so: decisions 11 and 170 in DECISIONS.md.
__all__ = ["quantize", "quantize_matrix", "round_e2m1", "scheme_named"]

E2M1_MAX, E4M3_MAX = 6.0, 448.0
_CPU_ELEMENTS, _DEVICE_ELEMENTS = 1 << 18, 1 << 24
"""Weights rounded at a time.  On a CPU 1 MiB of f32, so that the passes over a chunk stay in the cache; on an
accelerator enough work for a launch, and some 0.5 GiB of f32 beside the weights."""
_CALL_ELEMENTS = 1 << 21
"""Weights of a call of the CPU kernel, some 5 ms of two cores: who computes with the same threads waits for its end."""

FUSED_COLUMNS = (32, 64, 128, 256)
"""Of blocks that a kernel of quantize_code.py rounds in one pass."""

_INT4_DIVISORS = (8.0, 8.5, 9.0, 9.75, 10.5)
_INT4_DIVISORS_WIDE = (*_INT4_DIVISORS, 12.0, 14.0, 16.0)
"""For blocks of 512 columns and more, whose largest weight is further out."""
_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8)
_SHRINKS_WIDE = (*_SHRINKS, 0.7, 0.6)
_E4M3_FACTORS = (1.0, 2**0.25, 2**0.5, 2**0.75)
_NVFP4_DIVISORS = (6.0, 5.5, 5.0, 4.5, 4.0, 3.5, 6.5, 7.0)
"""Relative errors measured on normal weights, search against the plain largest-magnitude scale: int4_g128 0.097 against
0.111, int4_channel (2048 columns) 0.108 against 0.141, nvfp4 0.082 against 0.095, mxfp4 0.112 against 0.115."""


def scheme_named(name: str) -> Scheme:
    """The scheme called `name`; "int8" is int8_channel, "fp8_" e4m3_.  ValueError for one that quantizes nothing."""
    full = "int8_channel" if name == "int8" else name
    scheme = Scheme.parse("e4m3_" + full.removeprefix("fp8_") if full.startswith("fp8_") else full)
    if not scheme.element.quantized:
        raise ValueError(f"scheme {name!r}: quantizes nothing; want int4_g128, int8, e4m3_block128, mxfp4, ...")
    return scheme


def quantize(weights: Weights, scheme: Scheme | str) -> Weights:
    """The layer in `scheme`.  weights: bf16, f16 or f32.  Biases are kept; ValueError names matrix, expert and place
    of a NaN or an infinity, and refuses weights that are quantized already."""
    s = scheme_named(scheme) if isinstance(scheme, str) else scheme
    return replace(
        weights,
        w13=quantize_matrix(weights.w13, s, "w13"),
        w2=quantize_matrix(weights.w2, s, "w2"),
        checkpoint_activation=ActivationQuant.NONE,
        input_scales=None,
    )


def quantize_matrix(q: QuantTensor, scheme: Scheme, name: str = "matrix") -> QuantTensor:
    """One matrix for each expert, [E, N, K] bf16 | f16 | f32, in `scheme`, on its device.  Holds some weights in f32 at
    a time."""
    if q.scheme.element.quantized:
        raise ValueError(f"{name} is {q.scheme.name} already; want bf16, f16 or f32 weights")
    if not scheme.element.quantized:
        raise ValueError(f"scheme {scheme.name!r}: quantizes nothing")
    E, N, K = q.shape
    shape = (E, *scheme.scale_shape(N, K, q.segments))
    k_stored = -(-K // 2) if scheme.element.packed else K
    codes = torch.empty((E, N, k_stored), dtype=CODE_DTYPE[scheme.element], device=q.device)
    scales = torch.empty(shape, dtype=SCALE_DTYPE[scheme.scale], device=q.device)
    zeros = torch.empty(shape, dtype=CODE_DTYPE[scheme.element], device=q.device) if scheme.zeros else None
    second = torch.empty((E, q.segments), device=q.device) if scheme.global_scale else None
    parts, rows = E * q.segments, N // q.segments
    out = _Rounded(
        codes.view(parts, rows, -1),
        scales.view(parts, -1, shape[2]),
        None if zeros is None else zeros.view(parts, -1, shape[2]),
    )
    plain = q.columns is None and q.factors is None
    weights = (q.codes if plain else q.dequantize()).reshape(parts, rows, K)
    step = max(1, _at_once(weights) // (rows * K))
    largest = torch.cat([_largest(weights[p : p + step]) for p in range(0, parts, step)])
    _require_finite(largest, weights, name, q.segments)
    g = _second_level(scheme, largest)
    if second is not None:
        second.view(-1).copy_(g)
    if not _fused(weights, scheme, out) and not _native(weights, scheme, g, out):
        for p in range(0, parts, step):
            out.fill(slice(p, p + step), weights[p : p + step], scheme, g[p : p + step])
    return QuantTensor(scheme, q.shape, codes, scales, zeros, second, bias=q.bias, segments=q.segments)


def _at_once(w: Tensor) -> int:
    return _CPU_ELEMENTS if w.device.type == "cpu" else _DEVICE_ELEMENTS


def _fused(w: Tensor, scheme: Scheme, out: _Rounded) -> bool:
    """The whole in one launch on an NVIDIA GPU, where there is a kernel for it.  Whether there was."""
    if w.device.type != "cuda" or torch.version.hip is not None or scheme.zeros or scheme.rows != 1:
        return False
    kind = _kind(scheme)
    if kind not in ("int4", "mxfp4") or (kind == "int4" and scheme.scale is not ScaleType.BF16):
        return False
    if scheme.cols not in FUSED_COLUMNS or w.shape[2] % scheme.cols:
        return False
    try:
        code: Any = importlib.import_module("expertd_kernels.weights.quantize_code")
    except ImportError:  # no Triton
        return False
    with torch.cuda.device(w.device):
        if kind == "int4":
            code.round_int4(w, out.codes, out.scales, scheme.cols, _INT4_DIVISORS)
        else:
            code.round_mxfp4(w, out.codes, out.scales)
    return True


def _native(w: Tensor, scheme: Scheme, g: Tensor, out: _Rounded) -> bool:
    """The whole in one pass of the CPU kernel, where that knows the scheme.  Whether it does."""
    kind, cols = _kind(scheme), w.shape[2] if scheme.cols == WHOLE else scheme.cols
    if w.device.type != "cpu" or scheme.rows != 1 or not rounds(w.shape[2], cols):
        return False
    tries: Sequence[float]
    if kind == "zeros" and scheme.element is Element.INT4:
        kind, tries = "int4_zeros", _SHRINKS_WIDE if cols >= 512 else _SHRINKS
    elif kind == "int4":
        tries = _INT4_DIVISORS_WIDE if cols >= 512 else _INT4_DIVISORS
    elif kind in ("mxfp4", "nvfp4", "e4m3"):
        tries = {"mxfp4": (), "nvfp4": _NVFP4_DIVISORS, "e4m3": _E4M3_FACTORS}[kind]
    else:
        return False
    step = max(1, _CALL_ELEMENTS // (w.shape[1] * w.shape[2]))
    for p in range(0, len(w), step):
        some = slice(p, p + step)
        part = (w[some].float() if w.dtype is torch.float16 else w[some]).contiguous()
        zeros = None if out.zeros is None else out.zeros[some]
        round_rows(cast("Kind", kind), part, cols, tries, g[some], out.codes[some], out.scales[some], zeros)
    return True


def _largest(w: Tensor) -> Tensor:
    """[P] f32 largest magnitude of each part of w [P, n, K]; NaN or infinity where one is in it."""
    if w.device.type == "cpu":  # quicker without a dimension
        pairs = [torch.aminmax(part) for part in w]
        low, high = (torch.stack(side) for side in zip(*pairs, strict=True))
    else:
        low, high = torch.aminmax(w.flatten(1), dim=1)
    return torch.maximum(-low, high).float()


def _require_finite(largest: Tensor, w: Tensor, name: str, segments: int) -> None:
    """Raises ValueError that names the first NaN or infinity of w [P, n, K], whose parts' magnitudes are `largest`."""
    if bool(torch.isfinite(largest).all()):
        return
    p = int((~torch.isfinite(largest)).nonzero()[0])
    row, col = (~torch.isfinite(w[p])).nonzero()[0].tolist()
    raise ValueError(
        f"{name} of expert {p // segments} holds {float(w[p, row, col])} at row {p % segments * w.shape[1] + row},"
        f" column {col}; want finite weights"
    )


def _second_level(scheme: Scheme, largest: Tensor) -> Tensor:
    """[P] f32: the second-level scale of each segment: its largest weight becomes 6 * 448.  1 for none and for all
    zeros."""
    if not scheme.global_scale:
        return torch.ones_like(largest)
    g = _over(largest.double(), E2M1_MAX * E4M3_MAX).float()
    return torch.where(g > 0, g, 1.0)


@dataclass(frozen=True)
class _Rounded:
    """Where segments are written: codes [P, n, K or K/2], scales and zeros [P, scale rows, scale cols]."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None

    def fill(self, parts: slice, w: Tensor, scheme: Scheme, g: Tensor) -> None:
        """Quantize w [parts, n, K] chunk by chunk of whole block rows; g [parts] f32."""
        P, n, K = w.shape
        rows = n if scheme.rows == WHOLE else scheme.rows
        cols = K if scheme.cols == WHOLE else scheme.cols
        step = max(1, _at_once(w) // (P * rows * K))  # block rows at a time
        rounder = _ROUNDERS[_kind(scheme)]
        for first in range(0, self.scales.shape[1], step):
            b = _blocks(w[:, first * rows : (first + step) * rows].float(), rows, cols)
            height = b.shape[0] // P
            numbers, stored, zero = rounder(b, scheme, g.repeat_interleave(height)[:, None, None, None])
            here = slice(first * rows, min(n, (first + step) * rows))
            flat = numbers.reshape(P, height * rows, -1)[:, : here.stop - here.start, :K]
            self.codes[parts, here] = encode(flat, scheme.element)
            blocks = slice(first, first + height)
            self.scales[parts, blocks] = stored.view(P, height, -1)
            if self.zeros is not None and zero is not None:
                self.zeros[parts, blocks] = zero.view(P, height, -1).to(self.zeros.dtype)


def _blocks(w: Tensor, rows: int, cols: int) -> Tensor:
    """[P, n, K] -> [P * R, rows, C, cols], padded with zeros: they change no block's largest magnitude or error."""
    P, n, K = w.shape
    R, C = -(-n // rows), -(-K // cols)
    if (R * rows, C * cols) != (n, K):
        w = torch.nn.functional.pad(w, (0, C * cols - K, 0, R * rows - n))
    return w.reshape(P * R, rows, C, cols)


def _over(x: Tensor, divisor: float) -> Tensor:
    """x / divisor, rounded once: of a plain number a GPU would multiply by the reciprocal."""
    return x / torch.full((), divisor, dtype=x.dtype, device=x.device)


def encode(numbers: Tensor, element: Element) -> Tensor:
    """Numbers on the element's grid [n, K] f32 (int4: code 0..15) -> stored codes."""
    if element is Element.INT4:
        return pack_nibbles(numbers)
    if element is Element.E2M1:
        a = numbers.abs()
        code = torch.where(a < 2, a * 2, torch.where(a < 4, a + 2, a * 0.5 + 4))
        return pack_nibbles(code + 8 * (numbers < 0))
    return numbers.to(CODE_DTYPE[element])


def round_e2m1(x: Tensor) -> Tensor:
    """Nearest e2m1 number of each x f32, ties to the even code, at most 6: 0.25 -> 0, 0.75 -> 1, 2.5 -> 2, 5 -> 4."""
    a = x.abs().clamp_max_(E2M1_MAX)
    power = (a.view(torch.int32) & 0x7F800000).view(torch.float32)  # largest power of two <= a
    step = power.mul_(0.5).clamp_(0.5, 2.0)  # distance of neighbouring numbers: 0.5 below 2, 1 below 4, then 2
    return a.div_(step).round_().mul_(step).copysign_(x)


def _round_e4m3(x: Tensor) -> Tensor:
    """Nearest e4m3 number, ties to even, saturating at 448."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


_Choice = tuple[Tensor, Tensor, "Tensor | None"]
"""Numbers [R, rows, C, cols] f32, stored scales [R, 1, C, 1], zero points [R, 1, C, 1] or None."""


def _amax(b: Tensor) -> Tensor:
    """Largest magnitude of each block [R, 1, C, 1]."""
    return b.abs().amax(dim=(1, 3), keepdim=True)


def _stored(scale: Tensor, kind: ScaleType) -> Tensor:
    """f32 scales in their stored type.  A block of zeros, or so small that its scale underflows, gets 1."""
    if kind is ScaleType.F16:
        scale = scale.clamp(-65504.0, 65504.0)
    s = scale.to(SCALE_DTYPE[kind])
    return torch.where(s == 0, torch.ones_like(s), s)


def _stored_e8m0(exponent: Tensor) -> Tensor:
    """Exponents of two as e8m0 bytes."""
    return (exponent.clamp(-127, 127) + 127).to(torch.uint8)


_ERROR_BITS = 11
"""Of an error as a whole number: as large as a block's largest magnitude."""


class _Errors:
    """Squared errors of blocks [R, rows, C, cols], as whole numbers: of each block's largest magnitude, 2 ** -11."""

    def __init__(self, b: Tensor) -> None:
        exponent = (_amax(b).view(torch.int32) >> 23) - 126  # the largest magnitude is below 2 ** exponent
        self._unit = powers_of_two((_ERROR_BITS - exponent).clamp_max(126))
        self._b = b * self._unit

    def of(self, numbers: Tensor, scale: Tensor) -> Tensor:
        """[R, 1, C, 1] f64 of numbers * scale, exact, so that no order of summing matters."""
        whole = (numbers * (scale * self._unit)).sub_(self._b).round_()
        return whole.square_().sum(dim=(1, 3), keepdim=True, dtype=torch.float64)


def _best(b: Tensor, tries: Sequence[tuple[Tensor, Tensor]], grid: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Of (stored scale, its f32 multiplier) the one with the least squared error, for each block; of equal ones the
    first.  Returns numbers and stored scale."""
    numbers = stored = least = None
    errors = _Errors(b)
    for raw, scale in tries:
        x = grid(b / scale)
        if len(tries) == 1:
            return x, raw
        error = errors.of(x, scale)
        if numbers is None or stored is None or least is None:
            numbers, stored, least = x, raw, error
        else:
            better = error < least
            numbers = torch.where(better, x, numbers)
            stored = torch.where(better, raw.float(), stored.float()).to(raw.dtype)  # e4m3 has no `where` before 2.7
            least = torch.where(better, error, least)
    assert numbers is not None
    assert stored is not None
    return numbers, stored


def _round_int4(b: Tensor, scheme: Scheme, g: Tensor) -> _Choice:
    low, high = b.amin(dim=(1, 3), keepdim=True), b.amax(dim=(1, 3), keepdim=True)
    extreme = torch.where(high >= -low, -high, -low)  # scale of the sign that gives the extreme weight code -8
    divisors = _INT4_DIVISORS_WIDE if b.shape[3] >= 512 else _INT4_DIVISORS
    raws = [_stored(_over(extreme, c), scheme.scale) for c in divisors]
    numbers, stored = _best(b, [(s, s.float()) for s in raws], lambda x: x.round_().clamp_(-8, 7))
    return numbers + 8, stored, None


def _round_int8(b: Tensor, scheme: Scheme, g: Tensor) -> _Choice:
    s = _stored(_over(_amax(b), 127), scheme.scale)
    return (b / s.float()).round_().clamp_(-128, 127), s, None


def _round_zeros(b: Tensor, scheme: Scheme, g: Tensor) -> _Choice:
    """Asymmetric integers: the range always holds 0, so that 0 stays exact."""
    least, most = (0, 15) if scheme.element is Element.INT4 else (-128, 127)
    low = b.amin(dim=(1, 3), keepdim=True).clamp_max_(0)
    high = b.amax(dim=(1, 3), keepdim=True).clamp_min_(0)
    shrinks = (1.0,) if scheme.element is Element.INT8 else _SHRINKS_WIDE if b.shape[3] >= 512 else _SHRINKS
    found: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    errors = _Errors(b)
    for shrink in shrinks:
        s = _stored((_over(high, most - least) - _over(low, most - least)) * shrink, scheme.scale)
        zero = (least - low * shrink / s.float()).round_().clamp_(least, most)
        codes = (b / s.float()).round_().add_(zero).clamp_(least, most)
        error = errors.of(codes - zero, s.float())
        if found:
            better = error < found[0][3]
            found = [
                tuple(torch.where(better, x, y) for x, y in zip((codes, s, zero, error), found[0], strict=True))  # type: ignore[list-item]
            ]
        else:
            found = [(codes, s, zero, error)]
    codes, s, zero, _ = found[0]
    return codes, s, zero


def _round_float8(b: Tensor, scheme: Scheme, g: Tensor) -> _Choice:
    a = _over(_amax(b), E4M3_MAX)
    raws = [_stored(a * f, scheme.scale) for f in (_E4M3_FACTORS if scheme.rows == 1 else (1.0,))]
    return *_best(b, [(s, s.float()) for s in raws], _round_e4m3), None


def _round_mxfp8(b: Tensor, scheme: Scheme, g: Tensor) -> _Choice:
    exponent = _exponent_above(_over(_amax(b), E4M3_MAX))
    return _round_e4m3(b / powers_of_two(exponent)), _stored_e8m0(exponent), None


def _exponent_above(a: Tensor) -> Tensor:
    """Least e with 2 ** e >= a, from the bits, not through a logarithm; 0 where a is 0."""
    mantissa, exponent = torch.frexp(a)  # a = mantissa * 2 ** exponent, 0.5 <= mantissa < 1
    e = (exponent - (mantissa == 0.5).int()).clamp(-127, 127)
    return torch.where(a == 0, torch.zeros_like(e), e)


def _round_mxfp4(b: Tensor, scheme: Scheme, g: Tensor) -> _Choice:
    a = _amax(b)
    floor = (torch.frexp(a).exponent - 1 - 2).clamp(-127, 127)  # floor(log2 a) - log2 of e2m1's largest power of two
    floor = torch.where(a == 0, torch.zeros_like(floor), floor)
    exponents = [floor, (floor + 1).clamp_max(127)]
    tries = [(_stored_e8m0(e), powers_of_two(e)) for e in exponents]
    return *_best(b, tries, round_e2m1), None


def _round_nvfp4(b: Tensor, scheme: Scheme, g: Tensor) -> _Choice:
    a = _amax(b)
    raws = []
    for c in _NVFP4_DIVISORS:
        s = (_over(a, c) / g).clamp(2.0**-9, E4M3_MAX)
        raws.append(torch.where(a == 0, 1.0, s).to(torch.float8_e4m3fn))
    return *_best(b, [(s, s.float() * g) for s in raws], round_e2m1), None


_ROUNDERS: dict[str, Callable[[Tensor, Scheme, Tensor], _Choice]] = {
    "int4": _round_int4,
    "int8": _round_int8,
    "zeros": _round_zeros,
    "e4m3": _round_float8,
    "mxfp8": _round_mxfp8,
    "mxfp4": _round_mxfp4,
    "nvfp4": _round_nvfp4,
}


def _kind(scheme: Scheme) -> str:
    if scheme.zeros:
        return "zeros"
    if scheme.element is Element.E4M3:
        return "mxfp8" if scheme.scale is ScaleType.E8M0 else "e4m3"
    if scheme.element is Element.E2M1:
        if scheme.scale is ScaleType.E8M0:
            return "mxfp4"
        if scheme.scale is ScaleType.E4M3:
            return "nvfp4"
    elif scheme.scale not in (ScaleType.E8M0, ScaleType.E4M3):
        return "int4" if scheme.element is Element.INT4 else "int8"
    raise ValueError(
        f"scheme {scheme.name!r} with {scheme.scale.value} scales; want int4, int8, e4m3, mxfp8, mxfp4 or nvfp4"
    )
