"""Layouts of FlashInfer's TRTLLM-generated MoE kernels, from and to canonical weights.  Needs no GPU.

All of them want the up rows of w13 before the gate rows.  All but the last then want rows in the order in which the
kernel's epilogue writes them, for tiles of 128 rows:

    1. up and gate rows side by side: u0, g0, u1, g1, ...
    2. in every 32 rows, row 4 * i + j of the source at 8 * j + i  (i < 8, j < 4)

    bf16    steps 1 and 2, then blocks of 128 bytes along K:  [E, K / 64, N, 64]
    int4    signed nibbles, steps 1 and 2, the same blocks:   [E, K / 256, N, 128] u8;  bf16 scales, swizzled
    mxfp4   steps 1 and 2:  [E, N, K / 2] u8;  exponents swizzled;  f32 biases in the order of the rows
    mxfp8   steps 1 and 2:  [E, N, K] e4m3;  exponents swizzled
    nvfp4   steps 1 and 2:  [E, N, K / 2] u8;  e4m3 scales of 16 columns swizzled;  second-level scales [E, segments]
    tensor  steps 1 and 2:  [E, N, K] e4m3;  scales [E, segments, 1] as they are
    block   e4m3 [E, N, K], f32 [E, N / 128, K / 128]: up rows before gate rows and nothing else

Swizzled scales [E, N, S]: tiles of 128 rows and 4 columns, row-major; (r, c) of one at 16 (r % 32) + 4 (r // 32) + c.

H and I are padded with weights that are zero to multiples of the kernel's tiles; the logical sizes stay in the facts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from expertd_kernels.backends.scales import as_f32, as_stored, refuse_signs
from expertd_kernels.weights.canonical import SCALE_DTYPE, QuantTensor
from expertd_kernels.weights.scheme import WHOLE, Element, Scheme
from expertd_kernels.weights.serial import matrix_to_json, scheme_from_json

__all__ = [
    "GROUP",
    "MULTIPLES",
    "cut_segments",
    "form_for",
    "form_of",
    "pack_matrix",
    "pad_segments",
    "swizzle",
    "unpack_matrix",
    "unswizzle",
]

MULTIPLES = {"bf16": 128, "int4": 256, "mxfp4": 256, "nvfp4": 256, "mxfp8": 128, "tensor": 128, "block": 128}
"""H and I are padded to these (checks of the package: 128 rows a tile, 128 bytes a block, 4 scale columns a tile)."""

BLOCK_BYTES = 128
ROWS = 32
SIGN_BITS = 0x88
GROUP = {"int4": 32, "mxfp4": 32, "mxfp8": 32, "nvfp4": 16}
ONE_E8M0, ONE_E4M3 = 127, 0x38
E4M3_FORMS = frozenset({"mxfp8", "tensor", "block"})
"""Forms whose codes are e4m3."""


def form_of(q: QuantTensor) -> str:
    """The package's form for a matrix.  Refused: scales that the kernel would read without their sign."""
    form = form_for(q.scheme)
    assert q.columns is None, "activation order is not the row's"
    assert q.zeros is None, "zero points are not the row's"
    assert q.global_scales is None or form == "nvfp4", "second-level scales are the row's with nvfp4 alone"
    if form == "nvfp4":
        assert q.scales is not None
        refuse_signs(q.scales)
    return form


def form_for(s: Scheme) -> str:
    """The package's form for a scheme."""
    if s.name in ("nvfp4", "nvfp4_single"):
        return "nvfp4"
    if s.element is Element.BF16:
        return "bf16"
    if s.element is Element.INT4 and s.group_size == GROUP["int4"]:
        return "int4"
    if s.name in ("mxfp4", "mxfp8"):
        return s.name
    if s.element is Element.E4M3 and (s.rows, s.cols) == (WHOLE, WHOLE):
        return "tensor"
    assert (s.element, s.rows, s.cols) == (Element.E4M3, 128, 128), f"{s.name} is not the row's"
    return "block"


