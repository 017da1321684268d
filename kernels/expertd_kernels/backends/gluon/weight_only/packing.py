"""Canonical weights <-> the layout of the Gluon kernels, exactly, on any device.

Codes: int32 [E, N/64, K/C, warp 4, lane 32, word 4] with C = 64, 32 columns for 4, 8 bits.  The 16 bytes of a lane are
its elements of the wgmma A fragments of 64 rows x C columns, so one 16-byte load feeds the tensor core without a
shuffle:

    row = 16 * warp + 8 * i0 + lane // 4
    k   = 16 * fragment + 8 * i1 + 2 * (lane % 4) + h

    4 bits   fragment = word;      slot of the word: i0 + 2 * i1 + 4 * h
    8 bits   fragment = word // 2; i1 = word % 2;  slot: i0 + 2 * h

`h` always picks the half of the word, so that a mask leaves a pair of bf16.  Where the bits of a code lie inside the
word is a table (`_fields`).  Rows of a gated w13 alternate: i0 = 0 gate, i0 = 1 up, so a lane holds both.

bf16 needs no unpacking: blocks of 64 rows (in the same order) x 64 columns follow each other, each row 128 bytes, which
the tensor core reads from shared memory; as int32 [E, N/64, K/16, 4, 32, 4], as large as the others.

Scales: [E, N/64, chunks, plane, warp 4, lane//4 8, group, i0 2], premultiplied by a power of two that undoes the
place of the code's bits in a bf16 (see dequant.py); `shift` is the power left over, undone after the GEMM.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from expertd_kernels.backends.gluon.weight_only.codec import Codec
from expertd_kernels.weights.scheme import Element

__all__ = [
    "pack_codes",
    "pack_rows",
    "pack_scales",
    "scale_exponent",
    "shifted_exponent",
    "unpack_codes",
    "unpack_rows",
    "unpack_scales",
]

Field = tuple[int, int, int, int]
"""(slot, lowest bit of the code, width in bits, lowest bit of the word)."""

_EXPERTS_AT_ONCE = 8
"""Experts packed together: bounds the int32 temporaries to a few times one expert's codes."""


def _fields(element: Element) -> tuple[Field, ...]:
    """Where the bits of the codes of one 32-bit word lie."""
    if element is Element.INT4:
        return tuple((s, 0, 4, 4 * s) for s in range(8))
    if element is Element.INT8:
        return tuple((s, 0, 8, (0, 8, 16, 24)[s]) for s in range(4))
    out: list[Field] = []
    for h in range(2):
        low, other = 16 * h, 16 * (1 - h)
        if element is Element.E4M3:
            # i0 = 0 is in place (sign 15, magnitude 10..4); i0 = 1 fills the holes: one shift left by 4, one right
            out += [(2 * h, 7, 1, low + 15), (2 * h, 0, 7, low + 4)]
            out += [(2 * h + 1, 7, 1, low + 11), (2 * h + 1, 4, 3, low + 12), (2 * h + 1, 0, 4, low)]
        else:  # e2m1: in place; after rotating right by 6; by 3; after multiplying by 2**12 + 2**7 + 2**2
            n = 4 * h
            out += [(n, 3, 1, low + 15), (n, 0, 3, low + 6)]
            out += [(n + 1, 3, 1, other + 5), (n + 1, 0, 3, low + 12)]
            out += [(n + 2, 3, 1, other + 2), (n + 2, 0, 3, low + 9)]
            out += [(n + 3, 3, 1, low + 3), (n + 3, 1, 2, low), (n + 3, 0, 1, low + 4)]
    return tuple(out)


