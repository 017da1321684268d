"""Backend `humming`: weight-only grouped GEMMs of the package humming-kernels, compiled at first use.

Packed is the package's own input form, which its layer turns into a kernel's order on the device:

    weight        int32 [E, N, K * bits / 32], codes side by side along K, low bits first; integers as unsigned codes
    weight_scale  [E, N, K / g], [E, N, 1] (channel) or [E, N / 128, K / 128]: bf16, e8m0, or f32 for 128 x 128 blocks
    zero_point    int32 [E, N * bits / 32, K / g], side by side along N
    bias          bf16 [E, N]

Routing, the activation and the weighted sum are ours, on torch operators, without a synchronization with the host.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from expertd_kernels.backends.envelope import activation_of, fields, pack_layer, require_version, unpack_layer
from expertd_kernels.backends.protocol import Packed
from expertd_kernels.canonical import SCALE_DTYPE, QuantTensor, Weights, pack_nibbles, unpack_nibbles
from expertd_kernels.float32 import apply_activation
from expertd_kernels.oracle import Refused
from expertd_kernels.problem import Problem
from expertd_kernels.scheme import WHOLE, ActivationQuant, Element, ScaleType
from expertd_kernels.serial import matrix_to_json, scheme_from_json

__all__ = ["HummingExperts", "experts", "pack", "unpack"]

LAYOUT_VERSION = 1

DTYPE = {Element.INT4: "uint4", Element.INT8: "uint8", Element.E2M1: "float4e2m1", Element.E4M3: "float8e4m3"}
"""Names in the package's dtypes."""

GROUPED = {"gemm_type": "grouped_contiguous"}
"""Rows sorted by expert; expert e has rows offsets[e] to offsets[e + 1]."""


def _config(q: QuantTensor) -> dict[str, Any]:
    """The package's weight schema for a matrix.  Refused where it has none that is exact."""
    s = q.scheme
    if q.columns is not None or q.global_scales is not None or s.element not in DTYPE:
        raise Refused(f"has no form for {s.name} weights with these features")
    out: dict[str, Any] = {"quant_method": "humming", "dtype": DTYPE[s.element], "has_zero_point": s.zeros}
    if s.rows == 1:
        out["group_size"] = 0 if s.cols == WHOLE else s.cols
        if s.scale is ScaleType.E8M0:
            return out | {"scale_dtype": "float8e8m0"}
        if s.element.integer:
            return out
    elif (s.rows, s.cols) == (128, 128) and s.element is Element.E4M3:
        return out | {"group_size": 128, "group_size_n": 128}
    raise Refused(f"has no exact form for {s.name} weights")


def _bf16(t: Tensor, name: str, out: dict[str, Tensor]) -> Tensor:
    """`t` as the kernel reads it; what bf16 does not hold exactly is kept beside it for unpack."""
    rounded = t.to(torch.bfloat16)
    if not torch.equal(rounded.to(t.dtype), t):
        out[f"exact_{name}"] = t.contiguous()
    return rounded


def _unsigned(t: Tensor, element: Element) -> Tensor:
    """int8 plus 128 as u8, other codes as their bytes; its own inverse on bytes."""
    return t.view(torch.uint8) ^ 0x80 if element is Element.INT8 else t.view(torch.uint8)