def _row_order(rows: int, segments: int, shuffled: bool, device: torch.device) -> Tensor:
    """[rows] int64: which canonical row (gate rows, then up rows) stands at each place."""
    order = torch.arange(rows, device=device).view(segments, rows // segments).flip(0)
    if not shuffled:
        return order.flatten()
    return order.t().reshape(-1, ROWS // 4, 4).transpose(1, 2).flatten()


def swizzle(scales: Tensor) -> Tensor:
    """[E, N, S], N a multiple of 128 and S of 4 -> the same shape, in tiles of 128 rows and 4 columns."""
    E, N, S = scales.shape
    return scales.reshape(E, N // 128, 4, 32, S // 4, 4).permute(0, 1, 4, 3, 2, 5).reshape(E, N, S)


def unswizzle(scales: Tensor) -> Tensor:
    """The inverse of swizzle."""
    E, N, S = scales.shape
    return scales.reshape(E, N // 128, S // 4, 32, 4, 4).permute(0, 1, 4, 3, 2, 5).reshape(E, N, S)


def pad_segments(t: Tensor, segments: int, rows: int, cols: int, value: float = 0) -> Tensor:
    """[E, N, K] -> [E, segments * rows, cols]: each segment's rows and all columns filled up with `value`."""
    E, N, K = t.shape
    if rows * segments == N and cols == K:
        return t
    return F.pad(t.view(E, segments, N // segments, K), (0, cols - K, 0, rows - N // segments), value=value).flatten(
        1, 2
    )


def cut_segments(t: Tensor, segments: int, rows: int, cols: int) -> Tensor:
    """The inverse of pad_segments: the first `rows` of each segment and `cols` columns."""
    E, N, K = t.shape
    return t.view(E, segments, N // segments, K)[:, :, :rows, :cols].flatten(1, 2).contiguous()


def _blocks(t: Tensor) -> Tensor:
    """[E, N, bytes] u8 -> [E, bytes / 128, N, 128]."""
    E, N, size = t.shape
    return t.view(E, N, size // BLOCK_BYTES, BLOCK_BYTES).transpose(1, 2).contiguous()


def _per_byte(form: str) -> tuple[int, int]:
    """(columns, bytes) that belong together in the codes of a form."""
    return (1, 1) if form in E4M3_FORMS else (1, 2) if form == "bf16" else (2, 1)


def _bytes(q: QuantTensor, form: str, rows: int, cols: int) -> Tensor:
    """[E, segments * rows, bytes of cols] u8: padded codes; int4 signed, so that its padding is zero, too."""
    t = q.codes.contiguous().view(torch.uint8)
    columns, size = _per_byte(form)
    return pad_segments(t ^ SIGN_BITS if form == "int4" else t, q.segments, rows, cols * size // columns)


def _scales(q: QuantTensor, form: str, rows: int, cols: int, order: Tensor, out: dict[str, Tensor]) -> Tensor:
    assert q.scales is not None
    if form == "block":
        blocks = as_f32(q.scales, q.scheme.scale)
        E, N, _ = blocks.shape
        return blocks.view(E, q.segments, N // q.segments, -1).flip(1).flatten(1, 2)
    if form == "tensor":
        return q.scales.float()
    scales, filler = q.scales, ONE_E8M0
    if form == "nvfp4":
        scales, filler = q.scales.view(torch.uint8), ONE_E4M3
    if form == "int4":
        scales, filler = q.scales.to(torch.bfloat16), 1
        if not torch.equal(scales.to(q.scales.dtype), q.scales):
            out["exact_scales"] = q.scales.contiguous()
    return swizzle(pad_segments(scales, q.segments, rows, cols // GROUP[form], filler)[:, order])


def pack_matrix(q: QuantTensor, form: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors codes, scales, globals, bias (those that exist) and the facts that unpack needs.  form: form_of(q)."""
    _, N, K = q.shape
    multiple = MULTIPLES[form]
    rows, cols = (-(-x // multiple) * multiple for x in (N // q.segments, K))
    assert form != "block" or (rows, cols) == (N // q.segments, K), f"[{N}, {K}] is cut by blocks: not the row's"
    assert q.bias is None or form == "mxfp4", f"biases of {q.scheme.name} are not the row's"
    order = _row_order(q.segments * rows, q.segments, form != "block", q.device)
    out: dict[str, Tensor] = {}
    codes = _bytes(q, form, rows, cols)[:, order]
    if form == "bf16":
        out["codes"] = _blocks(codes).view(torch.bfloat16)
    elif form in E4M3_FORMS:
        out["codes"] = codes.view(torch.float8_e4m3fn)
    else:
        out["codes"] = _blocks(codes) if form == "int4" else codes
    if q.scales is not None:
        out["scales"] = _scales(q, form, rows, cols, order, out).contiguous()
    if q.global_scales is not None:
        out["globals"] = q.global_scales.contiguous()
        out |= {} if q.global_exact is None else {"exact_globals": q.global_exact.contiguous()}
    if q.bias is not None:
        out["bias"] = pad_segments(q.bias[..., None], q.segments, rows, 1)[:, order, 0].contiguous()
    meta = {
        **matrix_to_json(q),
        "form": form,
        "rows": rows,
        "cols": cols,
    }
    return out, meta


def _ordered_back(t: Tensor, meta: Mapping[str, Any]) -> Tensor:
    """[E, N, ...] in canonical row order."""
    order = _row_order(meta["segments"] * meta["rows"], meta["segments"], meta["form"] != "block", t.device)
    out = torch.empty_like(t)
    out[:, order] = t
    return out


def _codes_back(codes: Tensor, meta: Mapping[str, Any]) -> Tensor:
    form, (_, N, K), segments = meta["form"], meta["shape"], meta["segments"]
    t = codes.view(torch.uint8)
    if form in ("bf16", "int4"):
        t = t.transpose(1, 2).flatten(2)
    columns, size = _per_byte(form)
    t = cut_segments(_ordered_back(t.contiguous(), meta), segments, N // segments, -(-K // columns) * size)
    if form == "int4":
        return t ^ SIGN_BITS
    return t.view(torch.float8_e4m3fn if form in E4M3_FORMS else torch.bfloat16 if form == "bf16" else torch.uint8)


def _scales_back(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Tensor | None:
    form, (_, N, K), segments = meta["form"], meta["shape"], meta["segments"]
    if form == "bf16":
        return None
    if "exact_scales" in tensors:
        return tensors["exact_scales"]
    scales = tensors["scales"]
    kind = scheme_from_json(meta["scheme"]).scale
    dtype = SCALE_DTYPE[kind]
    if form == "block":
        E, blocks, _ = scales.shape
        return as_stored(scales.view(E, segments, blocks // segments, -1).flip(1).flatten(1, 2), kind)
    if form == "tensor":
        return scales.to(dtype)
    natural = _ordered_back(unswizzle(scales).contiguous(), meta)
    cut = cut_segments(natural, segments, N // segments, -(-K // GROUP[form]))
    return cut.view(dtype) if form == "nvfp4" else cut.to(dtype)


def unpack_matrix(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> QuantTensor:
    """The exact inverse of pack_matrix."""
    E, N, K = meta["shape"]
    segments = meta["segments"]
    bias = None
    if "bias" in tensors:
        bias = cut_segments(_ordered_back(tensors["bias"][..., None].contiguous(), meta), segments, N // segments, 1)[
            ..., 0
        ]
    return QuantTensor(
        scheme_from_json(meta["scheme"]),
        (E, N, K),
        _codes_back(tensors["codes"], meta),
        _scales_back(tensors, meta),
        global_scales=tensors.get("globals"),
        global_exact=tensors.get("exact_globals"),
        bias=bias,
        segments=segments,
    )
