"""Layouts of FlashInfer's CUTLASS MoE kernels, from and to canonical weights.  Needs no GPU.

All of them want the up rows of w13 before the gate rows.

    bf16    [E, N, K], H and I padded to multiples of 8
    block   e4m3 [E, N, K] and f32 [E, N / 128, K / 128], in 128 x 128 blocks
    mxfp4   u8 [E, N, K / 2] in the order of Hopper's mixed-input tiles, and exponents [E, N / 64, K / 128, 16, 16];
            H and I padded to multiples of 128
    mxfp4s  (on rounded activations) u8 [E, N, K / 2] row-major, exponents [E, N, K / 32] swizzled as in trtllm_layout
    mxfp8   (likewise) e4m3 [E, N, K], and the same exponents; H and I padded to multiples of 128
    nvfp4   as mxfp4s with e4m3 scales [E, N, K / 16], and one second-level scale an expert
    tensor  e4m3 [E, N, K], H and I padded to multiples of 16, and one f32 scale an expert

nvfp4 and tensor want gate and up rows to have the same scale.

mxfp4 tiles: 16 rows and 64 columns (32 bytes).  Rows r and r + 8 and bytes l and l + 4 of an eight-byte piece share a
32-bit word, whose bits BITS then spreads so that one shift and mask make two bf16 numbers:

    byte (row 8 h + r, 8 m + 4 s + l)  ->  byte 2 s + h of the word at (row 8 (m % 2) + r, byte 16 (m // 2) + 4 l)
    with h, s < 2, m < 4, l < 4, r < 8

Exponents: the 64 x 4 of a 64-row and 128-column block, rows in four slices of 16: [row % 16][row // 16, column].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from expertd_kernels.backends.scales import as_f32, as_stored, refuse_signs
from expertd_kernels.backends.trtllm_layout import cut_segments, pad_segments, swizzle, unswizzle
from expertd_kernels.common.refused import Refused
from expertd_kernels.weights.canonical import SCALE_DTYPE, QuantTensor
from expertd_kernels.weights.scheme import WHOLE, ActivationQuant, Element, Scheme
from expertd_kernels.weights.serial import matrix_to_json, scheme_from_json

__all__ = ["BITS", "GROUP", "MULTIPLES", "form_for", "form_of", "pack_matrix", "unpack_matrix"]

MULTIPLES = {"bf16": 8, "mxfp4": 128, "mxfp4s": 128, "mxfp8": 128, "nvfp4": 128, "tensor": 16, "block": 128}
"""H and I are padded to these (the package's checks: 16 bytes of the narrower operand, 128 for mxfp4)."""

BITS = (6, 7, 8, 15, 22, 23, 24, 31, 3, 4, 5, 12, 19, 20, 21, 28, 0, 1, 2, 9, 16, 17, 18, 25, 13, 10, 11, 14, 29, 26,
        27, 30)  # fmt: skip
"""Where bit i of a word of eight e2m1 codes goes."""

GROUP = {"mxfp4": 32, "mxfp4s": 32, "mxfp8": 32, "nvfp4": 16}
FILLER = {"mxfp4": 127, "mxfp4s": 127, "mxfp8": 127, "nvfp4": 0x38}
"""Bytes of the scale 1."""


def form_for(s: Scheme, rounding: ActivationQuant) -> str:
    """The package's form for a scheme, with activations rounded like this."""
    if s.name in ("nvfp4", "nvfp4_single"):
        return "nvfp4"
    if s.element is Element.BF16:
        return "bf16"
    if s.name == "mxfp4":
        return "mxfp4s" if rounding is ActivationQuant.MXFP8 else "mxfp4"
    if s.name == "mxfp8":
        return "mxfp8"
    if s.element is Element.E4M3 and (s.rows, s.cols) == (WHOLE, WHOLE):
        return "tensor"
    assert (s.element, s.rows, s.cols) == (Element.E4M3, 128, 128), f"{s.name} is not the row's"
    return "block"


def form_of(q: QuantTensor, rounding: ActivationQuant) -> str:
    """The package's form for a matrix.  Refused: scales that the kernel would read without their sign, or as one where
    there are two."""
    form = form_for(q.scheme, rounding)
    assert q.columns is None, "activation order is not the row's"
    assert q.zeros is None, "zero points are not the row's"
    assert q.global_scales is None or form == "nvfp4", "second-level scales are the row's with nvfp4 alone"
    if form == "nvfp4":
        _check_nvfp4(q)
    if form == "tensor":
        assert q.scales is not None
        _check_equal(q.scales)
    return form


def _check_equal(scales: Tensor) -> None:
    """scales [E, segments, ...]: of each expert all the same."""
    if not torch.equal(scales, scales[:, :1].expand_as(scales)):
        raise Refused("gate and up rows have different scales, the kernel has one for both")


def _check_nvfp4(q: QuantTensor) -> None:
    assert q.scales is not None
    refuse_signs(q.scales)
    if q.global_scales is not None:
        _check_equal(q.global_scales)


def _flip(t: Tensor, segments: int) -> Tensor:
    """[E, N, ...] gate rows, then up rows -> up rows, then gate rows; its own inverse."""
    E, N = t.shape[:2]
    return t.reshape(E, segments, N // segments, *t.shape[2:]).flip(1).reshape(t.shape)


def _spread(words: Tensor, back: bool) -> Tensor:
    """int32 words with bit i at BITS[i]; back: the inverse."""
    out = torch.zeros_like(words)
    for i, at in enumerate(BITS):
        source, target = (at, i) if back else (i, at)
        out |= ((words >> source) & 1) << target
    return out


def _tile(codes: Tensor) -> Tensor:
    """[N, bytes] u8 of one expert -> the same shape in tile order."""
    N, size = codes.shape
    t = codes.view(N // 16, 2, 8, size // 32, 2, 2, 2, 4)  # block, h, r, piece, m // 2, m % 2, s, l
    words = t.permute(0, 2, 3, 4, 5, 7, 6, 1).flatten(-2).contiguous().view(torch.int32)
    words = _spread(words.view(N // 16, 8, size // 32, 2, 2, 4), back=False)
    return words.permute(0, 4, 1, 2, 3, 5).contiguous().view(torch.uint8).view(N, size)


def _untile(codes: Tensor) -> Tensor:
    """The inverse of _tile."""
    N, size = codes.shape
    words = codes.contiguous().view(torch.int32).view(N // 16, 2, 8, size // 32, 2, 4)
    words = _spread(words.permute(0, 2, 3, 4, 1, 5).contiguous(), back=True)
    t = words.view(torch.uint8).view(N // 16, 8, size // 32, 2, 2, 4, 2, 2)
    return t.permute(0, 7, 1, 2, 3, 4, 6, 5).reshape(N, size)


def _fold(scales: Tensor) -> Tensor:
    """[E, N, K / 32] u8 -> [E, N / 64, K / 128, 16, 16]."""
    E, N, S = scales.shape
    t = scales.reshape(E, N // 64, 4, 16, S // 4, 4).permute(0, 1, 4, 3, 2, 5)
    return t.reshape(E, N // 64, S // 4, 16, 16)


def _unfold(scales: Tensor) -> Tensor:
    """The inverse of _fold."""
    E, blocks, columns = scales.shape[:3]
    t = scales.view(E, blocks, columns, 16, 4, 4).permute(0, 1, 4, 3, 2, 5)
    return t.reshape(E, blocks * 64, columns * 4)


def _bias(q: QuantTensor, rows: int, out: dict[str, Tensor]) -> None:
    """bf16, as the kernel reads it; f32 beside it where bf16 does not hold it exactly."""
    assert q.bias is not None
    rounded = q.bias.to(torch.bfloat16)
    if not torch.equal(rounded.float(), q.bias):
        out["exact_bias"] = q.bias.contiguous()
    out["bias"] = _flip(pad_segments(rounded[..., None], q.segments, rows, 1), q.segments)[..., 0].contiguous()


def pack_matrix(q: QuantTensor, form: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors codes, scales, globals, bias (those that exist) and the facts that unpack needs.  form: form_of(q)."""
    _, N, K = q.shape
    multiple = MULTIPLES[form]
    rows, cols = (-(-x // multiple) * multiple for x in (N // q.segments, K))
    out: dict[str, Tensor] = {}
    if form == "block":
        assert (rows, cols) == (N // q.segments, K), f"[{N}, {K}] has cut blocks, which are not the row's"
        assert q.bias is None, "biases of e4m3 blocks are not the row's"
        assert q.scales is not None
        out["codes"] = _flip(q.codes.view(torch.uint8), q.segments).view(torch.float8_e4m3fn)
        out["scales"] = _flip(as_f32(q.scales, q.scheme.scale), q.segments)
    elif form == "bf16":
        out["codes"] = _flip(pad_segments(q.codes, q.segments, rows, cols), q.segments)
    elif form == "tensor":
        assert q.scales is not None
        codes = pad_segments(q.codes.view(torch.uint8), q.segments, rows, cols)
        out["codes"] = _flip(codes, q.segments).view(torch.float8_e4m3fn)
        out["scales"] = q.scales.float()
    else:
        assert q.scales is not None
        each_byte = 1 if form == "mxfp8" else 2
        codes = _flip(pad_segments(q.codes.view(torch.uint8), q.segments, rows, cols // each_byte), q.segments)
        scales = pad_segments(q.scales.view(torch.uint8), q.segments, rows, cols // GROUP[form], FILLER[form])
        scales = _flip(scales, q.segments)
        codes = torch.stack([_tile(one) for one in codes.contiguous()]) if form == "mxfp4" else codes
        out["codes"] = codes.view(torch.float8_e4m3fn) if form == "mxfp8" else codes
        out["scales"] = _fold(scales) if form == "mxfp4" else swizzle(scales)
    if q.global_scales is not None:
        out["globals"] = q.global_scales
        out |= {} if q.global_exact is None else {"exact_globals": q.global_exact}
    if q.bias is not None:
        _bias(q, rows, out)
    meta = {
        **matrix_to_json(q),
        "form": form,
        "rows": rows,
        "cols": cols,
    }
    return {
        name: t.clone() if any(t is own for _, own in q.tensors()) else t.contiguous() for name, t in out.items()
    }, meta


def unpack_matrix(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> QuantTensor:
    """The exact inverse of pack_matrix."""
    (E, N, K), segments, form = meta["shape"], meta["segments"], meta["form"]
    each, scheme = N // segments, scheme_from_json(meta["scheme"])
    codes, scales = tensors["codes"], tensors.get("scales")
    if form == "block":
        assert scales is not None
        codes = _flip(codes.view(torch.uint8), segments).view(torch.float8_e4m3fn)
        scales = as_stored(_flip(scales, segments), scheme.scale)
    elif form == "bf16":
        codes = cut_segments(_flip(codes, segments), segments, each, K)
    elif form == "tensor":
        assert scales is not None
        codes = cut_segments(_flip(codes.view(torch.uint8), segments), segments, each, K).view(torch.float8_e4m3fn)
        scales = scales.to(SCALE_DTYPE[scheme.scale])
    else:
        assert scales is not None
        natural = torch.stack([_untile(one) for one in codes]) if form == "mxfp4" else codes.view(torch.uint8)
        codes = cut_segments(_flip(natural, segments), segments, each, K if form == "mxfp8" else -(-K // 2))
        codes = codes.view(torch.float8_e4m3fn) if form == "mxfp8" else codes
        scales = _unfold(scales) if form == "mxfp4" else unswizzle(scales)
        scales = cut_segments(_flip(scales, segments), segments, each, -(-K // GROUP[form]))
        scales = scales.view(SCALE_DTYPE[scheme.scale])
    bias = tensors.get("exact_bias")
    if bias is None and "bias" in tensors:
        bias = cut_segments(_flip(tensors["bias"], segments)[..., None], segments, each, 1)[..., 0].float()
    return QuantTensor(
        scheme,
        (E, N, K),
        codes.contiguous(),
        scales,
        global_scales=tensors.get("globals"),
        global_exact=tensors.get("exact_globals"),
        bias=bias,
        segments=segments,
    )
