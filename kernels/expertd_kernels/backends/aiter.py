"""Backend `aiter`: the fused MoE kernels of AMD's AITER, routes given, for CDNA3 and CDNA4.

bf16 weights on bf16 activations; on CDNA4 also e4m3 weights with one scale a row, on activations that the package
rounds by token, and e4m3 in 128 x 128 blocks, on activations that it rounds in groups of 128.  (CDNA3's e4m3 is another
code, which has no negative zero: not computed.)

Layout: 16 rows and 32 bytes along K stand together, as 2 pieces of 16 bytes, each for the 16 rows one after the other:

    [E, N, bytes] -> [E, N / 16, bytes / 32 columns, 2, 16 rows, 16 bytes]    (bf16: 64 bytes of 32 columns, 4 pieces)
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from expertd_kernels.backends.envelope import pack_layer, require_version, unpack_layer
from expertd_kernels.backends.scales import as_f32, as_stored
from expertd_kernels.problem import Problem
from expertd_kernels.protocol import Packed
from expertd_kernels.weights.canonical import CODE_DTYPE, QuantTensor, Weights
from expertd_kernels.weights.scheme import WHOLE, ActivationQuant, Element
from expertd_kernels.weights.serial import matrix_to_json, scheme_from_json

__all__ = ["AiterExperts", "experts", "pack", "shuffle", "unpack", "unshuffle"]

LAYOUT_VERSION = 1
FORMS = {
    "bf16": (ActivationQuant.NONE, "No"),
    "channel": (ActivationQuant.E4M3_TOKEN, "per_Token"),
    "block": (ActivationQuant.E4M3_GROUP128, "per_128x128"),
}
"""How each form's activations are rounded, and the package's QuantType for it."""
ROWS, COLUMNS, PIECE_BYTES = 16, 32, 16
"""Of the package's shuffle_weight with layout (16, 16): rows and columns that stand together, bytes of a piece."""


def _form(q: QuantTensor) -> str:
    s = q.scheme
    assert q.columns is None, "activation order is not the row's"
    assert q.global_scales is None, "second-level scales are not the row's"
    assert q.bias is None, "biases are not the row's"
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


def pack(weights: Weights, problem: Problem) -> Packed:
    """Canonical weights in the package's order, on the weights' device, one matrix at a time; scales as f32."""
    form, second = _form(weights.w13), _form(weights.w2)
    assert form == second, f"w13 is {form}, w2 {second}: layers of two schemes are not the row's"
    assert problem.activation_quant is FORMS[form][0], f"{form} with this rounding is not the row's"
    return pack_layer("aiter", LAYOUT_VERSION, weights, lambda _, q: _pack_matrix(q), form=form)


def _pack_matrix(q: QuantTensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = {"codes": shuffle(q.codes)}
    if q.scales is not None:
        tensors["scales"] = as_f32(q.scales, q.scheme.scale).contiguous().clone()
    return tensors, matrix_to_json(q)


def _unpack_matrix(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> QuantTensor:
    scheme, scales = scheme_from_json(meta["scheme"]), tensors.get("scales")
    codes = unshuffle(tensors["codes"])
    assert codes.dtype == CODE_DTYPE[scheme.element]
    natural = None if scales is None else as_stored(scales, scheme.scale)
    return QuantTensor(scheme, tuple(meta["shape"]), codes, natural, segments=meta["segments"])


def unpack(packed: Packed) -> Weights:
    """The exact inverse of pack."""
    return unpack_layer(packed, _unpack_matrix)


def experts(packed: Packed, problem: Problem) -> AiterExperts:
    """Ready to compute on the current ROCm device.  Raises Refused for another layout version."""
    require_version(packed, LAYOUT_VERSION)
    importlib.import_module("aiter.fused_moe")
    return AiterExperts(packed, importlib.import_module("aiter"), torch.device("cuda"))


class AiterExperts:
    """One layer.  vendor: the module aiter, with aiter.fused_moe imported; device: where the packed tensors go."""

    backend = "aiter"

    def __init__(self, packed: Packed, vendor: Any, device: torch.device) -> None:
        tensors = {name: t.to(device) for name, t in packed.tensors.items()}
        self.codes = [tensors["w13.codes"], tensors["w2.codes"]]
        for t in self.codes:
            t.is_shuffled = True  # type: ignore[attr-defined]  # what the package's own shuffle_weight leaves on them
        self.scales = [tensors.get("w13.scales"), tensors.get("w2.scales")]
        self.num_experts: int = packed.meta["w13"]["shape"][0]
        mask = torch.ones(self.num_experts + 1, dtype=torch.int32, device=device)
        mask[-1] = 0  # the last one lives elsewhere: where absent routes go
        self.mask = mask
        self.call = vendor.fused_moe.fused_moe
        self.quant = getattr(vendor.QuantType, FORMS[packed.meta["form"]][1])
        self.silu = vendor.ActivationType.Silu

    def __call__(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        router_weight_on_input: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """As Experts.__call__."""
        out = torch.empty_like(hidden_states) if out is None else out
        if hidden_states.shape[0] == 0:
            return out
        x, weights = hidden_states.to(torch.bfloat16), topk_weights.float()
        if router_weight_on_input:
            x, weights = (x * weights[:, :1]).to(torch.bfloat16), torch.ones_like(weights)
        y = self.call(
            x.contiguous(),
            self.codes[0],
            self.codes[1],
            weights.contiguous(),
            torch.where(topk_ids < 0, self.num_experts, topk_ids).to(torch.int32).contiguous(),
            expert_mask=self.mask,
            activation=self.silu,
            quant_type=self.quant,
            w1_scale=self.scales[0],
            w2_scale=self.scales[1],
        )
        return out.copy_(y)
