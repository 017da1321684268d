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
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from expertd_kernels.weights.canonical import CODE_DTYPE, SCALE_DTYPE, QuantTensor, Weights, pack_nibbles
from expertd_kernels.weights.scheme import WHOLE, ActivationQuant, Element, ScaleType, Scheme

# Why it is so: decision 11 in DECISIONS.md.
__all__ = ["quantize", "quantize_matrix", "round_e2m1", "scheme_named"]

E2M1_MAX, E4M3_MAX = 6.0, 448.0
_CHUNK_ELEMENTS = 1 << 18
"""Weights rounded at a time: 1 MiB of f32, so that the passes over a chunk stay in the cache."""

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
    """One matrix for each expert, [E, N, K] bf16 | f16 | f32, in `scheme`.  Holds one expert in f32 at a time."""
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
    rows, scale_rows = N // q.segments, shape[1] // q.segments
    for e in range(E):
        w = q.experts(slice(e, e + 1)).dequantize()[0]
        for seg in range(q.segments):
            part = w[seg * rows : (seg + 1) * rows]
            largest = _largest(part, f"{name} of expert {e}", seg * rows)
            here = slice(seg * scale_rows, (seg + 1) * scale_rows)
            rounded = _Segment(
                codes[e, seg * rows : (seg + 1) * rows], scales[e, here], None if zeros is None else zeros[e, here]
            )
            g = _second_level(scheme, largest)
            if second is not None:
                second[e, seg] = g
            rounded.fill(part, scheme, g)
    return QuantTensor(scheme, q.shape, codes, scales, zeros, second, bias=q.bias, segments=q.segments)


def _largest(w: Tensor, what: str, first_row: int) -> float:
    """Largest magnitude of w [n, K]; ValueError that names the first NaN or infinity."""
    low, high = torch.aminmax(w)
    largest = max(-float(low), float(high))
    if not (float(low) >= -torch.finfo(torch.float32).max and largest <= torch.finfo(torch.float32).max):
        row, col = (~torch.isfinite(w)).nonzero()[0].tolist()
        raise ValueError(
            f"{what} holds {float(w[row, col])} at row {first_row + row}, column {col}; want finite weights"
        )
    return largest


def _second_level(scheme: Scheme, largest: float) -> float:
    """The second-level scale of a segment: its largest weight becomes 6 * 448.  1.0 for none and for all zeros."""
    if not scheme.global_scale:
        return 1.0
    g = float(torch.tensor(largest / (E2M1_MAX * E4M3_MAX), dtype=torch.float32))
    return g if g > 0.0 else 1.0


