"""Making parts fit together: splitting gate_up, finding one scheme for many, converting a part to it.  All exact.

A matrix has one scheme; a checkpoint may give its projections and experts different ones (mixed precision, an expert
left unquantized).  `common` finds the narrowest scheme that holds all of them exactly, `convert` brings a part to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from expertd_kernels.checkpoint.readers.protocol import Layout, Part
from expertd_kernels.checkpoint.repack import Repacked
from expertd_kernels.checkpoint.tensors import Stored
from expertd_kernels.weights.canonical import CODE_DTYPE, SCALE_DTYPE, QuantTensor, unpack_nibbles
from expertd_kernels.weights.scheme import WHOLE, Element, ScaleType, Scheme

# Why it is so: decision 3 in DECISIONS.md.
__all__ = ["common", "convert", "join_halves", "split", "split_layout"]

_F32 = Scheme(Element.F32)


def common(schemes: Iterable[Scheme]) -> Scheme:
    """The narrowest scheme that holds weights of each of these exactly; f32 where only that does."""
    found = list(dict.fromkeys(schemes))
    out = found[0]
    for other in found[1:]:
        out = _common(out, other)
    return out


def _common(a: Scheme, b: Scheme) -> Scheme:
    if a == b:
        return a
    if not (a.element.quantized and b.element.quantized) or a.global_scale != b.global_scale:
        return _F32
    if a.element is not b.element and not (a.element.integer and b.element.integer):
        return _F32
    rows, cols = _finer(a.rows, b.rows), _finer(a.cols, b.cols)
    if rows is None or cols is None:
        return _F32
    element = a.element if a.element is b.element else Element.INT8
    scale = a.scale if a.scale is b.scale else ScaleType.F32
    return Scheme(element, rows, cols, scale, a.zeros or b.zeros, a.global_scale)


def _finer(a: int, b: int) -> int | None:
    """The extent whose blocks lie inside those of both; None if there is none among the two."""
    small, large = sorted((a, b), key=lambda x: (x == WHOLE, x))
    return small if large == WHOLE or large % small == 0 else None


def convert(part: Part, old: Scheme, new: Scheme, n: int, k: int) -> Part:
    """A part [n, k] of scheme `old` as one of scheme `new` = common([old, ...])."""
    if old == new and (part.factors is None or new.element.quantized):
        return part
    codes = code_tensor(part.codes, old)
    if not new.element.quantized:
        wide = _dequantize(part, codes, old, n, k)
        return Part(wide, bias=part.bias, input_scale=part.input_scale)
    assert part.scales is not None, "a quantized part has scales"
    zeros = part.zeros
    if new.zeros and zeros is None:
        zeros = torch.full(part.scales.shape, 8 if old.element is Element.INT4 else 0, dtype=CODE_DTYPE[old.element])
    if new.element is not old.element:  # int4 -> int8: codes and zero points move by 8 alike
        codes = (unpack_nibbles(codes, k).to(torch.int8) - 8).contiguous()
        zeros = None if zeros is None else zeros.to(torch.int8) - 8
    return replace(
        part,
        codes=codes,
        scales=_refine(_scale_values(part.scales, old, new), old, new, n, k),
        zeros=None if zeros is None else _refine(zeros, old, new, n, k),
    )


def _dequantize(part: Part, codes: Tensor, scheme: Scheme, n: int, k: int) -> Tensor:
    """[n, k] f32, natural column order, factors multiplied in."""

    def one(t: Tensor | None) -> Tensor | None:
        return None if t is None else t[None]

    second = part.global_scale
    q = QuantTensor(
        scheme,
        (1, n, k),
        codes[None],
        one(part.scales),
        one(part.zeros),
        None if second is None else second.reshape(1, 1).float(),
        one(part.columns),
        global_exact=None if second is None or second.dtype is not torch.float64 else second.reshape(1, 1),
        factors=one(part.factors),
    )
    return q.dequantize()[0]


def code_tensor(codes: Tensor | Stored | Repacked, scheme: Scheme) -> Tensor:
    """A part's codes in the canonical dtype, [n, k] or [n, ceil(k/2)], contiguous."""
    t, want = read_codes(codes).contiguous(), CODE_DTYPE[scheme.element]
    return t if t.dtype == want else t.view(want)


