"""Backend `flashinfer_cutlass`: FlashInfer's CUTLASS MoE kernels (cutlass_fused_moe), routes given.

bf16 everywhere it runs, and e4m3 with one scale a matrix on activations that are rounded here with the largest of the
experts' static scales.  On Hopper mxfp4 on bf16 activations, and e4m3 in 128 x 128 blocks, whose activations the kernel
rounds to e4m3 in groups of 128 columns.  On Blackwell mxfp4 and mxfp8 on activations that are rounded to mxfp8 here,
and nvfp4, whose activations the kernel rounds with the checkpoint's static second-level scales.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from expertd_kernels.backends.cutlass_layout import form_of, pack_matrix, unpack_matrix
from expertd_kernels.backends.envelope import activation_of, pack_layer, require_version, unpack_layer
from expertd_kernels.backends.rounding import round_mx, round_static
from expertd_kernels.common.problem import Problem
from expertd_kernels.common.protocol import Packed
from expertd_kernels.weights.activation import ActivationKind
from expertd_kernels.weights.canonical import Weights
from expertd_kernels.weights.scheme import ActivationQuant

__all__ = ["CutlassExperts", "experts", "pack", "unpack"]

LAYOUT_VERSION = 1

ROUNDING = {
    "block": ActivationQuant.E4M3_GROUP128,
    "mxfp4s": ActivationQuant.MXFP8,
    "mxfp8": ActivationQuant.MXFP8,
    "nvfp4": ActivationQuant.NVFP4,
    "tensor": ActivationQuant.E4M3_TENSOR,
}
"""How forms want activations rounded; those that are not listed compute on bf16."""
MX = frozenset({"mxfp4s", "mxfp8"})
STATIC = frozenset({"nvfp4", "tensor"})
"""Forms that need static input scales, and compute no curve but silu without clamp, and no biases."""

ACTIVATION_TYPE = {
    ActivationKind.SILU_AND_MUL: "Swiglu",
    ActivationKind.SWIGLUOAI: "Swiglu",
    ActivationKind.GELU_AND_MUL: "Geglu",
    ActivationKind.GELU_TANH_AND_MUL: "GegluTanh",
    ActivationKind.RELU2: "Relu2",
}
"""Names in the package's ActivationType."""


def pack(weights: Weights, problem: Problem) -> Packed:
    """Canonical weights in the package's layouts, on the weights' device, one matrix at a time."""
    form, second = (form_of(q, problem.activation_quant) for q in (weights.w13, weights.w2))
    assert form == second, f"w13 is {form}, w2 {second}: layers of two schemes are not the row's"
    assert problem.activation_quant is ROUNDING.get(form, ActivationQuant.NONE), (
        f"{form} with this rounding is not the row's"
    )
    assert form not in STATIC or weights.input_scales is not None, f"{form} without static scales is not the row's"
    for q in (weights.w13, weights.w2):
        assert q.bias is None or form not in STATIC, f"biases of {form} weights are not the row's"
    return pack_layer("flashinfer_cutlass", LAYOUT_VERSION, weights, lambda _, q: pack_matrix(q, form))


def unpack(packed: Packed) -> Weights:
    """The exact inverse of pack."""
    return unpack_layer(packed, unpack_matrix)


def experts(packed: Packed, problem: Problem) -> CutlassExperts:
    """Ready to compute on the current CUDA device.  Raises Refused for another layout version."""
    require_version(packed, LAYOUT_VERSION)
    return CutlassExperts(packed, importlib.import_module("flashinfer.fused_moe"), torch.device("cuda"))