@dataclass(frozen=True)
class _Segment:
    """Where one projection of one expert is written: codes [n, K or K/2], scales and zeros [scale rows, scale cols]."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None

    def fill(self, w: Tensor, scheme: Scheme, g: float) -> None:
        """Quantize w [n, K] f32 chunk by chunk of whole block rows."""
        n, K = w.shape
        rows = n if scheme.rows == WHOLE else scheme.rows
        cols = K if scheme.cols == WHOLE else scheme.cols
        step = max(1, _CHUNK_ELEMENTS // (rows * K))  # block rows at a time
        for first in range(0, self.scales.shape[0], step):
            part = w[first * rows : (first + step) * rows]
            b = _blocks(part, rows, cols)
            numbers, stored, zero = _ROUNDERS[_kind(scheme)](b, scheme, g)
            flat = numbers.reshape(b.shape[0] * rows, -1)[: part.shape[0], :K]
            self.codes[first * rows : first * rows + part.shape[0]] = encode(flat, scheme.element)
            self.scales[first : first + step] = stored[:, 0, :, 0]
            if self.zeros is not None and zero is not None:
                self.zeros[first : first + step] = zero[:, 0, :, 0].to(self.zeros.dtype)


def _blocks(w: Tensor, rows: int, cols: int) -> Tensor:
    """[n, K] -> [R, rows, C, cols], padded with zeros: they change no block's largest magnitude or error."""
    n, K = w.shape
    R, C = -(-n // rows), -(-K // cols)
    if (R * rows, C * cols) != (n, K):
        w = torch.nn.functional.pad(w, (0, C * cols - K, 0, R * rows - n))
    return w.reshape(R, rows, C, cols)


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


_Rounded = tuple[Tensor, Tensor, "Tensor | None"]
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


def _best(b: Tensor, tries: Sequence[tuple[Tensor, Tensor]], grid: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Of (stored scale, its f32 multiplier) the one with the least squared error, for each block; of equal ones the
    first.  Returns numbers and stored scale."""
    numbers = stored = least = None
    for raw, scale in tries:
        x = grid(b / scale)
        if len(tries) == 1:
            return x, raw
        error = (x * scale).sub_(b).square_().sum(dim=(1, 3), keepdim=True)
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


def _round_int4(b: Tensor, scheme: Scheme, g: float) -> _Rounded:
    low, high = b.amin(dim=(1, 3), keepdim=True), b.amax(dim=(1, 3), keepdim=True)
    extreme = torch.where(high >= -low, -high, -low)  # scale of the sign that gives the extreme weight code -8
    divisors = _INT4_DIVISORS_WIDE if b.shape[3] >= 512 else _INT4_DIVISORS
    raws = [_stored(extreme / c, scheme.scale) for c in divisors]
    numbers, stored = _best(b, [(s, s.float()) for s in raws], lambda x: x.round_().clamp_(-8, 7))
    return numbers + 8, stored, None


def _round_int8(b: Tensor, scheme: Scheme, g: float) -> _Rounded:
    s = _stored(_amax(b) / 127, scheme.scale)
    return (b / s.float()).round_().clamp_(-128, 127), s, None


def _round_zeros(b: Tensor, scheme: Scheme, g: float) -> _Rounded:
    """Asymmetric integers: the range always holds 0, so that 0 stays exact."""
    least, most = (0, 15) if scheme.element is Element.INT4 else (-128, 127)
    low = b.amin(dim=(1, 3), keepdim=True).clamp_max_(0)
    high = b.amax(dim=(1, 3), keepdim=True).clamp_min_(0)
    shrinks = (1.0,) if scheme.element is Element.INT8 else _SHRINKS_WIDE if b.shape[3] >= 512 else _SHRINKS
    found: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for shrink in shrinks:
        s = _stored((high / (most - least) - low / (most - least)) * shrink, scheme.scale)
        zero = (least - low * shrink / s.float()).round_().clamp_(least, most)
        codes = (b / s.float()).round_().add_(zero).clamp_(least, most)
        error = ((codes - zero) * s.float()).sub_(b).square_().sum(dim=(1, 3), keepdim=True)
        if found:
            better = error < found[0][3]
            found = [
                tuple(torch.where(better, x, y) for x, y in zip((codes, s, zero, error), found[0], strict=True))  # type: ignore[list-item]
            ]
        else:
            found = [(codes, s, zero, error)]
    codes, s, zero, _ = found[0]
    return codes, s, zero


def _round_float8(b: Tensor, scheme: Scheme, g: float) -> _Rounded:
    a = _amax(b) / E4M3_MAX
    raws = [_stored(a * f, scheme.scale) for f in (_E4M3_FACTORS if scheme.rows == 1 else (1.0,))]
    return *_best(b, [(s, s.float()) for s in raws], _round_e4m3), None


def _round_mxfp8(b: Tensor, scheme: Scheme, g: float) -> _Rounded:
    exponent = _exponent_above(_amax(b) / E4M3_MAX)
    return _round_e4m3(torch.ldexp(b, -exponent)), _stored_e8m0(exponent), None


def _exponent_above(a: Tensor) -> Tensor:
    """Least e with 2 ** e >= a, from the bits, not through a logarithm; 0 where a is 0."""
    mantissa, exponent = torch.frexp(a)  # a = mantissa * 2 ** exponent, 0.5 <= mantissa < 1
    e = (exponent - (mantissa == 0.5).int()).clamp(-127, 127)
    return torch.where(a == 0, torch.zeros_like(e), e)


def _round_mxfp4(b: Tensor, scheme: Scheme, g: float) -> _Rounded:
    a = _amax(b)
    floor = (torch.frexp(a).exponent - 1 - 2).clamp(-127, 127)  # floor(log2 a) - log2 of e2m1's largest power of two
    floor = torch.where(a == 0, torch.zeros_like(floor), floor)
    exponents = [floor, (floor + 1).clamp_max(127)]
    tries = [(_stored_e8m0(e), torch.exp2(e.float())) for e in exponents]
    return *_best(b, tries, round_e2m1), None


def _round_nvfp4(b: Tensor, scheme: Scheme, g: float) -> _Rounded:
    a = _amax(b)
    raws = []
    for c in _NVFP4_DIVISORS:
        s = (a / c / g).clamp(2.0**-9, E4M3_MAX)
        raws.append(torch.where(a == 0, 1.0, s).to(torch.float8_e4m3fn))
    return *_best(b, [(s, s.float() * g) for s in raws], round_e2m1), None


_ROUNDERS: dict[str, Callable[[Tensor, Scheme, float], _Rounded]] = {
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
