"""Backend `deepgemm`: DeepGEMM's grouped GEMMs as SGLang's kernel team packages them (sgl-deep-gemm).

e4m3 weights in 128 x 128 blocks on activations rounded to e4m3 in groups of 128 columns, on Hopper (on Blackwell the
package would round the scales to powers of two); bf16 weights on bf16 activations on both.  The package multiplies;
rows grouped by expert, rounding, activation and weighted sum are the kernels of glue.py.

The package wants rows sorted by expert and each expert's rows to begin at a multiple of its alignment (128).  Counts
stay on the device, so the buffers have room for the worst case: A routes to at most min(A, E) experts are at most
A + min(A, E) * 127 rows, rounded up.  Rows that no route fills are marked with expert -1 and are never read.

A wheel is built against one version of PyTorch, and its import fails on others: 0.1.5 is the last that runs on 2.11.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from expertd_kernels.backends.envelope import activation_of, pack_layer, require_version, unpack_layer
from expertd_kernels.backends.glue import Glue, in_pieces
from expertd_kernels.backends.glue_space import capacity, sorted_rows
from expertd_kernels.backends.scales import as_f32, as_stored
from expertd_kernels.backends.scratch import Shapes
from expertd_kernels.common.problem import Problem
from expertd_kernels.common.protocol import Packed
from expertd_kernels.weights.activation import Activation
from expertd_kernels.weights.canonical import QuantTensor, Weights
from expertd_kernels.weights.scheme import ActivationQuant, Element
from expertd_kernels.weights.serial import matrix_to_json, scheme_from_json

__all__ = ["DeepGemmExperts", "experts", "pack", "unpack"]

LAYOUT_VERSION = 1


def _form(q: QuantTensor) -> str:
    s = q.scheme
    assert q.columns is None, "activation order is not the row's"
    assert q.global_scales is None, "second-level scales are not the row's"
    if s.element is Element.BF16:
        return "bf16"
    assert (s.element, s.rows, s.cols) == (Element.E4M3, 128, 128), f"{s.name} is not the row's"
    _, N, K = q.shape
    assert N // q.segments % 128 == K % 128 == 0, f"[{N}, {K}] has cut blocks, which are not the row's"
    return "block"


def pack(weights: Weights, problem: Problem) -> Packed:
    """The canonical tensors, scales as f32: the package reads what the canonical form is."""
    form, second = _form(weights.w13), _form(weights.w2)
    wanted = ActivationQuant.E4M3_GROUP128 if form == "block" else ActivationQuant.NONE
    assert form == second, f"w13 is {form}, w2 {second}: layers of two schemes are not the row's"
    assert problem.activation_quant is wanted, f"{form} with this rounding is not the row's"
    return pack_layer("deepgemm", LAYOUT_VERSION, weights, lambda _, q: _pack_matrix(q), form=form)


def _pack_matrix(q: QuantTensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = {"codes": q.codes.contiguous().clone()}
    if q.scales is not None:
        tensors["scales"] = as_f32(q.scales, q.scheme.scale).contiguous().clone()
    if q.bias is not None:
        tensors["bias"] = q.bias.contiguous().clone()
    return tensors, matrix_to_json(q)


def _unpack_matrix(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> QuantTensor:
    scheme = scheme_from_json(meta["scheme"])
    scales = tensors.get("scales")
    return QuantTensor(
        scheme,
        tuple(meta["shape"]),
        tensors["codes"],
        None if scales is None else as_stored(scales, scheme.scale),
        bias=tensors.get("bias"),
        segments=meta["segments"],
    )


def unpack(packed: Packed) -> Weights:
    """The exact inverse of pack."""
    return unpack_layer(packed, _unpack_matrix)


def experts(packed: Packed, problem: Problem) -> DeepGemmExperts:
    """Ready to compute on the current CUDA device.  Raises Refused for another layout version."""
    require_version(packed, LAYOUT_VERSION)
    device = torch.device("cuda", torch.cuda.current_device())
    return DeepGemmExperts(packed, importlib.import_module("deep_gemm"), device)


class DeepGemmExperts:
    """One layer.  vendor: the module deep_gemm; device: where the packed tensors go."""

    backend = "deepgemm"

    def __init__(self, packed: Packed, vendor: Any, device: torch.device) -> None:
        self.tensors = {name: t.to(device) for name, t in packed.tensors.items()}
        self.form: str = packed.meta["form"]
        self.num_experts: int = packed.meta["w13"]["shape"][0]
        self.width: int = max(packed.meta["w13"]["shape"][1:])
        self.activation: Activation = activation_of(packed)
        self.vendor = vendor
        self.alignment = int(vendor.get_mk_alignment_for_contiguous_layout())

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
        given = (hidden_states, topk_ids, topk_weights, router_weight_on_input, out)
        return in_pieces(self._compute, *given, width=self.width)

    def _shapes(self, routes: int) -> Shapes:
        rows = capacity(routes, self.num_experts, self.alignment)
        (_, wide, hidden), (_, _, inner) = (self.tensors[f"{name}.codes"].shape for name in ("w13", "w2"))
        return sorted_rows(rows, wide, inner, hidden, self.form == "block")

    def _compute(self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor, weighted: bool) -> None:
        glue = Glue(x, ids, weights, self.num_experts, self._shapes(ids.numel()), self.alignment)
        parts, biases = glue.parts, [self.tensors.get(f"{name}.bias") for name in ("w13", "w2")]
        places = glue.place(self.alignment, experts=True)
        glue.gather(places, parts["x"], parts.get("x_scale"))
        self._gemm(parts["x"], parts.get("x_scale"), "w13", places.expert, parts["h"])
        glue.activate(parts["h"], parts["a"], self.activation, places, biases[0], parts.get("a_scale"))
        self._gemm(parts["a"], parts.get("a_scale"), "w2", places.expert, parts["y"])
        glue.combine(parts["y"], out, weighted, places, biases[1])

    def _gemm(self, x: Tensor, scale: Tensor | None, name: str, expert: Tensor, out: Tensor) -> None:
        """out [R, N] bf16: each row of x [R, K] times its expert's matrix; rows of expert -1 hold anything."""
        codes = self.tensors[f"{name}.codes"]
        if scale is None:
            self.vendor.m_grouped_bf16_gemm_nt_contiguous(x, codes, out, expert)
        else:
            weights = (codes, self.tensors[f"{name}.scales"])
            self.vendor.m_grouped_fp8_gemm_nt_contiguous((x, scale.t()), weights, out, expert)
