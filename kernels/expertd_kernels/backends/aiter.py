"""Backend `aiter`: the fused MoE kernels of AMD's AITER, routes given, for CDNA3 and CDNA4.

bf16 weights on bf16 activations; on CDNA4 also e4m3 weights with one scale a row, on activations that the package
rounds by token, e4m3 in 128 x 128 blocks, on activations that it rounds in groups of 128, and mxfp4 on bf16 activations
with biases and gpt-oss's clamped swigluoai, whose constants the kernel has built in.  (CDNA3's e4m3 is another code,
which has no negative zero: not computed.)

Layouts: aiter_layout.py.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from expertd_kernels.backends.aiter_layout import form_of, pack_matrix, padded, unpack_matrix
from expertd_kernels.backends.envelope import activation_of, pack_layer, require_version, unpack_layer
from expertd_kernels.common.problem import Problem
from expertd_kernels.common.protocol import Packed
from expertd_kernels.weights.activation import ActivationKind
from expertd_kernels.weights.canonical import Weights
from expertd_kernels.weights.scheme import ActivationQuant

__all__ = ["AiterExperts", "experts", "pack", "unpack"]

LAYOUT_VERSION = 2
FORMS = {
    "bf16": (ActivationQuant.NONE, "No", ActivationKind.SILU_AND_MUL),
    "channel": (ActivationQuant.E4M3_TOKEN, "per_Token", ActivationKind.SILU_AND_MUL),
    "block": (ActivationQuant.E4M3_GROUP128, "per_128x128", ActivationKind.SILU_AND_MUL),
    "mxfp4": (ActivationQuant.NONE, "per_1x32", ActivationKind.SWIGLUOAI),
}
"""How each form's activations are rounded, the package's QuantType for it, and the function between its GEMMs.  (mxfp4
with Silu would have its activations rounded to mxfp4.)"""
ACTIVATION_TYPE = {ActivationKind.SILU_AND_MUL: "Silu", ActivationKind.SWIGLUOAI: "Swiglu"}
"""Names in the package's ActivationType."""


def pack(weights: Weights, problem: Problem) -> Packed:
    """Canonical weights in the package's order, on the weights' device, one matrix at a time; scales as f32."""
    form, second = form_of(weights.w13), form_of(weights.w2)
    assert form == second, f"w13 is {form}, w2 {second}: layers of two schemes are not the row's"
    rounding, _, function = FORMS[form]
    assert problem.activation_quant is rounding, f"{form} with this rounding is not the row's"
    assert weights.activation.kind is function, f"{form} with {weights.activation.name} is not the row's"
    return pack_layer("aiter", LAYOUT_VERSION, weights, lambda _, q: pack_matrix(q), form=form)


def unpack(packed: Packed) -> Weights:
    """The exact inverse of pack."""
    return unpack_layer(packed, unpack_matrix)


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
        form = packed.meta["form"]
        self.codes = [tensors["w13.codes"], tensors["w2.codes"]]
        if form == "mxfp4":
            self.codes = [t.view(torch.float4_e2m1fn_x2) for t in self.codes]
        for t in self.codes:
            t.is_shuffled = True  # type: ignore[attr-defined]  # what the package's own shuffle_weight leaves on them
        self.num_experts, _, self.hidden = packed.meta["w13"]["shape"]
        self.padded: int = padded(self.hidden) if form == "mxfp4" else self.hidden
        mask = torch.ones(self.num_experts + 1, dtype=torch.int32, device=device)
        mask[-1] = 0  # the last one lives elsewhere: where absent routes go
        self.call = vendor.fused_moe.fused_moe
        self.given: dict[str, Any] = {
            "expert_mask": mask,
            "activation": getattr(vendor.ActivationType, ACTIVATION_TYPE[activation_of(packed).kind]),
            "quant_type": getattr(vendor.QuantType, FORMS[form][1]),
            "w1_scale": tensors.get("w13.scales"),
            "w2_scale": tensors.get("w2.scales"),
        }
        if form == "mxfp4":
            intermediate: int = packed.meta["w2"]["shape"][2]
            self.given |= {
                "bias1": tensors.get("w13.bias"),
                "bias2": tensors.get("w2.bias"),
                "hidden_pad": self.padded - self.hidden,
                "intermediate_pad": padded(intermediate) - intermediate,
            }

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
            F.pad(x, (0, self.padded - self.hidden)).contiguous(),
            self.codes[0],
            self.codes[1],
            weights.contiguous(),
            torch.where(topk_ids < 0, self.num_experts, topk_ids).to(torch.int32).contiguous(),
            **self.given,
        )
        return out.copy_(y[:, : self.hidden])
