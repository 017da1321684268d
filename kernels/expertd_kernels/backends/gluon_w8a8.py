"""Backend `gluon_w8a8`: e4m3 weights on activations rounded to e4m3, for Hopper, in Triton's Gluon dialect.

Four launches a layer (routes grouped and inputs rounded, w13 + activation + rounding, w2 + router weight, sum),
chained by programmatic dependent launch; no host synchronization.  For many tokens the first is three: inputs are then
rounded to the places of their routes.  With one dynamic scale a row (channel and tensor
weights) the intermediate is rounded by a launch of its own, since its scale needs the whole row.  Static scales: the
largest of all experts', since a token is rounded once for all of them.  Inputs that are e4m3 with a scale for 128
columns already are taken as they are (E4m3Experts).

Packed weights: blocks of 128 x 128 codes that follow each other, so that a bulk copy reads 16 KiB in a row; scales as
f32, otherwise as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from expertd_kernels.backends.envelope import pack_layer, require_version, unpack_layer
from expertd_kernels.backends.scales import as_f32, as_stored
from expertd_kernels.common.problem import Problem
from expertd_kernels.common.protocol import Packed
from expertd_kernels.weights.canonical import QuantTensor, Weights
from expertd_kernels.weights.scheme import WHOLE, ActivationQuant, Element
from expertd_kernels.weights.serial import matrix_to_json, scheme_from_json

if TYPE_CHECKING:
    from expertd_kernels.backends.gluon.w8a8.experts import W8A8Experts

__all__ = ["experts", "pack", "unpack"]

LAYOUT_VERSION = 1
MULTIPLE = 128
"""Rows of a projection and columns of a matrix are multiples of it: no tile straddles a projection or a scale."""


def _grouped(name: str, q: QuantTensor) -> bool:
    """Whether scales go by 128 x 128 blocks; else by row or by projection."""
    s = q.scheme
    assert q.columns is None, f"{name}: activation order is not the row's"
    assert q.global_scales is None, f"{name}: second-level scales are not the row's"
    assert s.element is Element.E4M3, f"{name}: {s.name} is not the row's"
    assert (s.rows, s.cols) in ((MULTIPLE, MULTIPLE), (1, WHOLE), (WHOLE, WHOLE)), f"{name}: {s.name} is not the row's"
    _, N, K = q.shape
    assert N // q.segments % MULTIPLE == K % MULTIPLE == 0, f"{name}: [{N}, {K}] is cut by tiles: not the row's"
    return s.rows == MULTIPLE


def pack(weights: Weights, problem: Problem) -> Packed:
    """Codes in blocks of 128 x 128, scales as f32."""
    grouped, how = _grouped("w13", weights.w13), problem.activation_quant
    assert grouped == _grouped("w2", weights.w2), "scales of two kinds in a layer are not the row's"
    assert weights.activation.gated, f"{weights.activation.name} has no gate, and is not the row's"
    roundings = (
        (ActivationQuant.E4M3_GROUP128,) if grouped else (ActivationQuant.E4M3_TOKEN, ActivationQuant.E4M3_TENSOR)
    )
    assert how in roundings, f"{how.value} with these scales is not the row's"
    assert not how.static or weights.input_scales is not None, "static rounding without scales is not the row's"
    return pack_layer("gluon_w8a8", LAYOUT_VERSION, weights, lambda _, q: _pack_matrix(q), rounding=how.value)


def _blocks(codes: Tensor) -> Tensor:
    """[E, N, K] e4m3 -> [E, N / 128, K / 128, 128, 128], a copy."""
    E, N, K = codes.shape
    split = codes.view(torch.uint8).reshape(E, N // MULTIPLE, MULTIPLE, K // MULTIPLE, MULTIPLE)
    return split.permute(0, 1, 3, 2, 4).clone(memory_format=torch.contiguous_format).view(codes.dtype)


def _rows(blocks: Tensor) -> Tensor:
    """The inverse of _blocks."""
    E, n, k = blocks.shape[:3]
    rows = blocks.view(torch.uint8).permute(0, 1, 3, 2, 4).reshape(E, n * MULTIPLE, k * MULTIPLE)
    return rows.contiguous().view(blocks.dtype)


def _pack_matrix(q: QuantTensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    assert q.scales is not None
    tensors = {
        "codes": _blocks(q.codes),
        "scales": as_f32(q.scales, q.scheme.scale).contiguous().clone(),
    }
    if q.bias is not None:
        tensors["bias"] = q.bias.contiguous().clone()
    return tensors, matrix_to_json(q)


def _unpack_matrix(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> QuantTensor:
    scheme = scheme_from_json(meta["scheme"])
    return QuantTensor(
        scheme,
        tuple(meta["shape"]),
        _rows(tensors["codes"]),
        as_stored(tensors["scales"], scheme.scale),
        bias=tensors.get("bias"),
        segments=meta["segments"],
    )


def unpack(packed: Packed) -> Weights:
    """The exact inverse of `pack`."""
    return unpack_layer(packed, _unpack_matrix)


def experts(packed: Packed, problem: Problem) -> W8A8Experts:
    """Ready to compute.  Needs a Hopper GPU and Triton; the packed tensors move to the current CUDA device."""
    from expertd_kernels.backends.gluon.w8a8.experts import W8A8Experts

    require_version(packed, LAYOUT_VERSION)
    return W8A8Experts(packed, problem)
