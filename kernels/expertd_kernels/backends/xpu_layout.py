"""Layouts of the grouped GEMM in vllm-xpu-kernels 0.1.16, from and to canonical weights.  Needs no XPU.

What the package infers from dtypes (weight, scale -> weight layout, scale layout):

    int4    u8 signed nibbles [E, N, K/2], low nibble = even k; bf16 [E, N, K/g], g = 32, 64, 128 or 256
    mxfp4   u8 e2m1 pairs [E, N, K/2]; u8 exponents [E, N, K/32]
    mxfp8   e4m3 [E, K, N]; u8 exponents [E, K/32, N]
    block   e4m3 [E, K, N]; f32 [E, K/128, N/128]
    tensor  e4m3 [E, K, N]; f32 [E]
    bf16    bf16 [E, K, N]

Signed nibbles: canonical code u with zero point 8 becomes u - 8 in two's complement, which is u XOR 8.
SWIGLUOAI reads gate and up side by side, so there w13's rows are stored as g0, u0, g1, u1, ...
Worked example, int4 channel, K = 768: the package has no channel form; the scale is repeated for three groups of 256.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from expertd_kernels.common.refused import Refused
from expertd_kernels.weights.canonical import SCALE_DTYPE, QuantTensor
from expertd_kernels.weights.scheme import WHOLE, Element, ScaleType, Scheme
from expertd_kernels.weights.serial import matrix_to_json, scheme_from_json

__all__ = ["GROUPS", "form_for", "form_of", "int4_group", "pack_matrix", "unpack_matrix"]

GROUPS = (256, 128, 64, 32)
"""Group sizes of the int4 kernel (TORCH_CHECK in the package's grouped GEMM)."""

BLOCK = 128
SIGN_BITS = 0x88

Order = Callable[[Tensor], Tensor]
"""A permutation of the rows [E, N, ...] of a matrix."""


def form_of(q: QuantTensor) -> str:
    """The package's form for a matrix, by its scheme and, for tensor scales, by their values."""
    form = form_for(q.scheme)
    if form == "tensor":
        assert q.scales is not None
        return "tensor" if bool((q.scales == q.scales[:, :1]).all()) else "block"
    return form


def form_for(s: Scheme) -> str:
    """The package's form for a scheme; with tensor scales, where those of gate and up are the same."""
    if s.element is Element.INT4:
        return "int4"
    if s.element is Element.E2M1:
        return "mxfp4"
    if s.element is Element.BF16:
        return "bf16"
    if s.element is Element.E4M3 and s.scale is ScaleType.E8M0:
        return "mxfp8"
    if s.element is Element.E4M3 and (s.rows, s.cols) == (BLOCK, BLOCK):
        return "block"
    if s.element is Element.E4M3 and (s.rows, s.cols) == (WHOLE, WHOLE):
        return "tensor"
    raise AssertionError(f"{s.name} is not the row's")


def _interleave(t: Tensor, segments: int) -> Tensor:
    """[E, N, ...] segments one after the other -> row i of each segment side by side."""
    E, N = t.shape[:2]
    return t.reshape(E, segments, N // segments, *t.shape[2:]).transpose(1, 2).reshape(t.shape)


def _sequence(t: Tensor, segments: int) -> Tensor:
    """The inverse of _interleave."""
    return _interleave(t, t.shape[1] // segments)


def _bf16(t: Tensor, name: str, out: dict[str, Tensor]) -> Tensor:
    """`t` as the kernel reads it; what bf16 does not hold exactly is kept beside it for unpack."""
    rounded = t.to(torch.bfloat16)
    if not torch.equal(rounded.to(t.dtype), t):
        out[f"exact_{name}"] = t.contiguous()
    return rounded


def _int4_scales(q: QuantTensor, out: dict[str, Tensor]) -> tuple[Tensor, int]:
    """bf16 [E, N, K/g], and how often each stored scale is repeated along K."""
    assert q.scales is not None
    K = q.shape[2]
    extent = K if q.scheme.cols == WHOLE or q.scheme.cols > K else q.scheme.cols
    group = int4_group(q.scheme, K)
    return _bf16(q.scales, "scales", out).repeat_interleave(extent // group, dim=2), extent // group


def int4_group(s: Scheme, K: int) -> int:
    """Columns that share a scale of the int4 kernel: its largest group that divides the scheme's."""
    extent = K if s.cols == WHOLE or s.cols > K else s.cols
    return next(g for g in GROUPS if extent % g == 0 and K % g == 0)


def _block_scales(q: QuantTensor) -> Tensor:
    """f32 [E, K/128, N/128] from 128 x 128 blocks, or from tensor scales that differ between gate and up.  Refused:
    such scales where blocks do not divide the sizes."""
    assert q.scales is not None
    E, N, K = q.shape
    if (N // q.segments) % BLOCK or K % BLOCK:
        raise Refused(
            f"gate and up rows have different scales, and [{N}, {K}] in {q.segments} segments no whole blocks of"
            f" {BLOCK} x {BLOCK} to carry them"
        )
    scales = q.scales.float()
    if q.scheme.rows == WHOLE:
        scales = scales.repeat_interleave(N // q.segments // BLOCK, dim=1).expand(E, N // BLOCK, K // BLOCK)
    return scales.transpose(1, 2)


def pack_matrix(q: QuantTensor, interleaved: bool, form: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors codes, scales, bias (those that exist) and the facts that unpack needs.

    interleaved: rows of the segments side by side.  form: form_of(q), or "block" for any tensor scales, which the other
    matrix of the layer may ask for: the package knows one form for both.  Refused: what the package has no form for.
    """
    assert q.columns is None, "activation order is not the row's"
    assert q.zeros is None, "zero points are not the row's"
    assert q.global_scales is None, "second-level scales are not the row's"
    out: dict[str, Tensor] = {}
    repeat = 1
    if interleaved and form == "block":
        raise Refused("gate and up rows have different scales, which swigluoai's interleaved rows cannot follow")
    order: Order = (lambda t: _interleave(t, q.segments)) if interleaved else (lambda t: t)
    if form in ("int4", "mxfp4"):
        out["codes"] = order(q.codes ^ SIGN_BITS if form == "int4" else q.codes)
    else:
        out["codes"] = order(q.codes.view(torch.uint8) if form != "bf16" else q.codes).transpose(1, 2)
    if form == "int4":
        scales, repeat = _int4_scales(q, out)
        out["scales"] = order(scales)
    elif form == "block":
        out["scales"] = _block_scales(q)
    elif form == "tensor":
        assert q.scales is not None
        out["scales"] = q.scales[:, 0, 0].float()
    elif form != "bf16":
        assert q.scales is not None
        out["scales"] = order(q.scales) if form == "mxfp4" else order(q.scales).transpose(1, 2)
    if q.bias is not None:
        out["bias"] = order(_bf16(q.bias, "bias", out))
    if form in ("mxfp8", "block", "tensor"):
        out["codes"] = out["codes"].contiguous().view(torch.float8_e4m3fn)
    meta = {
        **matrix_to_json(q),
        "form": form,
        "interleaved": interleaved,
        "repeat": repeat,
    }
    return {name: t.contiguous().clone() if t is q.codes else t.contiguous() for name, t in out.items()}, meta


def _scales_back(t: Mapping[str, Tensor], meta: Mapping[str, Any], order: Order) -> Tensor | None:
    """The stored scales, in their stored type."""
    form, scheme = meta["form"], scheme_from_json(meta["scheme"])
    if form == "bf16":
        return None
    if "exact_scales" in t:
        return t["exact_scales"]
    scales = t["scales"]
    if form == "int4":
        return order(scales)[:, :, :: meta["repeat"]].to(SCALE_DTYPE[scheme.scale]).contiguous()
    if form == "tensor":
        return scales[:, None, None].repeat(1, meta["segments"], 1).to(SCALE_DTYPE[scheme.scale])
    if form == "mxfp4":
        return order(scales)
    scales = order(scales.transpose(1, 2))
    if form == "block" and scheme.rows == WHOLE:
        scales = scales[:, :: scales.shape[1] // meta["segments"], :1]
    return scales.contiguous().to(SCALE_DTYPE[scheme.scale])


def unpack_matrix(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> QuantTensor:
    """The exact inverse of pack_matrix."""
    form, segments = meta["form"], meta["segments"]
    order: Order = (lambda t: _sequence(t, segments)) if meta["interleaved"] else (lambda t: t)
    codes = tensors["codes"]
    if form in ("int4", "mxfp4"):
        codes = order(codes ^ SIGN_BITS if form == "int4" else codes)
    elif form == "bf16":
        codes = order(codes.transpose(1, 2))
    else:
        codes = order(codes.view(torch.uint8).transpose(1, 2)).contiguous().view(torch.float8_e4m3fn)
    bias = tensors.get("exact_bias")
    if bias is None and "bias" in tensors:
        bias = order(tensors["bias"]).float()
    E, N, K = meta["shape"]
    return QuantTensor(
        scheme_from_json(meta["scheme"]),
        (E, N, K),
        codes.contiguous(),
        _scales_back(tensors, meta, order),
        bias=bias,
        segments=segments,
    )