def read_codes(codes: Tensor | Stored | Repacked) -> Tensor:
    """A part's codes as a matrix; a Stored one may have more dimensions ([n, blocks, bytes of a block])."""
    t = codes if isinstance(codes, Tensor) else codes.read()
    return t.flatten(1)


def _scale_values(scales: Tensor, old: Scheme, new: Scheme) -> Tensor:
    if old.scale is new.scale:
        return scales
    values = torch.exp2(scales.float() - 127.0) if old.scale is ScaleType.E8M0 else scales.float()
    return values.to(SCALE_DTYPE[new.scale])


def _refine(blocks: Tensor, old: Scheme, new: Scheme, n: int, k: int) -> Tensor:
    """One number a block of the old scheme -> one a block of the new, finer one."""
    rows, cols = new.scale_shape(n, k)
    out = blocks
    if old.rows != new.rows:
        old_rows, new_rows = old.rows or n, new.rows or n
        out = out.repeat_interleave(max(1, old_rows // new_rows), dim=0)[:rows]
    if old.cols != new.cols:
        old_cols, new_cols = old.cols or k, new.cols or k
        out = out.repeat_interleave(-(-old_cols // new_cols), dim=1)[:, :cols]
    return out


@dataclass(frozen=True)
class _Halves:
    """How scales of gate_up become those of its halves.  rows: extent of a block in a half.  copies: how often a scale
    row is repeated before the rows are cut like the weights' rows; 0 = they are not cut, each half gets all."""

    rows: int
    copies: int


def _halves(scheme: Scheme, n: int, interleaved: bool) -> _Halves:
    half, rows = n // 2, scheme.rows
    if not scheme.element.quantized or rows == 1:
        return _Halves(rows, 1)
    if rows == WHOLE:
        return _Halves(rows, 0)
    if interleaved and rows % 2 == 0:
        return _Halves(rows // 2, 0)
    if not interleaved and half % rows == 0:
        return _Halves(rows, 1)
    return _Halves(1, rows)


def split_layout(layout: Layout, interleaved: bool) -> Layout:
    """The layout of each half of a gate_up layout."""
    halves = _halves(layout.scheme, layout.n, interleaved)
    return replace(layout, scheme=replace(layout.scheme, rows=halves.rows), n=layout.n // 2)


def split(part: Part, layout: Layout, interleaved: bool) -> tuple[Part, Part]:
    """A gate_up part as (gate, up), rows [0, n/2) and [n/2, n), or even and odd rows where they alternate."""
    n, copies = layout.n, _halves(layout.scheme, layout.n, interleaved).copies
    codes = part.codes if isinstance(part.codes, Stored) and not interleaved else read_codes(part.codes)

    def cut(t: Tensor, which: int) -> Tensor:
        half = t.shape[0] // 2
        return t[which::2] if interleaved else t[which * half : (which + 1) * half]

    def blocks(t: Tensor | None, which: int) -> Tensor | None:
        if t is None or copies == 0:
            return t
        return cut(t if copies == 1 else t.repeat_interleave(copies, dim=0)[:n], which)

    def one(which: int) -> Part:
        second = part.global_scale
        return replace(
            part,
            codes=codes.rows(which * n // 2, (which + 1) * n // 2) if isinstance(codes, Stored) else cut(codes, which),
            scales=blocks(part.scales, which),
            zeros=blocks(part.zeros, which),
            global_scale=second.reshape(2)[which] if second is not None and second.numel() == 2 else second,
            bias=None if part.bias is None else cut(part.bias, which),
        )

    return one(0), one(1)


def join_halves(first: Part, second: Part) -> Part:
    """The gate_up part whose first and last n/2 rows these are (schemes with a scale for each row)."""

    def cat(a: Tensor | None, b: Tensor | None) -> Tensor | None:
        return None if a is None or b is None else torch.cat((a, b))

    return replace(
        first,
        codes=torch.cat((read_codes(first.codes), read_codes(second.codes))),
        scales=cat(first.scales, second.scales),
        zeros=cat(first.zeros, second.zeros),
        bias=cat(first.bias, second.bias),
    )
