"""Layouts of AITER's fused MoE kernels, from and to canonical weights.  Needs no GPU.

    bf16, channel, block    16 rows and 32 columns stand together, as pieces of 16 bytes, each for the 16 rows one after
                            the other (shuffle_weight, layout 16 x 16):
                            [E, N, K] -> [E, N / 16, K / 32, 2 (bf16: 4) pieces, 16 rows, 16 bytes];  f32 scales
    mxfp4                   the same pieces, four side by side: 16 rows and 128 columns; blocks of 16 gate rows and of
                            16 up rows alternate (shuffle_weight_a16w4):
                            [E, N, K / 2] u8 -> [E, N / 16, K / 128, 4 pieces, 16 rows, 16 bytes]
                            exponents (shuffle_scale_a16w4) of 32 rows and 256 columns stand together, of w13 16 gate
                            rows and the 16 up rows beside them:
                            [E, N, K / 32] u8 -> [E, N / 32, K / 256, 4 lanes, 16 rows, 2 halves of K, 2 halves of rows]

H and I of mxfp4 are padded to multiples of 256 with zeros; the package is told how many.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from expertd_kernels.backends.scales import as_f32, as_stored
from expertd_kernels.backends.trtllm_layout import cut_segments, pad_segments
from expertd_kernels.weights.canonical import CODE_DTYPE, QuantTensor
from expertd_kernels.weights.scheme import WHOLE, Element
from expertd_kernels.weights.serial import matrix_to_json, scheme_from_json

__all__ = [
    "MULTIPLE",
    "form_of",
    "pack_matrix",
    "padded",
    "shuffle",
    "shuffle_mxfp4",
    "shuffle_scales",
    "unpack_matrix",
    "unshuffle",
    "unshuffle_mxfp4",
    "unshuffle_scales",
]

ROWS, COLUMNS, PIECE_BYTES = 16, 32, 16
"""Of the package's shuffle_weight with layout (16, 16): rows and columns that stand together, bytes of a piece."""
LANES = 4
"""Pieces side by side in shuffle_weight_a16w4: 64 lanes for 16 rows."""
MULTIPLE = 256
"""H and I of mxfp4: shuffle_scale_a16w4 takes 256 columns at once (Tile_K)."""


