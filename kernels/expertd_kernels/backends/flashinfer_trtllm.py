"""Backend `flashinfer_trtllm`: the TRTLLM-generated MoE kernels in FlashInfer, for SM100.

Only the entry points that take routes are called, never those that choose experts from logits.  bf16, int4 in groups of
32 ("mxint4") and mxfp4 are computed on bf16 activations; mxfp8, again mxfp4, nvfp4 and e4m3 in 128 x 128 blocks or with
one scale a matrix are computed on activations that are rounded here.

nvfp4 and one scale a matrix use the checkpoint's static input scales.  The rows of a batch are rounded once for all
experts, so the largest of the experts' first input scales is taken; the second ones keep their experts.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from expertd_kernels.backends.envelope import activation_of, pack_layer, require_version, unpack_layer
from expertd_kernels.backends.rounding import round_groups, round_mx, round_nvfp4, round_static
from expertd_kernels.backends.trtllm_layout import form_of, pack_matrix, unpack_matrix
from expertd_kernels.common.problem import Problem
from expertd_kernels.common.protocol import Packed
from expertd_kernels.weights.activation import ActivationKind
from expertd_kernels.weights.canonical import Weights
from expertd_kernels.weights.scheme import ActivationQuant

__all__ = ["TrtllmExperts", "experts", "pack", "unpack"]

LAYOUT_VERSION = 1

ROUNDING = {
    "block": (ActivationQuant.E4M3_GROUP128,),
    "mxfp8": (ActivationQuant.MXFP8,),
    "nvfp4": (ActivationQuant.NVFP4,),
    "tensor": (ActivationQuant.E4M3_TENSOR,),
    "mxfp4": (ActivationQuant.NONE, ActivationQuant.MXFP8),
}
"""How forms want activations rounded; those that are not listed compute on bf16."""
STATIC = frozenset({"nvfp4", "tensor"})
"""Forms that need static input scales, and compute no curve but silu without clamp."""

SWIGLU, BLOCK_MAJOR_K, MAJOR_K = 3, 2, 0
DEEPSEEK_FP8, MX_FP8 = 1, 2
LINEAR = 2
"""flashinfer.tllm_enums: ActivationType.Swiglu; WeightLayout.BlockMajorK and MajorK; Fp8QuantizationType.DeepSeekFp8
and MxFp8; SfLayout.layout_linear."""


def pack(weights: Weights, problem: Problem) -> Packed:
    """Canonical weights in the package's layouts, on the weights' device, one matrix at a time."""
    form, second = form_of(weights.w13), form_of(weights.w2)
    assert form == second, f"w13 is {form}, w2 {second}: layers of two schemes are not the row's"
    assert problem.activation_quant in ROUNDING.get(form, (ActivationQuant.NONE,)), (
        f"{form} with this rounding is not the row's"
    )
    assert form not in STATIC or weights.input_scales is not None, f"{form} without static scales is not the row's"
    return pack_layer(
        "flashinfer_trtllm",
        LAYOUT_VERSION,
        weights,
        lambda _, q: pack_matrix(q, form),
        activation_quant=problem.activation_quant.value,
    )


def unpack(packed: Packed) -> Weights:
    """The exact inverse of pack."""
    return unpack_layer(packed, unpack_matrix)


def experts_of_package(num_experts: int) -> int:
    """How many experts the package is told: ours, at least one that is elsewhere (absent routes go there), and as many
    as make a multiple of 4, which its e4m3 and mxfp8 kernels ask for (trtllm_fused_moe_kernel_launcher.cu,
    Fp8BlockScaleLauncher::check_routing in 0.7.2)."""
    return (num_experts + 1 + 3) // 4 * 4


def experts(packed: Packed, problem: Problem) -> TrtllmExperts:
    """Ready to compute on the current CUDA device.  Raises Refused for another layout version."""
    require_version(packed, LAYOUT_VERSION)
    return TrtllmExperts(packed, importlib.import_module("flashinfer.fused_moe"), torch.device("cuda"))


class TrtllmExperts:
    """One layer.  vendor: the module flashinfer.fused_moe; device: where the packed tensors go."""

    backend = "flashinfer_trtllm"

    def __init__(self, packed: Packed, vendor: Any, device: torch.device) -> None:
        self.tensors = {name: t.to(device) for name, t in packed.tensors.items() if ".exact_" not in name}
        w13 = packed.meta["w13"]
        self.form, self.hidden, self.padded = w13["form"], w13["shape"][2], w13["cols"]
        self.num_experts = w13["shape"][0]
        self.rounding = ActivationQuant(packed.meta["activation_quant"])
        self.vendor = vendor
        a = activation_of(packed)
        oai = a.kind is ActivationKind.SWIGLUOAI
        self.alpha, self.beta, self.limit = (
            None if value is None else torch.full((self.num_experts,), float(value), device=device)
            for value in (a.alpha if oai else None, a.beta if oai else None, a.limit)
        )
        self.sizes = {
            "num_experts": experts_of_package(self.num_experts),
            "n_group": None,
            "topk_group": None,
            "intermediate_size": w13["rows"],
            "local_expert_offset": 0,
            "local_num_experts": self.num_experts,
            "routed_scaling_factor": None,
            "routing_method_type": 0,  # not used with given routes
        }
        self.curve = {
            "gemm1_alpha": self.alpha,
            "gemm1_beta": self.beta,
            "gemm1_clamp_limit": self.limit,
        }
        self.matrices = {
            f"gemm{i}_{ours}": self.tensors[f"{name}.{field}"]
            for i, name in ((1, "w13"), (2, "w2"))
            for ours, field in (("weights", "codes"), ("weights_scale", "scales"), ("bias", "bias"))
            if f"{name}.{field}" in self.tensors
        }
        self.scalars: dict[str, Tensor] = {}
        self.input_scale: Tensor | None = None
        if self.form in STATIC:
            self.scalars, self.input_scale = self._static_scales()

    def _static_scales(self) -> tuple[dict[str, Tensor], Tensor]:
        """Factors [E] f32 of the up accumulators (to the second input scale), of the gate's and of w2's; the scale of
        the rows, 0-dim."""
        inputs = self.tensors["input_scales"].float()
        first = inputs[:, 0].amax()
        field = "globals" if self.form == "nvfp4" else "scales"
        ones = torch.ones(self.num_experts, 2, device=inputs.device)
        gate, up = self.tensors.get(f"w13.{field}", ones).flatten(1).unbind(1)
        down = self.tensors.get(f"w2.{field}", ones[:, 0]).flatten()
        scalars = {
            "output1_scale{}_scalar": up * first / inputs[:, 1],
            "output1_scale{}_gate_scalar": gate * first,
            "output2_scale{}_scalar": down * inputs[:, 1],
        }
        plural = "s" if self.form == "tensor" else ""
        return {name.format(plural): t.contiguous() for name, t in scalars.items()}, first

    def _routed(self, x: Tensor, slots: Tensor, weights: Tensor) -> Any:
        """x [M, padded H] bf16; slots [M, k] int32, num_experts = elsewhere; weights [M, k] f32."""
        common: dict[str, Any] = {**self.sizes, **self.curve, "top_k": slots.shape[1]}
        if self.form == "int4":  # this entry point takes routes only as 16 bits of id and 16 bits of bf16 weight
            bits = weights.to(torch.bfloat16).view(torch.int16).to(torch.int32) & 0xFFFF
            return self.vendor.trtllm_mxint4_block_scale_routed_moe(
                topk_ids=(slots << 16) | bits, hidden_states=x, **self.matrices, **common
            )
        routes = (slots, weights)
        if self.form == "bf16":
            return self.vendor.trtllm_bf16_routed_moe(
                topk_ids=routes,
                hidden_states=x,
                use_shuffled_weight=True,
                weight_layout=BLOCK_MAJOR_K,
                activation_type=SWIGLU,
                **self.matrices,
                **common,
            )
        if self.form in ("block", "mxfp8"):
            return self._on_e4m3(x, routes, common)
        if self.form == "tensor":
            return self._on_static(x, routes, common)
        return self._on_e2m1(x, routes, common)

    def _on_e4m3(self, x: Tensor, routes: tuple[Tensor, Tensor], common: dict[str, Any]) -> Any:
        mx = self.form == "mxfp8"
        codes, scale = round_mx(x) if mx else round_groups(x)
        scale = scale if mx else scale.t().contiguous()  # the package reads [H / 128, M]
        return self.vendor.trtllm_fp8_block_scale_routed_moe(
            topk_ids=routes,
            routing_bias=None,
            hidden_states=codes,
            hidden_states_scale=scale,
            use_shuffled_weight=mx,
            weight_layout=MAJOR_K,
            fp8_quantization_type=MX_FP8 if mx else DEEPSEEK_FP8,
            activation_type=SWIGLU,
            **self.matrices,
            **common,
        )

    def _on_static(self, x: Tensor, routes: tuple[Tensor, Tensor], common: dict[str, Any]) -> Any:
        assert self.input_scale is not None
        given = {k: v for k, v in common.items() if k not in self.curve}
        return self.vendor.trtllm_fp8_per_tensor_scale_routed_moe(
            topk_ids=routes,
            routing_bias=None,
            hidden_states=round_static(x, self.input_scale),
            gemm1_weights=self.matrices["gemm1_weights"],
            gemm2_weights=self.matrices["gemm2_weights"],
            use_routing_scales_on_input=False,
            activation_type=SWIGLU,
            **self.scalars,
            **given,
        )

    def _on_e2m1(self, x: Tensor, routes: tuple[Tensor, Tensor], common: dict[str, Any]) -> Any:
        """The package wants every scale's bytes as e4m3, whatever they mean."""
        scales = {k: t.view(torch.float8_e4m3fn) for k, t in self.matrices.items() if k.endswith("_scale")}
        given: dict[str, Any] = {"hidden_states": x, "hidden_states_scale": None}
        if self.rounding is ActivationQuant.MXFP8:
            codes, exponents = round_mx(x)
            given = {
                "hidden_states": codes,
                "hidden_states_scale": exponents.view(torch.float8_e4m3fn),
                "hidden_states_scale_layout": LINEAR,
            }
        if self.form == "nvfp4":
            assert self.input_scale is not None
            packed, block = round_nvfp4(x, self.input_scale)
            given = {"hidden_states": packed, "hidden_states_scale": block, "hidden_states_scale_layout": LINEAR}
            common = {**common, "gemm1_alpha": torch.ones_like(self.scalars["output2_scale_scalar"])}
        return self.vendor.trtllm_fp4_block_scale_routed_moe(
            topk_ids=routes,
            routing_bias=None,
            activation_type=SWIGLU,
            **{
                f"output{i}_scalar": self.scalars.get(f"output{i}_scalar")
                for i in ("1_scale", "1_scale_gate", "2_scale")
            },
            **given,
            **{"gemm1_bias": None, "gemm2_bias": None, **self.matrices, **scales},
            **common,
        )

    def __call__(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        router_weight_on_input: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """As Experts.__call__.  Absent routes go to an expert that the package is told lives elsewhere."""
        out = torch.empty_like(hidden_states) if out is None else out
        if hidden_states.shape[0] == 0:
            return out
        x, weights = hidden_states.to(torch.bfloat16), topk_weights.float()
        if router_weight_on_input:
            x, weights = (x * weights[:, :1]).to(torch.bfloat16), torch.ones_like(weights)
        slots = torch.where(topk_ids < 0, self.num_experts, topk_ids).to(torch.int32).contiguous()
        x = F.pad(x, (0, self.padded - self.hidden)).contiguous()
        y = self._routed(x, slots, weights.contiguous())
        y = y[0] if isinstance(y, (list, tuple)) else y
        return out.copy_(y[:, : self.hidden])
