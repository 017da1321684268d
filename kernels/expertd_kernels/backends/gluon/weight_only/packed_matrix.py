"""One canonical matrix <-> its packed tensors: padding, the integers behind codes, scales a row and group."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from expertd_kernels.backends.gluon.weight_only import packing
from expertd_kernels.backends.gluon.weight_only.codec import Codec, codec_of
from expertd_kernels.common.refused import Refused
from expertd_kernels.weights.canonical import CODE_DTYPE, SCALE_DTYPE, QuantTensor, pack_nibbles, unpack_nibbles
from expertd_kernels.weights.scheme import WHOLE, Element, Scheme
from expertd_kernels.weights.serial import matrix_to_json, scheme_from_json

__all__ = ["TILE", "pack_matrix", "round_up", "unpack_matrix"]

_EXPERTS_AT_ONCE = 8
"""Experts whose codes are taken apart together: unpacked ones are twice to four times as large as the packed."""
TILE = 64
"""Rows and columns of a packed block; sizes are padded to multiples of it."""


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def pack_matrix(name: str, q: QuantTensor, gated: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors "codes", "scales", "exact_scales", "bias"; JSON facts).  gated: rows of the two segments alternate by
    eights.  Refused: values that the kernels would read as others."""
    assert q.columns is None, f"{name}: activation order is not the row's"
    assert q.global_scales is None, f"{name}: second-level scales are not the row's"
    scheme, codec = q.scheme, codec_of(q.scheme)
    rows, columns = round_up(q.shape[1] // q.segments, TILE), round_up(q.shape[2], TILE)
    parts = {"codes": _packed_codes(name, q, codec, rows, columns, gated)}
    facts = {
        **matrix_to_json(q),
        "gated": gated,
        "shift": 0,
    }
    if q.scales is not None:
        shift = facts["shift"] = _shift(name, q, codec)
        scales = _spread(q.scales if codec.e8m0 else q.scales.float(), q, codec, rows, columns)
        zeros = None if q.zeros is None else _spread(q.zeros.float(), q, codec, rows, columns)
        parts["scales"] = packing.pack_scales(scales, zeros, scheme.element, codec, gated, shift)
        back, _ = packing.unpack_scales(parts["scales"], scheme.element, codec, gated, shift)
        if not torch.equal(_gather(back, q.shape, q.segments, scheme, codec).to(q.scales.dtype), q.scales):
            parts["exact_scales"] = q.scales  # bf16 rounds them: unpack returns these
    if q.bias is not None:
        parts["bias"] = packing.pack_rows(_pad(q.bias[:, :, None], q.segments, rows, 1)[:, :, 0], gated)
    return parts, facts


def unpack_matrix(parts: Mapping[str, Tensor], facts: Mapping[str, Any]) -> QuantTensor:
    """The exact inverse of pack_matrix."""
    scheme: Scheme = scheme_from_json(facts["scheme"])
    codec, gated, segments = codec_of(scheme), facts["gated"], facts["segments"]
    E, N, K = facts["shape"]
    codes = _cut(packing.unpack_codes(parts["codes"], scheme.element, codec, gated), segments, N, K)
    scales = zeros = bias = None
    if "scales" in parts:
        s, z = packing.unpack_scales(parts["scales"], scheme.element, codec, gated, facts["shift"])
        scales = parts.get("exact_scales")
        if scales is None:
            scales = _gather(s, (E, N, K), segments, scheme, codec).to(SCALE_DTYPE[scheme.scale])
        if z is not None:
            zeros = _gather(z, (E, N, K), segments, scheme, codec).to(CODE_DTYPE[scheme.element])
    if "bias" in parts:
        bias = _cut(packing.unpack_rows(parts["bias"], gated)[:, :, None], segments, N, 1)[:, :, 0].contiguous()
    return QuantTensor(scheme, (E, N, K), _codes(codes, scheme.element), scales, zeros, bias=bias, segments=segments)


def _packed_codes(name: str, q: QuantTensor, codec: Codec, rows: int, columns: int, gated: bool) -> Tensor:
    """The packed codes, a few experts at a time: beside them there is never more than a part of the layer."""
    if (fused := _packed_at_once(q, rows, columns, gated)) is not None:
        return fused
    E, out = q.shape[0], torch.empty(0)
    for e in range(0, E, _EXPERTS_AT_ONCE):
        some = slice(e, e + _EXPERTS_AT_ONCE)
        codes = _pad(_integers(name, q.codes[some], q), q.segments, rows, columns)
        packed = packing.pack_codes(codes, q.scheme.element, codec, gated)
        out = packed.new_empty(E, *packed.shape[1:]) if e == 0 else out
        out[some] = packed
    return out


def _packed_at_once(q: QuantTensor, rows: int, columns: int, gated: bool) -> Tensor | None:
    """int4 codes without padding, on an NVIDIA GPU: a kernel puts them in order.  None: torch has to."""
    E, N, K = q.shape
    if q.device.type != "cuda" or torch.version.hip is not None or q.scheme.element is not Element.INT4:
        return None
    if (N // q.segments, K) != (rows, columns) or not q.codes.is_contiguous() or q.codes.numel() // 4 > 1 << 30:
        return None
    try:
        code: Any = importlib.import_module("expertd_kernels.backends.gluon.weight_only.packing_code")
    except ImportError:  # no Triton
        return None
    out = torch.empty(E, N // TILE, K // TILE, 4, 32, 4, dtype=torch.int32, device=q.device)
    with torch.cuda.device(q.device):
        code.pack_int4(q.codes, out, gated)
    return out


def _integers(name: str, codes: Tensor, q: QuantTensor) -> Tensor:
    """[E, N, K] the integers that packing places for some experts' codes: u8, or i16 bits of bf16."""
    element = q.scheme.element
    if element.packed:
        return unpack_nibbles(codes, q.shape[2])
    if element is Element.BF16:
        return codes.view(torch.int16)
    bits = codes.view(torch.uint8)
    if element is Element.INT8:
        return bits ^ 128  # code + 128
    if bool(((bits & 127) == 127).any()):
        raise Refused(f"{name}: e4m3 codes hold NaN (0x7f or 0xff), which the kernels would read as 480")
    return bits


def _codes(integers: Tensor, element: Element) -> Tensor:
    """The inverse of _integers."""
    if element.packed:
        return pack_nibbles(integers)
    if element is Element.INT8:
        integers = integers ^ 128
    return integers.contiguous().view(CODE_DTYPE[element])


def _pad(t: Tensor, segments: int, rows: int, columns: int) -> Tensor:
    """[E, N, K] -> [E, segments * rows, columns], zeros at the end of each segment and row."""
    E, N, K = t.shape
    seg = N // segments
    if (seg, K) == (rows, columns):
        return t
    return F.pad(t.reshape(E, segments, seg, K), (0, columns - K, 0, rows - seg)).reshape(E, segments * rows, columns)


def _cut(t: Tensor, segments: int, N: int, K: int) -> Tensor:
    """The inverse of _pad: [E, N, K]."""
    E, padded, columns = t.shape
    return t.reshape(E, segments, padded // segments, columns)[:, :, : N // segments, :K].reshape(E, N, K)


def _shift(name: str, q: QuantTensor, codec: Codec) -> int:
    """The power of two by which weights are made smaller inside the GEMM.  Refused where no power fits all scales."""
    assert q.scales is not None
    if codec.e8m0:
        low, high = int(q.scales.min()), int(q.scales.max())
        shift = packing.scale_exponent(codec, q.scheme.element, 2.0 ** (high - 127))
        if high == 255 or not packing.shifted_exponent(low, codec, q.scheme.element, shift) >= 1:
            raise Refused(f"{name}: e8m0 scales from {low} to {high} do not fit one bf16 exponent range (or hold NaN)")
        return shift
    s = q.scales.float()
    if not bool(torch.isfinite(s).all()):
        raise Refused(f"{name}: scales hold NaN or infinity")
    return packing.scale_exponent(codec, q.scheme.element, float(s.abs().max()))


def _spread(t: Tensor, q: QuantTensor, codec: Codec, rows: int, columns: int) -> Tensor:
    """Scales or zero points as stored -> one a padded row and group [E, segments * rows, G], zeros in padding."""
    scheme, segments = q.scheme, q.segments
    E, _, width = t.shape
    seg = q.shape[1] // segments
    t = t.reshape(E, segments, -1, width)
    height = seg if scheme.rows == WHOLE else scheme.rows
    t = t.repeat_interleave(height, dim=2)[:, :, :seg]
    groups = round_up(columns, codec.chunk) // codec.group
    t = t.repeat_interleave(groups if scheme.cols == WHOLE else max(1, scheme.cols // codec.group), dim=3)[..., :groups]
    return F.pad(t, (0, groups - t.shape[3], 0, rows - seg)).reshape(E, segments * rows, groups)


def _gather(t: Tensor, shape: tuple[int, int, int], segments: int, scheme: Scheme, codec: Codec) -> Tensor:
    """The inverse of _spread: the first of each block, [E, scale rows, scale columns]."""
    E, N, K = shape
    seg = N // segments
    t = t.reshape(E, segments, t.shape[1] // segments, -1)[:, :, :seg]
    t = t[:, :, :: seg if scheme.rows == WHOLE else scheme.rows]
    step = t.shape[3] if scheme.cols == WHOLE else max(1, scheme.cols // codec.group)
    rows, columns = scheme.scale_shape(N, K, segments)
    return t[..., ::step][..., :columns].reshape(E, rows, columns)