def padded(size: int) -> int:
    """H or I of mxfp4 as it is packed."""
    return -(-size // MULTIPLE) * MULTIPLE


def form_of(q: QuantTensor) -> str:
    """The package's form for a matrix."""
    s = q.scheme
    assert q.columns is None, "activation order is not the row's"
    assert q.global_scales is None, "second-level scales are not the row's"
    assert q.zeros is None, "zero points are not the row's"
    if s.name == "mxfp4":
        return "mxfp4"
    assert q.bias is None, f"biases of {s.name} weights are not the row's"
    _, N, K = q.shape
    assert N // q.segments % 128 == K % 128 == 0, f"[{N}, {K}] is cut by blocks of 128: not the row's"
    if s.element is Element.BF16:
        return "bf16"
    assert s.element is Element.E4M3, f"{s.name} is not the row's"
    return {(1, WHOLE): "channel", (128, 128): "block"}[s.rows, s.cols]


def shuffle(codes: Tensor) -> Tensor:
    """[E, N, K] bf16 or e4m3 -> the same shape and dtype in the package's order."""
    E, N, _ = codes.shape
    t = codes.contiguous().view(torch.uint8)
    step = COLUMNS * codes.element_size()
    t = t.view(E, N // ROWS, ROWS, t.shape[2] // step, step // PIECE_BYTES, PIECE_BYTES).permute(0, 1, 3, 4, 2, 5)
    return t.reshape(E, N, -1).view(codes.dtype)


def unshuffle(codes: Tensor) -> Tensor:
    """The inverse of shuffle."""
    E, N, _ = codes.shape
    t = codes.contiguous().view(torch.uint8)
    step = COLUMNS * codes.element_size()
    t = t.view(E, N // ROWS, t.shape[2] // step, step // PIECE_BYTES, ROWS, PIECE_BYTES).permute(0, 1, 4, 2, 3, 5)
    return t.reshape(E, N, -1).view(codes.dtype)


def shuffle_mxfp4(codes: Tensor, segments: int) -> Tensor:
    """[E, N, K / 2] u8 -> the same shape in the package's order."""
    E, N, size = codes.shape
    t = codes.view(E, segments, N // segments // ROWS, ROWS, size // (LANES * PIECE_BYTES), LANES, PIECE_BYTES)
    return t.permute(0, 2, 1, 4, 5, 3, 6).reshape(E, N, size)


def unshuffle_mxfp4(codes: Tensor, segments: int) -> Tensor:
    """The inverse of shuffle_mxfp4."""
    E, N, size = codes.shape
    t = codes.view(E, N // segments // ROWS, segments, size // (LANES * PIECE_BYTES), LANES, ROWS, PIECE_BYTES)
    return t.permute(0, 2, 1, 5, 3, 4, 6).reshape(E, N, size)


def shuffle_scales(scales: Tensor, segments: int) -> Tensor:
    """[E, N, K / 32] u8 -> the same shape in the package's order."""
    E, N, size = scales.shape
    if segments == 2:
        t = scales.view(E, 2, N // 32, ROWS, size // 8, 2, LANES).permute(0, 2, 4, 6, 3, 5, 1)
    else:
        t = scales.view(E, N // 32, 2, ROWS, size // 8, 2, LANES).permute(0, 1, 4, 6, 3, 5, 2)
    return t.reshape(E, N, size)


def unshuffle_scales(scales: Tensor, segments: int) -> Tensor:
    """The inverse of shuffle_scales."""
    E, N, size = scales.shape
    t = scales.view(E, N // 32, size // 8, LANES, ROWS, 2, 2)
    order = (0, 6, 1, 4, 2, 5, 3) if segments == 2 else (0, 1, 6, 4, 2, 5, 3)
    return t.permute(order).reshape(E, N, size)


def pack_matrix(q: QuantTensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors codes, scales and bias (those that exist), and the facts that unpack needs."""
    if form_of(q) == "mxfp4":
        return _pack_mxfp4(q), matrix_to_json(q)
    tensors = {"codes": shuffle(q.codes)}
    if q.scales is not None:
        tensors["scales"] = as_f32(q.scales, q.scheme.scale).contiguous().clone()
    return tensors, matrix_to_json(q)


def _pack_mxfp4(q: QuantTensor) -> dict[str, Tensor]:
    assert q.scales is not None
    _, N, K = q.shape
    rows, cols = padded(N // q.segments), padded(K)
    codes = pad_segments(q.codes, q.segments, rows, cols // 2)
    scales = pad_segments(q.scales, q.segments, rows, cols // 32)
    out = {"codes": shuffle_mxfp4(codes, q.segments), "scales": shuffle_scales(scales, q.segments)}
    if q.bias is not None:
        out["bias"] = pad_segments(q.bias[..., None], q.segments, rows, 1)[..., 0]
    return {name: t.contiguous().clone() for name, t in out.items()}


def unpack_matrix(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> QuantTensor:
    """The exact inverse of pack_matrix."""
    scheme, scales, shape = scheme_from_json(meta["scheme"]), tensors.get("scales"), tuple(meta["shape"])
    if scheme.name == "mxfp4":
        return _unpack_mxfp4(tensors, meta)
    codes = unshuffle(tensors["codes"])
    assert codes.dtype == CODE_DTYPE[scheme.element]
    natural = None if scales is None else as_stored(scales, scheme.scale)
    return QuantTensor(scheme, shape, codes, natural, segments=meta["segments"])


def _unpack_mxfp4(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> QuantTensor:
    (E, N, K), segments = meta["shape"], meta["segments"]
    rows = N // segments
    codes = cut_segments(unshuffle_mxfp4(tensors["codes"], segments), segments, rows, K // 2)
    scales = cut_segments(unshuffle_scales(tensors["scales"], segments), segments, rows, K // 32)
    bias = tensors.get("bias")
    if bias is not None:
        bias = cut_segments(bias[..., None], segments, rows, 1)[..., 0].contiguous()
    return QuantTensor(scheme_from_json(meta["scheme"]), (E, N, K), codes, scales, bias=bias, segments=segments)