class CutlassExperts:
    """One layer.  vendor: the module flashinfer.fused_moe; device: where the packed tensors go."""

    backend = "flashinfer_cutlass"

    def __init__(self, packed: Packed, vendor: Any, device: torch.device) -> None:
        self.tensors = {name: t.to(device) for name, t in packed.tensors.items() if ".exact_" not in name}
        w13 = packed.meta["w13"]
        self.form, self.hidden, self.padded = w13["form"], w13["shape"][2], w13["cols"]
        self.num_experts = w13["shape"][0]
        self.vendor = vendor
        a = activation_of(packed)
        self.activation_type = getattr(vendor.ActivationType, ACTIVATION_TYPE[a.kind])
        oai = a.kind is ActivationKind.SWIGLUOAI
        curve = (a.alpha, a.beta) if oai else (1.0, 0.0)
        used = oai or (a.limit is not None and a.kind is ActivationKind.SILU_AND_MUL)
        self.curve = {
            f"swiglu_{name}": torch.full((self.num_experts,), float(value), device=device)
            for name, value in zip(("alpha", "beta", "limit"), (*curve, a.limit), strict=True)
            if used and value is not None
        }
        self.biases = self._biases()
        self.scales = self._scales()
        packed_words = self.form in ("mxfp4s", "nvfp4")  # the package tells these kernels by the type of the weights
        self.codes = [
            self.tensors[f"{m}.codes"].view(torch.int64) if packed_words else self.tensors[f"{m}.codes"]
            for m in ("w13", "w2")
        ]

    def _biases(self) -> dict[str, Tensor]:
        """Both or none: the package reads them together."""
        names = {"fc1_expert_biases": "w13", "fc2_expert_biases": "w2"}
        if not any(f"{m}.bias" in self.tensors for m in names.values()):
            return {}
        out = {}
        for name, m in names.items():
            codes = self.tensors[f"{m}.codes"]
            zero = torch.zeros(codes.shape[:2], dtype=torch.bfloat16, device=codes.device)
            out[name] = self.tensors.get(f"{m}.bias", zero)
        return out

    def _scales(self) -> list[Tensor]:
        """The package's quant_scales, in its order."""
        scales = [self.tensors[f"{m}.scales"] for m in ("w13", "w2") if f"{m}.scales" in self.tensors]
        if self.form == "mxfp4":
            return [s.view(torch.int32) for s in scales]
        if self.form in MX:
            one = torch.ones(self.num_experts, device=scales[0].device)
            return [scales[0].view(torch.int32), one, scales[1].view(torch.int32), one]
        if self.form not in STATIC:
            return scales
        first, second = (t.contiguous() for t in self.tensors["input_scales"].float().unbind(1))
        if self.form == "tensor":
            w13, w2 = (s[:, 0, 0] for s in scales)
            first = first.amax()
            return [w13 * first, second.reciprocal(), w2 * second, first]
        one = torch.ones(self.num_experts, 1, device=first.device)
        w13, w2 = (self.tensors.get(f"{m}.globals", one)[:, 0] for m in ("w13", "w2"))
        blocks = [s.view(torch.int32) for s in scales]
        return [first.reciprocal(), blocks[0], w13 * first, second.reciprocal(), blocks[1], w2 * second]

    def _input(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """The rows [M, padded H] bf16 as the form's kernel takes them, and the arguments that go with them."""
        if self.form == "tensor":
            return round_static(x, self.scales[3]), {}
        if self.form in MX:
            codes, exponents = round_mx(x)
            return codes, {"input_sf": exponents, "swizzled_input_sf": False, "use_mxfp8_act_scaling": True}
        return x, {}

    def __call__(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        router_weight_on_input: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """As Experts.__call__.  The package is told that this is rank 0 of 2, with as many experts elsewhere as here:
        absent routes go to the first of those and are left out."""
        out = torch.empty_like(hidden_states) if out is None else out
        if hidden_states.shape[0] == 0:
            return out
        x, weights = hidden_states.to(torch.bfloat16), topk_weights.float()
        if router_weight_on_input:
            x, weights = (x * weights[:, :1]).to(torch.bfloat16), torch.ones_like(weights)
        x = F.pad(x, (0, self.padded - self.hidden)).contiguous()
        rows, more = self._input(x)
        y = self.vendor.cutlass_fused_moe(
            rows,
            torch.where(topk_ids < 0, self.num_experts, topk_ids).to(torch.int32).contiguous(),
            weights.contiguous(),
            self.codes[0],
            self.codes[1],
            torch.bfloat16,
            quant_scales=self.scales,
            ep_size=2,
            ep_rank=0,
            use_deepseek_fp8_block_scale=self.form == "block",
            use_w4_group_scaling=self.form == "mxfp4",
            activation_type=self.activation_type,
            **more,
            **self.biases,
            **self.curve,
        )
        y = y[0] if isinstance(y, (list, tuple)) else y
        return out.copy_(y[:, : self.hidden])
