"""Backend `deepgemm`: DeepGEMM's grouped GEMMs as SGLang's kernel team packages them (sgl-deep-gemm).

e4m3 weights in 128 x 128 blocks on activations rounded to e4m3 in groups of 128 columns, on Hopper (on Blackwell the
package would round the scales to powers of two); bf16 weights on bf16 activations on both.  The package multiplies; the
rest of a layer is torch here: rows grouped by expert, rounding, activation, weighted sum.

The package wants rows sorted by expert and each expert's rows to begin at a multiple of its alignment (128).  Counts
stay on the device, so the buffers have room for the worst case: A routes to at most min(A, E) experts are at most
A + min(A, E) * 127 rows, rounded up.  Rows that no route fills are marked with expert -1 and are never read.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from expertd_kernels.activation import Activation
from expertd_kernels.backends.envelope import activation_of, pack_layer, require_version, unpack_layer
from expertd_kernels.backends.protocol import Packed
from expertd_kernels.backends.rounding import round_groups
from expertd_kernels.backends.scales import as_f32, as_stored
from expertd_kernels.canonical import QuantTensor, Weights
from expertd_kernels.float32 import apply_activation
from expertd_kernels.oracle import Refused
from expertd_kernels.problem import Problem
from expertd_kernels.scheme import ActivationQuant, Element
from expertd_kernels.serial import matrix_to_json, scheme_from_json

__all__ = ["DeepGemmExperts", "Grouping", "experts", "group_rows", "pack", "unpack"]

LAYOUT_VERSION = 1
MAX_ROUTES = 1 << 16
"""Routes of one launch: more tokens are computed in pieces, so that no buffer is above 2 GiB at H = 7168."""


def _form(q: QuantTensor) -> str:
    s = q.scheme
    if q.columns is not None or q.global_scales is not None:
        raise Refused("activation order and second-level scales are not computed")
    if s.element is Element.BF16:
        return "bf16"
    if s.element is not Element.E4M3 or (s.rows, s.cols) != (128, 128):
        raise Refused(f"has no layout for {s.name} weights")
    _, N, K = q.shape
    if N // q.segments % 128 or K % 128:
        raise Refused(f"e4m3 [{N}, {K}] in {q.segments} segments: blocks of 128 x 128 must divide each")
    return "block"


def pack(weights: Weights, problem: Problem) -> Packed:
    """The canonical tensors, scales as f32: the package reads what the canonical form is."""
    form = _form(weights.w13)
    if _form(weights.w2) != form:
        raise Refused("w13 and w2 have different schemes")
    wanted = ActivationQuant.E4M3_GROUP128 if form == "block" else ActivationQuant.NONE
    if problem.activation_quant is not wanted:
        raise Refused(f"{form} weights are not computed with activations {problem.activation_quant.value}")
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
    return DeepGemmExperts(packed, importlib.import_module("deep_gemm"), torch.device("cuda"))


@dataclass(frozen=True)
class Grouping:
    """Where routes stand.  token [R] int64: token of each row (0 where none is); expert [R] int32: its expert, -1 where
    no route is; row [M, k] int64: row of each route, any valid one for routes that are absent."""

    token: Tensor
    expert: Tensor
    row: Tensor


def group_rows(topk_ids: Tensor, num_experts: int, alignment: int) -> Grouping:
    """Rows for the routes of `topk_ids` [M, k] (-1 = absent), sorted by expert, each expert's first at a multiple of
    `alignment`.  Their number R depends on the shapes alone, and nothing is read back: a CUDA graph may hold it."""
    M, k = topk_ids.shape
    device, routes = topk_ids.device, topk_ids.numel()
    worst = routes + min(routes, num_experts) * (alignment - 1)
    R = -(-worst // alignment) * alignment
    key = torch.where(topk_ids < 0, num_experts, topk_ids).flatten().long()
    order = torch.argsort(key, stable=True)
    one = torch.ones(1, dtype=torch.int64, device=device).expand(routes)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device).scatter_add_(0, key, one)
    padded = (counts + alignment - 1) // alignment * alignment
    shift = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)  # from the place in `order` to the row
    place = torch.empty_like(order)
    place[order] = torch.arange(routes, device=device)
    row = place + shift[key]
    here = key < num_experts
    row = torch.where(here, row, R)  # absent routes: a row behind the last one, cut off below
    token = torch.zeros(R + 1, dtype=torch.int64, device=device)
    expert = torch.full((R + 1,), -1, dtype=torch.int32, device=device)
    token[row] = torch.arange(M, device=device).repeat_interleave(k)
    expert[row] = key.int()
    return Grouping(token[:R], expert[:R].contiguous(), torch.where(here, row, 0).view(M, k))


class DeepGemmExperts:
    """One layer.  vendor: the module deep_gemm; device: where the packed tensors go."""

    backend = "deepgemm"

    def __init__(self, packed: Packed, vendor: Any, device: torch.device) -> None:
        self.tensors = {name: t.to(device) for name, t in packed.tensors.items()}
        self.form: str = packed.meta["form"]
        self.num_experts: int = packed.meta["w13"]["shape"][0]
        self.activation: Activation = activation_of(packed)
        self.vendor = vendor
        self.alignment = int(vendor.get_mk_alignment_for_contiguous_layout())

    def _gemm(self, x: Tensor, name: str, expert: Tensor) -> Tensor:
        """[R, N] bf16: each row of x [R, K] bf16 times its expert's matrix; rows of expert -1 hold anything."""
        codes = self.tensors[f"{name}.codes"]
        out = torch.empty(x.shape[0], codes.shape[1], dtype=torch.bfloat16, device=x.device)
        if self.form == "bf16":
            self.vendor.m_grouped_bf16_gemm_nt_contiguous(x, codes, out, expert)
        else:
            rounded = round_groups(x)
            weights = (codes, self.tensors[f"{name}.scales"])
            self.vendor.m_grouped_fp8_gemm_nt_contiguous(rounded, weights, out, expert)
        return out

    def _biased(self, y: Tensor, name: str, expert: Tensor) -> Tensor:
        """[R, N] f32."""
        bias = self.tensors.get(f"{name}.bias")
        return y.float() if bias is None else y.float() + bias[expert.clamp_min(0).long()]

    def _layer(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """[M, H] f32 of x [M, H] bf16."""
        g = group_rows(ids, self.num_experts, self.alignment)
        h = self._biased(self._gemm(x[g.token], "w13", g.expert), "w13", g.expert)
        h = apply_activation(h, self.activation).to(torch.bfloat16)
        y = self._biased(self._gemm(h, "w2", g.expert), "w2", g.expert)
        each = torch.where((ids < 0)[..., None], 0.0, y[g.row] * weights[..., None])  # not a product: rows may be NaN
        return each.sum(dim=1)

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
        weights = topk_weights.float()
        piece = max(1, MAX_ROUTES // max(1, topk_ids.shape[1]))
        for at in range(0, hidden_states.shape[0], piece):
            part = slice(at, at + piece)
            x, w = hidden_states[part].to(torch.bfloat16), weights[part]
            if router_weight_on_input:
                x, w = (x * w[:, :1]).to(torch.bfloat16), torch.ones_like(w)
            out[part] = self._layer(x, topk_ids[part], w)
        return out
