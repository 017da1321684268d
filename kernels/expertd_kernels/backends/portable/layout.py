"""Where each code, scale and zero point of one matrix lies, as a value, and the way there and back.

Quantized codes live in 16-bit containers, P = 4 or 2 codes each, in tiles of 16 rows and one K block of P * SW columns:

    codes [E, segments, NP / 16, NKB, 16, SW] int16     NP = N / segments rounded up to 16, NKB = ceil(K / (P * SW))
    code j of container i in K block kb: column (kb * P + j) * SW + i

so a program reads whole cache lines and every token count uses the same bytes.  Scales that change along K are fields
of 32-bit words that run along N, one word holding `spw` neighbouring groups where a K block has that many:

    scales [E, segments, words, scale rows of a segment] int32;  zeros likewise, as bf16 fields

Worked example, int4 in groups of 128 with bf16 scales: P = 4, SW = 64, so a K block has 256 columns and two groups; one
word a row and K block holds both scales (spw = 2); 128 bytes of codes come with 4 bytes of scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from expertd_kernels.weights.canonical import SCALE_DTYPE, QuantTensor, unpack_nibbles
from expertd_kernels.weights.scheme import WHOLE, Element, ScaleType, Scheme

__all__ = ["Layout", "layout_of", "pack_matrix", "unpack_matrix"]

ROW_TILE = 16
ELEM = {Element.INT4: 0, Element.E2M1: 1, Element.INT8: 2, Element.E4M3: 3}
FLOAT = 4
SKIND = {ScaleType.BF16: 0, ScaleType.F16: 1, ScaleType.F32: 2, ScaleType.E8M0: 3, ScaleType.E4M3: 4}
PASSED = ("global_scales", "columns", "bias", "global_exact")
"""Fields that are packed as they are."""
EXACT_IN_BF16 = frozenset({ScaleType.BF16, ScaleType.E8M0, ScaleType.E4M3})
E2M1_BITS = ((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (11, 10, 13, 14))
"""Where bits 0 to 3 of codes 0 to 3 stand in a container (unpack.ASM_E2M1); other codes stand side by side."""
LARGEST_FOLDED = {Element.INT4: 2.0**6, Element.INT8: 2.0**6, Element.E2M1: 2.0**13, Element.E4M3: 2.0**19}
"""Scales above this would overflow bf16 when unpack.ptx_operand folds them into its power of two."""


@dataclass(frozen=True)
class Layout:
    """Numbers that the kernels take as constants.  group: columns that share a scale, 0 = constant along K.

    sw, p         slice width in columns, codes a container (1: weights of a float type, stored as they are)
    spw, sbits, skind   scale fields a word, bits of a field, kind of number (unpack.py)
    zspw          zero point fields a word
    rows          rows of a segment that share a scale (1; 0 = all)
    zeros         whether there are zero points
    odd           groups that no slice width divides: one word for each group, read for each weight
    signed        int8 codes as they are (for activations rounded to int8), else as unsigned numbers, plus 128
    fold          how scales may be multiplied onto the operand: 0 not at all (too large), 1 as the bf16 numbers that
                  they are, 2 as f32 numbers
    """

    elem: int
    p: int
    sw: int
    group: int = 0
    rows: int = 1
    spw: int = 1
    sbits: int = 32
    skind: int = 2
    zspw: int = 1
    zeros: bool = False
    odd: bool = False
    fold: int = 0
    signed: bool = False

    @property
    def block(self) -> int:
        """Columns of a K block."""
        return self.p * self.sw

    def words(self, k: int, spw: int) -> int:
        """Words of scales along K, with those of the last K block's padding: they are read, and zero."""
        padded = -(-k // self.block) * self.block
        return 1 if self.group == 0 else -(-padded // (self.group * spw))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _slice_width(k: int, group: int, p: int, least: int) -> int:
    """The widest of 64, 32, 16 columns that divides the group and pads K by at most 5 %, else what pads least; not
    below `least`."""
    widths = [w for w in (64, 32, 16) if group % w == 0 and w >= least]

    def padded(w: int) -> int:
        return -(-k // (p * w)) * p * w

    return next((w for w in widths if padded(w) * 20 <= k * 21), min(widths, key=padded))


def layout_of(scheme: Scheme, n: int, k: int, segments: int, moderate: bool = True, eight: bool = False) -> Layout:
    """The layout of an [n, k] matrix.  moderate: no scale is above LARGEST_FOLDED.  eight: for activations rounded to
    8 bits, of which a product takes 32 columns at least."""
    least = 32 if eight else 16
    signed = eight and scheme.element is Element.INT8
    if not scheme.element.quantized:
        return Layout(FLOAT, 1, 64)
    p = 16 // scheme.element.bits
    group = 0 if scheme.cols == WHOLE or scheme.cols >= k else scheme.cols
    elem = ELEM[scheme.element]
    if group == 0:
        sw = _slice_width(k, 64, p, least)
        return Layout(elem, p, sw, 0, scheme.rows, zeros=scheme.zeros, signed=signed)
    if group % least:
        bits, kind = scheme.scale.bits, SKIND[scheme.scale]
        return Layout(elem, p, 16, group, scheme.rows, 1, bits, kind, zeros=scheme.zeros, odd=True, signed=signed)
    sw = _slice_width(k, group, p, least)
    groups = p * sw // group if p * sw % group == 0 else 0
    bits, kind = scheme.scale.bits, SKIND[scheme.scale]
    if kind == SKIND[ScaleType.E8M0] and groups % 4 and groups % 2 == 0:
        bits, kind = 16, SKIND[ScaleType.BF16]
    dense = groups > 0 and groups % (32 // bits) == 0
    return Layout(
        elem,
        p,
        sw,
        group,
        scheme.rows,
        32 // bits if dense else 1,
        bits,
        kind,
        2 if groups > 0 and groups % 2 == 0 else 1,
        scheme.zeros,
        fold=0 if not moderate else 1 if scheme.scale in EXACT_IN_BF16 else 2,
        signed=signed,
    )


def _codes(q: QuantTensor, e: int, lay: Layout) -> Tensor:
    """[N, K] int16: expert e's codes as unsigned numbers (int8 plus 128, or its byte where it keeps its sign)."""
    c = q.codes[e]
    if q.scheme.element.packed:
        return unpack_nibbles(c, q.shape[2]).to(torch.int16)
    if q.scheme.element is Element.INT8:
        return c.to(torch.int16) & 0xFF if lay.signed else c.to(torch.int16) + 128
    return c.view(torch.uint8).to(torch.int16)


def _put(codes: Tensor, j: int, lay: Layout) -> Tensor:
    """Codes (int16) as code j of their containers."""
    if lay.elem != ELEM[Element.E2M1]:
        return codes << (16 // lay.p * j)
    parts = [((codes >> i) & 1) << at for i, at in enumerate(E2M1_BITS[j])]
    return parts[0] | parts[1] | parts[2] | parts[3]


def _take(word: Tensor, j: int, lay: Layout) -> Tensor:
    """The inverse of _put: code j of each container."""
    if lay.elem != ELEM[Element.E2M1]:
        bits = 16 // lay.p
        return (word >> (bits * j)) & ((1 << bits) - 1)
    parts = [((word >> at) & 1) << i for i, at in enumerate(E2M1_BITS[j])]
    return parts[0] | parts[1] | parts[2] | parts[3]


def _pack_codes(q: QuantTensor, lay: Layout) -> Tensor:
    """One expert at a time: temporary memory is a few times one expert's codes."""
    E, N, K = q.shape
    seg = N // q.segments
    tiles, nkb = -(-seg // ROW_TILE), -(-K // lay.block)
    out = torch.empty(E, q.segments, tiles, nkb, ROW_TILE, lay.sw, dtype=torch.int16, device=q.device)
    pad = (0, nkb * lay.block - K, 0, tiles * ROW_TILE - seg)
    for e in range(E):
        c = torch.nn.functional.pad(_codes(q, e, lay).view(q.segments, seg, K), pad)
        c = c.view(q.segments, tiles, ROW_TILE, nkb, lay.p, lay.sw)
        word = _put(c[:, :, :, :, 0], 0, lay)
        for j in range(1, lay.p):
            word = word | _put(c[:, :, :, :, j], j, lay)
        out[e] = word.transpose(2, 3)
    return out


def _unpack_codes(packed: Tensor, lay: Layout, scheme: Scheme, n: int, k: int) -> Tensor:
    """The inverse: codes in canonical form, [E, N, K] or [E, N, ceil(K/2)] u8."""
    E, segments, tiles, nkb = packed.shape[:4]
    width = -(-k // 2) if scheme.element.packed else k
    out = torch.empty(E, n, width, dtype=torch.uint8, device=packed.device)
    for e in range(E):
        word = packed[e].transpose(2, 3)
        c = torch.stack([_take(word, j, lay) for j in range(lay.p)], dim=-2)
        c = c.reshape(segments, tiles * ROW_TILE, nkb * lay.block)[:, : n // segments].reshape(n, -1).to(torch.uint8)
        if scheme.element.packed:
            c = c[:, : 2 * width]
            out[e] = c[:, 0::2] | (c[:, 1::2] << 4)
        else:
            out[e] = c[:, :k] ^ (128 if scheme.element is Element.INT8 and not lay.signed else 0)
    if scheme.element is Element.INT8:
        return out.view(torch.int8)
    return out.view(torch.float8_e4m3fn) if scheme.element is Element.E4M3 else out


def _to_words(fields: Tensor, segments: int, words: int, spw: int, bits: int) -> Tensor:
    """[E, segments * rows, groups] unsigned int32 fields -> [E, segments, words, rows] int32, spw fields a word."""
    E, rows, groups = fields.shape
    out = torch.empty(E, segments, words, rows // segments, dtype=torch.int32, device=fields.device)
    for e in range(E):
        f = torch.nn.functional.pad(fields[e], (0, words * spw - groups)).view(segments, -1, words, spw)
        word = f[..., 0]
        for i in range(1, spw):
            word = word | (f[..., i] << (bits * i))
        out[e] = word.transpose(1, 2)
    return out


def _from_words(words: Tensor, groups: int, spw: int, bits: int) -> Tensor:
    """The inverse of _to_words: [E, segments * rows, groups] int32 fields, unsigned below 32 bits."""
    E, segments, _, rows = words.shape
    out = torch.empty(E, segments * rows, groups, dtype=torch.int32, device=words.device)
    mask = (1 << bits) - 1 if bits < 32 else -1
    for e in range(E):
        w = words[e].transpose(1, 2)
        f = torch.stack([(w >> (bits * i)) & mask for i in range(spw)], dim=-1)
        out[e] = f.flatten(2)[..., :groups].flatten(0, 1)
    return out


def _bits_of(t: Tensor) -> Tensor:
    """The bits of a tensor's numbers as int32, unsigned below 32 bits."""
    if t.element_size() == 4:
        return t.contiguous().view(torch.int32)
    if t.element_size() == 2:
        return t.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    return t.contiguous().view(torch.uint8).to(torch.int32)


def _exponent_to_f32(b: Tensor) -> Tensor:
    """e8m0 exponents -> 2^(b - 127) f32, by bits: b = 0 is subnormal."""
    b = b.to(torch.int32)
    return torch.where(b == 0, 0x00400000, b << 23).view(torch.float32)


def _scale_fields(scales: Tensor, lay: Layout, kind: ScaleType) -> Tensor:
    """Fields of stored scales; e8m0 in 16 bits becomes the bf16 number."""
    if kind is ScaleType.E8M0 and lay.sbits == 16:
        return _bits_of(_exponent_to_f32(scales).to(torch.bfloat16))
    return _bits_of(scales)


def _unscale_fields(fields: Tensor, lay: Layout, kind: ScaleType) -> Tensor:
    if kind is ScaleType.E8M0:
        return (fields >> 7 if lay.sbits == 16 else fields).to(torch.uint8)
    if kind is ScaleType.F32:
        return fields.view(torch.float32)
    return fields.to(torch.uint8 if kind is ScaleType.E4M3 else torch.int16).view(SCALE_DTYPE[kind])


def _numbers(scales: Tensor, kind: ScaleType) -> Tensor:
    """Stored scales as f32, without the second-level scale."""
    return _exponent_to_f32(scales) if kind is ScaleType.E8M0 else scales.float()


def _zero_offset(scheme: Scheme) -> int:
    """Stored codes are unsigned: int8's zero points move with them."""
    return 128 if scheme.element is Element.INT8 else 0


def pack_matrix(q: QuantTensor, eight: bool = False) -> tuple[dict[str, Tensor], Layout]:
    """Tensors codes, scales | row_scales, zeros, global_scales, columns, bias (those that exist), and the layout.
    eight: for activations rounded to 8 bits."""
    out = {name: t.contiguous() for name, t in q.tensors() if name in PASSED}
    s, (E, N, K) = q.scheme, q.shape
    if not s.element.quantized:
        return out | {"codes": q.codes.contiguous()}, layout_of(s, N, K, q.segments)
    assert q.scales is not None
    moderate = all(bool(_numbers(one, s.scale).abs().max() <= LARGEST_FOLDED[s.element]) for one in q.scales)
    lay = layout_of(s, N, K, q.segments, moderate, eight)
    out["codes"] = _pack_codes(q, lay)
    if lay.group == 0:
        out["row_scales"] = _numbers(q.scales, s.scale).reshape(E, q.segments, -1).contiguous()
    else:
        out["scales"] = _to_words(
            _scale_fields(q.scales, lay, s.scale), q.segments, lay.words(K, lay.spw), lay.spw, lay.sbits
        )
    if q.zeros is not None:
        zero = (q.zeros.to(torch.int32) + _zero_offset(s)).to(torch.bfloat16)
        out["zeros"] = _to_words(_bits_of(zero), q.segments, lay.words(K, lay.zspw), lay.zspw, 16)
    return out, lay


def unpack_matrix(
    tensors: Mapping[str, Tensor], lay: Layout, scheme: Scheme, shape: tuple[int, int, int], segments: int
) -> QuantTensor:
    """The exact inverse of pack_matrix."""
    _, n, k = shape
    rest = {name: tensors.get(name) for name in PASSED}
    if not scheme.element.quantized:
        return QuantTensor(scheme, shape, tensors["codes"], segments=segments, **rest)
    codes = _unpack_codes(tensors["codes"], lay, scheme, n, k)
    groups = scheme.scale_shape(n, k, segments)[1]
    if lay.group == 0:
        flat = tensors["row_scales"].flatten(1)[..., None]
        if scheme.scale is ScaleType.E8M0:
            scales = (flat.contiguous().view(torch.int32) >> 23).to(torch.uint8)
        else:
            scales = flat.to(SCALE_DTYPE[scheme.scale])
    else:
        scales = _unscale_fields(_from_words(tensors["scales"], groups, lay.spw, lay.sbits), lay, scheme.scale)
    zeros = None
    if scheme.zeros:
        fields = _from_words(tensors["zeros"], groups, lay.zspw, 16).to(torch.int16).view(torch.bfloat16)
        number = fields.to(torch.int32) - _zero_offset(scheme)
        zeros = number.to(torch.int8 if scheme.element is Element.INT8 else torch.uint8)
    return QuantTensor(scheme, shape, codes, scales, zeros, segments=segments, **rest)
