"""Backend `xpu`: Intel's grouped GEMM for Xe2 and Xe3, through vllm-xpu-kernels' class XpuFusedMoe.

Weight-only: the package multiplies bf16 activations with whatever the weights are (xpu_layout.py).

Its constructor turns unsigned int4 codes into signed ones by rebinding the tensors it was given, once and in place,
and marks them with an attribute.  Here the codes are signed from packing on; what it gets are aliases that already
carry the mark, and they are retyped to int8 afterwards: the state that its own conversion leaves, without a second
copy.  The packed tensors stay as they are, so a reload or a second build starts from the same bytes.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from expertd_kernels.backends.envelope import activation_of, pack_layer, require_version, unpack_layer
from expertd_kernels.backends.xpu_layout import form_of, pack_matrix, unpack_matrix
from expertd_kernels.common.problem import Problem
from expertd_kernels.common.protocol import Packed
from expertd_kernels.weights.activation import ActivationKind
from expertd_kernels.weights.canonical import QuantTensor, Weights
from expertd_kernels.weights.scheme import ActivationQuant

# Why it is so: decision 27 in DECISIONS.md.
__all__ = ["XpuExperts", "experts", "pack", "unpack"]

LAYOUT_VERSION = 1

NAMES = {
    ActivationKind.SILU_AND_MUL: "silu",
    ActivationKind.GELU_AND_MUL: "gelu",
    ActivationKind.GELU_TANH_AND_MUL: "gelu_tanh",
    ActivationKind.SWIGLUOAI: "swigluoai",
    ActivationKind.RELU2: "relu2_no_mul",
}
CLAMPED = frozenset(
    {ActivationKind.SILU_AND_MUL, ActivationKind.GELU_AND_MUL, ActivationKind.GELU_TANH_AND_MUL},
)
"""Where the package's clamp of the first and the second half is the wanted one; its swigluoai clamps by itself."""

ROUTES = (1, 2, 4, 6, 7, 8, 10, 16)
"""Routes a row that the package's gather is compiled for."""

CONVERTED = "xpu_fused_moe"
"""The attribute by which the package's constructor knows codes that are signed already."""


def pack(weights: Weights, problem: Problem) -> Packed:
    """Canonical weights in the package's layouts, on the weights' device, one matrix at a time."""
    assert problem.activation_quant is ActivationQuant.NONE, "rounded activations are not the row's"
    first, second = weights.w13.scheme, weights.w2.scheme
    assert first == second, f"w13 is {first.name}, w2 {second.name}: layers of two schemes are not the row's"
    interleaved = weights.activation.kind is ActivationKind.SWIGLUOAI
    forms = [form_of(q) for q in (weights.w13, weights.w2)]

    def matrix(name: str, q: QuantTensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
        form = form_of(q)
        return pack_matrix(q, interleaved and name == "w13", "block" if form == "tensor" and "block" in forms else form)

    return pack_layer("xpu", LAYOUT_VERSION, weights, matrix)


def unpack(packed: Packed) -> Weights:
    """The exact inverse of pack."""
    return unpack_layer(packed, unpack_matrix)


def _vendor() -> Any:
    """The package's module.  ImportError with its own reason where its native parts do not load: it hides that."""
    module = importlib.import_module("vllm_xpu_kernels.fused_moe_interface")
    if not module.FUSEDMOE_AVAILABLE:
        raise ImportError(f"vllm-xpu-kernels: {module.FUSEDMOE_UNAVAILABLE_REASON}")
    return module


def experts(packed: Packed, problem: Problem) -> XpuExperts:
    """Ready to compute on the current XPU.  Raises Refused for another layout version, ImportError without the
    package's native parts."""
    require_version(packed, LAYOUT_VERSION)
    return XpuExperts(packed, _vendor(), torch.device(problem.device.kind))


class XpuExperts:
    """One layer.  vendor: the module vllm_xpu_kernels.fused_moe_interface; device: where the packed tensors go."""

    backend = "xpu"

    def __init__(self, packed: Packed, vendor: Any, device: torch.device) -> None:
        self.tensors = {name: t.to(device) for name, t in packed.tensors.items() if ".exact_" not in name}
        self.forms = {name: packed.meta[name]["form"] for name in ("w13", "w2")}
        self.activation = activation_of(packed)
        self.num_experts = packed.meta["w13"]["shape"][0]
        self.vendor = vendor
        slots = torch.arange(self.num_experts + 1, dtype=torch.int32, device=device)
        self.expert_map = torch.where(slots < self.num_experts, slots, -1)
        self._layers: dict[int, Any] = {}

    def _codes(self, name: str) -> Tensor:
        """An alias of the packed codes, of the dtype by which the package tells schemes apart."""
        t = self.tensors[f"{name}.codes"]
        t = t.view(torch.float4_e2m1fn_x2) if self.forms[name] == "mxfp4" else t.view(t.shape)
        setattr(t, CONVERTED, True)
        return t

    def _layer(self, routes: int) -> Any:
        """The package's object for `routes` routes a row: it holds references, no weights of its own."""
        if routes not in self._layers:
            get, kind = self.tensors.get, self.activation.kind
            layer = self.vendor.XpuFusedMoe(
                self._codes("w13"),
                get("w13.scales"),
                get("w13.bias"),
                self._codes("w2"),
                get("w2.scales"),
                get("w2.bias"),
                routes,
                NAMES[kind],
                self.num_experts,
                expert_map=self.expert_map,
                gemm1_clamp_limit=self.activation.limit if kind in CLAMPED else None,
            )
            if self.forms["w13"] == "int4":
                layer.w13, layer.w2 = layer.w13.view(torch.int8), layer.w2.view(torch.int8)
            self._layers[routes] = layer
        return self._layers[routes]

    def _routed(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """One call of the package.  Absent routes go to one more expert, which the expert map says is elsewhere:
        the package takes negative ids for expert 0.  Rows are filled up to a number of routes that it knows."""
        M, k = ids.shape
        routes = next(r for r in ROUTES if r >= k)
        slots = torch.full((M, routes), self.num_experts, dtype=torch.int32, device=ids.device)
        slots[:, :k] = torch.where(ids < 0, self.num_experts, ids)
        factors = torch.zeros((M, routes), dtype=torch.float32, device=ids.device)
        factors[:, :k] = weights
        out = torch.empty_like(x)
        self._layer(routes).apply(out, x, factors, slots, expert_map=self.expert_map)
        return out

    def __call__(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        router_weight_on_input: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """As Experts.__call__.  More than 16 routes a row are computed in parts and added in f32."""
        x, weights = hidden_states.to(torch.bfloat16), topk_weights.float()
        if router_weight_on_input:
            x, weights = (x * weights[:, :1]).to(torch.bfloat16), torch.ones_like(weights)
        out = torch.empty_like(hidden_states) if out is None else out
        if hidden_states.shape[0] == 0:
            return out
        most = ROUTES[-1]
        parts = [
            self._routed(x.contiguous(), topk_ids[:, i : i + most], weights[:, i : i + most])
            for i in range(0, topk_ids.shape[1], most)
        ]
        return out.copy_(parts[0] if len(parts) == 1 else torch.stack(parts).float().sum(dim=0))
