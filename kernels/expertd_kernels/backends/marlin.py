"""Backend `marlin`: the MoE Marlin kernels as the package sglang has them, compiled at first use (needs nvcc).

Weight-only: int4 with and without zero points, int8, mxfp4, and e4m3 by channel, matrix, groups of 128 or 128 x 128
blocks.  The package has no kernel for zero points of int8 (kU8) and none for e4m3 in groups of 32 (mxfp8).

A layer is two of its GEMMs, which read the tokens' rows and write the routes' by a table of blocks, between the kernels
of glue.py, where biases are added.  The rows of a block are chosen as the package chooses them.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from expertd_kernels.backends.envelope import activation_of, fields, pack_layer, require_version, unpack_layer
from expertd_kernels.backends.glue import Glue, Places, in_pieces
from expertd_kernels.backends.glue_space import between
from expertd_kernels.backends.marlin_layout import pack_matrix, padded_rows, unpack_matrix
from expertd_kernels.common.problem import Problem
from expertd_kernels.common.protocol import Packed
from expertd_kernels.weights.canonical import Weights
from expertd_kernels.weights.scheme import ActivationQuant, Element, Scheme
from expertd_kernels.weights.serial import scheme_from_json

__all__ = ["MarlinExperts", "block_rows", "experts", "pack", "unpack"]

LAYOUT_VERSION = 2

BLOCKS = (8, 16, 32, 48, 64)
FULL = 0.9
"""The first size is taken that an expert's mean share of the routes does not fill to this part (the package's rule)."""
LOCKS_PER_SM = 4
"""Words of the workspace for each multiprocessor: a lock for each thread block that may share an output tile."""


def pack(weights: Weights, problem: Problem) -> Packed:
    """Canonical weights in the kernels' order, on the weights' device, one expert at a time."""
    assert problem.activation_quant is ActivationQuant.NONE, "rounded activations are not the row's"
    return pack_layer("marlin", LAYOUT_VERSION, weights, lambda _, q: pack_matrix(q))


def unpack(packed: Packed) -> Weights:
    """The exact inverse of pack."""
    return unpack_layer(packed, unpack_matrix)


def experts(packed: Packed, problem: Problem) -> MarlinExperts:
    """Ready to compute on the current CUDA device.  Raises Refused for another layout version."""
    require_version(packed, LAYOUT_VERSION)
    gemm = importlib.import_module("sglang.kernels.ops.moe.moe_wna16_marlin").moe_wna16_marlin_gemm
    types = importlib.import_module("sgl_kernel.scalar_type").scalar_types
    return MarlinExperts(packed, gemm, types, torch.device("cuda", torch.cuda.current_device()))


def block_rows(routes: int, experts: int) -> int:
    """Rows of a block for so many routes."""
    return next((b for b in BLOCKS if routes / experts / b < FULL), BLOCKS[-1])


def _type(types: Any, s: Scheme, zeros: bool) -> Any:
    """The package's name for a type of weights."""
    if s.element is Element.E2M1:
        return types.float4_e2m1f
    if s.element is Element.INT8:
        return types.uint8b128
    if s.element is Element.E4M3:
        return types.float8_e4m3fn
    return types.uint4 if zeros else types.uint4b8


class MarlinExperts:
    """One layer.  gemm: the package's moe_wna16_marlin_gemm; types: its scalar_types; device: where tensors go."""

    backend = "marlin"

    def __init__(self, packed: Packed, gemm: Any, types: Any, device: torch.device) -> None:
        self.activation = activation_of(packed)
        self.num_experts, rows, hidden = packed.meta["w13"]["shape"]
        self.width, self.padded = padded_rows(rows), padded_rows(hidden)
        """Columns of what the two GEMMs write."""
        self.intermediate: int = packed.meta["w2"]["shape"][2]
        self.gemm = gemm
        self.matrices: list[dict[str, Any]] = []
        self.biases: list[Tensor | None] = []
        for name in ("w13", "w2"):
            t = {field: x.to(device) for field, x in fields(packed, name).items() if not field.startswith("exact_")}
            s = scheme_from_json(packed.meta[name]["scheme"])
            _, N, K = packed.meta[name]["shape"]
            self.biases.append(t.get("bias"))
            self.matrices.append(
                {
                    "b_q_weight": t["codes"],
                    "b_scales": t["scales"].view(torch.float8_e8m0fnu) if t["scales"].itemsize == 1 else t["scales"],
                    "b_zeros_or_none": t.get("zeros"),
                    "b_q_type": _type(types, s, "zeros" in t),
                    "size_n": padded_rows(N),
                    "size_k": K,
                }
            )
        sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        self.locks = torch.zeros(LOCKS_PER_SM * sms, dtype=torch.int32, device=device)

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
        return in_pieces(self._compute, *given, width=max(self.width, self.padded))

    def _compute(self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor, weighted: bool) -> None:
        routes, block = ids.numel(), block_rows(ids.numel(), self.num_experts)
        shapes = between(routes, self.width, self.intermediate, self.padded)
        glue = Glue(x, ids, weights, self.num_experts, shapes, block)
        h, a, y = (glue.parts[name] for name in "hay")
        places = glue.place(block, routes=True, blocks=True)
        self._multiply(0, x, h, glue, places, glue.top_k)
        glue.activate(h, a, self.activation, bias=self.biases[0])
        self._multiply(1, a, y, glue, places, 1)
        glue.combine(y, out, weighted, bias=self.biases[1])

    def _multiply(self, which: int, x: Tensor, out: Tensor, glue: Glue, places: Places, top_k: int) -> None:
        """out[route] = W x[route // top_k], without bias and router weight."""
        self.gemm(
            x,
            out,
            b_bias_or_none=None,
            global_scale_or_none=None,
            g_idx_or_none=None,
            perm_or_none=None,
            workspace=self.locks,
            sorted_token_ids=places.route,
            expert_ids=places.block,
            num_tokens_post_padded=places.end,
            topk_weights=glue.weights,
            moe_block_size=places.alignment,
            top_k=top_k,
            mul_topk_weights=False,
            is_ep=False,
            size_m=x.shape[0],
            use_fp32_reduce=True,
            **self.matrices[which],
        )