def _pack_matrix(q: QuantTensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    s, (_, N, K) = q.scheme, q.shape
    config = _config(q)
    group = s.cols or K
    if K % group or K % 32 or N % 32 or (s.rows != 1 and N // q.segments % s.rows):
        raise Refused(f"{s.name} [{N}, {K}]: want K in whole groups and N, K in multiples of 32 (blocks: of 128)")
    assert q.scales is not None
    out: dict[str, Tensor] = {}
    out["weight"] = _unsigned(q.codes.contiguous(), s.element).view(torch.int32)
    plain = s.scale is ScaleType.E8M0 or s.rows != 1
    scales = q.scales if s.scale is ScaleType.E8M0 else q.scales.float()
    out["weight_scale"] = scales if plain else _bf16(q.scales, "weight_scale", out)
    if q.zeros is not None:
        fields = _unsigned(q.zeros.contiguous(), s.element).transpose(1, 2)
        fields = pack_nibbles(fields) if s.element is Element.INT4 else fields
        words = fields.reshape(-1).view(torch.int32)
        out["zero_point"] = words.view(*fields.shape[:2], -1).transpose(1, 2)
    if q.bias is not None:
        out["bias"] = _bf16(q.bias, "bias", out)
    meta = {**matrix_to_json(q), "config": config}
    return {name: t.contiguous().clone() if t is q.scales else t.contiguous() for name, t in out.items()}, meta


def _unpack_matrix(t: Mapping[str, Tensor], meta: Mapping[str, Any]) -> QuantTensor:
    scheme, (E, N, K) = scheme_from_json(meta["scheme"]), meta["shape"]
    codes = t["weight"].view(torch.uint8)
    codes = _unsigned(codes, scheme.element)
    if scheme.element in (Element.INT8, Element.E4M3):
        codes = codes.view(torch.int8 if scheme.element is Element.INT8 else torch.float8_e4m3fn)
    zeros = None
    if "zero_point" in t:
        words = t["zero_point"].transpose(1, 2)
        fields = words.reshape(-1).view(torch.uint8).view(*words.shape[:2], -1)
        fields = unpack_nibbles(fields, N) if scheme.element is Element.INT4 else fields
        zeros = _unsigned(fields.transpose(1, 2).contiguous(), scheme.element)
        zeros = zeros.view(torch.int8) if scheme.element is Element.INT8 else zeros
    scales = t.get("exact_weight_scale", t["weight_scale"]).to(SCALE_DTYPE[scheme.scale])
    bias = t.get("exact_bias", t.get("bias"))
    return QuantTensor(
        scheme,
        (E, N, K),
        codes,
        scales,
        zeros,
        bias=None if bias is None else bias.float(),
        segments=meta["segments"],
    )


def pack(weights: Weights, problem: Problem) -> Packed:
    """Canonical weights in the package's input form, on the weights' device."""
    if problem.activation_quant is not ActivationQuant.NONE:
        raise Refused(f"rounds no activations here, {problem.activation_quant.value} is asked")
    return pack_layer("humming", LAYOUT_VERSION, weights, lambda _, q: _pack_matrix(q))


def unpack(packed: Packed) -> Weights:
    """The exact inverse of pack."""
    return unpack_layer(packed, _unpack_matrix)


def experts(packed: Packed, problem: Problem) -> HummingExperts:
    """Ready to compute on the current CUDA device.  Raises Refused for another layout version."""
    require_version(packed, LAYOUT_VERSION)
    return HummingExperts(packed, importlib.import_module("humming.layer"), torch.device("cuda"))


class HummingExperts:
    """One layer.  vendor: the module humming.layer; device: where its layers go and transform themselves."""

    backend = "humming"

    def __init__(self, packed: Packed, vendor: Any, device: torch.device) -> None:
        self.activation = activation_of(packed)
        self.num_experts, _, self.hidden = packed.meta["w13"]["shape"]
        self.w13, self.w2 = (self._layer(packed, name, vendor, device) for name in ("w13", "w2"))

    @staticmethod
    def _layer(packed: Packed, name: str, vendor: Any, device: torch.device) -> Any:
        """The package's layer with its weights in its kernels' order."""
        facts, tensors = packed.meta[name], fields(packed, name)
        E, N, K = facts["shape"]
        layer = vendor.HummingLayer(
            shape_n=N,
            shape_k=K,
            weight_config=dict(facts["config"]),
            num_experts=E,
            has_bias="bias" in tensors,
            torch_dtype=torch.bfloat16,
        )
        given = {field: t for field, t in tensors.items() if not field.startswith("exact_")}
        if facts["config"].get("scale_dtype") == "float8e8m0":
            given["weight_scale"] = given["weight_scale"].view(torch.float8_e8m0fnu)
        layer.load_from_tensors(given)
        layer = layer.to(device)
        layer.transform()
        return layer

    def __call__(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        router_weight_on_input: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """As Experts.__call__.  Absent routes are sorted behind all others, where no expert's rows are."""
        out = torch.empty_like(hidden_states) if out is None else out
        M, k = topk_ids.shape
        if M == 0:
            return out
        x, weights = hidden_states.to(torch.bfloat16), topk_weights.float()
        if router_weight_on_input:
            x, weights = (x * weights[:, :1]).to(torch.bfloat16), torch.ones_like(weights)
        slots = torch.where(topk_ids < 0, self.num_experts, topk_ids).flatten().long()
        order = torch.argsort(slots, stable=True)
        counts = torch.zeros(self.num_experts + 1, dtype=torch.int64, device=x.device)
        counts.scatter_add_(0, slots, torch.ones_like(slots))
        offsets = torch.cumsum(counts, 0) - counts  # [E + 1]: where each expert's rows start, last: where all end
        h = self.w13(x[order // k].contiguous(), expert_layout=offsets, compute_config=GROUPED)
        h = apply_activation(h.float(), self.activation).to(torch.bfloat16)
        y = self.w2(h.contiguous(), expert_layout=offsets, compute_config=GROUPED)
        placed = torch.empty_like(y)
        placed[order] = y
        routes = placed.view(M, k, self.hidden).float() * weights[..., None]
        return out.copy_(torch.where((topk_ids < 0)[..., None], 0.0, routes).sum(dim=1))