def _rows(c: Tensor, gated: bool) -> Tensor:
    """[E, N, ...] -> [E, N/64, warp 4, i0 2, 8, ...]."""
    E, N, rest = c.shape[0], c.shape[1], c.shape[2:]
    if not gated:
        return c.reshape(E, N // 64, 4, 2, 8, *rest)
    tail = range(5, 5 + len(rest))
    return c.reshape(E, 2, N // 64, 4, 8, *rest).permute(0, 2, 3, 1, 4, *tail)


def _unrows(c: Tensor, gated: bool) -> Tensor:
    """The inverse of _rows."""
    E, T, rest = c.shape[0], c.shape[1], c.shape[5:]
    if gated:
        c = c.permute(0, 3, 1, 2, 4, *range(5, 5 + len(rest)))
    return c.reshape(E, T * 64, *rest)


_SPLIT_K = {4: (2, 2, 2, 4, 2), 8: (2, 2, 4, 2)}
"""Columns of a unit as axes: 4 bits (b, jj, i1, l4, h), 8 bits (jj, i1, l4, h)."""
_ORDER = {
    # [E, T, warp, i0, l8, unit, *split] -> [E, T, unit, warp, l8, l4, word..., slot...]
    4: (0, 1, 5, 2, 4, 9, 6, 7, 10, 8, 3),
    8: (0, 1, 5, 2, 4, 8, 6, 7, 9, 3),
}


def pack_codes(codes: Tensor, element: Element, codec: Codec, gated: bool) -> Tensor:
    """codes [E, N, K] integers (u8 4-bit codes; i16 bits of bf16; u8 bits of e4m3; u8 code + 128 of int8), N and K
    multiples of 64 -> int32 [E, N/64, K/C, 4, 32, 4] (K/16 for bf16)."""
    E, N, K = codes.shape
    if codec.bits == 16:
        blocks = _rows(codes, gated).reshape(E, N // 64, 64, K // 64, 64).transpose(2, 3).contiguous()
        return blocks.view(torch.int32).view(E, N // 64, K // 16, 4, 32, 4)
    out = torch.empty(E, N // 64, K // 64 * codec.units, 4, 32, 4, dtype=torch.int32, device=codes.device)
    for e in range(0, E, _EXPERTS_AT_ONCE):
        part = _rows(codes[e : e + _EXPERTS_AT_ONCE], gated)
        part = part.reshape(*part.shape[:5], K // 64 * codec.units, *_SPLIT_K[codec.bits])
        part = part.permute(*_ORDER[codec.bits]).reshape(*out[e : e + _EXPERTS_AT_ONCE].shape, -1)
        word = torch.zeros(part.shape[:-1], dtype=torch.int32, device=codes.device)
        for slot, low, width, at in _fields(element):
            word |= ((part[..., slot].to(torch.int32) >> low) & ((1 << width) - 1)) << at
        out[e : e + _EXPERTS_AT_ONCE] = word
    return out


def unpack_codes(packed: Tensor, element: Element, codec: Codec, gated: bool) -> Tensor:
    """The exact inverse of pack_codes: [E, N, K] u8 (i16 for bf16)."""
    E, T, units = packed.shape[:3]
    if codec.bits == 16:
        blocks = packed.view(torch.int16).view(E, T, units // 4, 64, 64).transpose(2, 3)
        return _unrows(blocks.reshape(E, T, 4, 2, 8, units * 16), gated).contiguous()
    out = []
    split, order = _SPLIT_K[codec.bits], _ORDER[codec.bits]
    for e in range(0, E, _EXPERTS_AT_ONCE):
        word = packed[e : e + _EXPERTS_AT_ONCE]
        slots = torch.zeros(*word.shape, 32 // codec.bits, dtype=torch.int32, device=packed.device)
        for slot, low, width, at in _fields(element):
            slots[..., slot] |= ((word >> at) & ((1 << width) - 1)) << low
        n = word.shape[0]
        natural = (n, T, 4, 2, 8, units, *split)
        c = slots.reshape([natural[i] for i in order])
        c = c.permute(*[order.index(i) for i in range(len(order))])
        out.append(_unrows(c.reshape(n, T, 4, 2, 8, -1), gated).to(torch.uint8))
    return torch.cat(out)


def scale_exponent(codec: Codec, element: Element, largest: float) -> int:
    """The least exponent, at least 13, by which weights must be made smaller inside the GEMM, so that the
    premultiplied scales stay finite in bf16.  largest: the greatest absolute scale."""
    if not codec.planes:
        return 0
    least = math.frexp(largest)[1] + _place(codec, element) - 127 if largest > 0 else 0
    return max(13, least)


def shifted_exponent(exponent: int, codec: Codec, element: Element, shift: int) -> int:
    """The exponent byte that the kernel reads for the stored e8m0 byte `exponent`."""
    return exponent + _place(codec, element) - shift


def _place(codec: Codec, element: Element) -> int:
    """log2 of what the bits of the code lack as a bf16: 2**-133 is its least number; else exponent biases."""
    if codec.kind == "zero":
        return 6
    return {Element.INT4: 133, Element.INT8: 133, Element.E2M1: 126, Element.E4M3: 120}[element]


def _row_factor(element: Element, device: torch.device) -> Tensor:
    """[1, 1, 1, i0 2, 1, 1] f32: int4 codes of i0 = 1 are read four bits higher, as 16 * q."""
    low = 2.0**-4 if element is Element.INT4 else 1.0
    return torch.tensor([1.0, low], device=device).view(1, 1, 1, 2, 1, 1)


def pack_scales(
    scales: Tensor, zeros: Tensor | None, element: Element, codec: Codec, gated: bool, shift: int
) -> Tensor:
    """scales [E, N, G] f32 (or u8 exponents: e8m0), zeros [E, N, G] f32 or None, G whole chunks -> the scale layout.

    bf16 rounds to nearest even; whether that lost anything is seen by unpacking."""
    if codec.e8m0:
        b = scales.to(torch.int32) + (_place(codec, element) - shift)
        planes = [_rows(torch.where(scales == 0, 0, b).to(torch.uint8), gated)]
    else:
        low = _row_factor(element, scales.device)
        planes = [_rows(scales, gated) * (2.0 ** (_place(codec, element) - shift)) * low]
        if codec.kind == "zero":
            assert zeros is not None
            offset = 128.0 if element is Element.INT8 else 0.0
            planes.append(_rows(-(zeros + offset) * 2.0**-6, gated) / low)
        elif codec.kind == "float2":
            planes.append(planes[0] - planes[0].to(torch.bfloat16).float())
        planes = [p.to(torch.bfloat16) for p in planes]
    s = torch.stack(planes, -1)  # [E, T, warp, i0, l8, G, plane]
    E, T, G = s.shape[0], s.shape[1], s.shape[5]
    gc = codec.chunk // codec.group
    s = s.reshape(E, T, 4, 2, 8, G // gc, gc, codec.planes)
    return s.permute(0, 1, 5, 7, 2, 4, 6, 3).contiguous()


def unpack_scales(
    packed: Tensor, element: Element, codec: Codec, gated: bool, shift: int
) -> tuple[Tensor, Tensor | None]:
    """The inverse of pack_scales: (scales [E, N, G] f32 or u8, zeros [E, N, G] f32 or None)."""
    E, T, chunks, planes, _, _, gc, _ = packed.shape
    s = packed.permute(0, 1, 4, 7, 5, 2, 6, 3).reshape(E, T, 4, 2, 8, chunks * gc, planes)
    if codec.e8m0:
        b = s[..., 0].to(torch.int32)
        b = torch.where(b == 0, 0, b - (_place(codec, element) - shift))
        return _unrows(b, gated).to(torch.uint8), None
    low = _row_factor(element, packed.device)
    total = s.float().sum(-1) if codec.kind == "float2" else s[..., 0].float()
    scales = _unrows(total / (2.0 ** (_place(codec, element) - shift)) / low, gated)
    if codec.kind != "zero":
        return scales, None
    offset = 128.0 if element is Element.INT8 else 0.0
    return scales, -_unrows(s[..., 1].float() * low, gated) * 2.0**6 - offset


def pack_rows(values: Tensor, gated: bool) -> Tensor:
    """[E, N] -> [E, N] in the order of the packed rows (biases)."""
    return _rows(values, gated).reshape(values.shape).contiguous()


def unpack_rows(values: Tensor, gated: bool) -> Tensor:
    """The inverse of pack_rows."""
    E, N = values.shape
    return _unrows(values.reshape(E, N // 64, 4, 2, 8), gated)
