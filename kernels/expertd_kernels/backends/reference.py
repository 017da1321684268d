"""Backend `reference`: float32 on dequantized weights, any device, any scheme.  Its layout is the canonical one."""

from __future__ import annotations

import torch
from torch import Tensor

from expertd_kernels.common.problem import Problem
from expertd_kernels.common.protocol import Packed
from expertd_kernels.weights.canonical import Weights
from expertd_kernels.weights.float32 import reference
from expertd_kernels.weights.scheme import ActivationQuant
from expertd_kernels.weights.serial import weights_from_tensors, weights_to_tensors

__all__ = ["experts", "pack", "unpack"]


class ReferenceExperts:
    """Computes in float32 whatever the problem's compute dtype is; answers in the input's dtype.

    token_by_token: products of one row each, so that no row's bits depend on how many rows there are."""

    backend = "reference"

    def __init__(self, weights: Weights, token_by_token: bool = False) -> None:
        self.weights, self.token_by_token = weights, token_by_token

    def __call__(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        router_weight_on_input: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        size = 1 if self.token_by_token else max(1, len(hidden_states))
        parts = (torch.split(t, size) for t in (hidden_states, topk_ids, topk_weights))
        y = torch.cat(
            [
                reference(self.weights, *part, router_weight_on_input=router_weight_on_input)
                for part in zip(*parts, strict=True)
            ]
        )
        if out is None:
            out = torch.empty_like(hidden_states)
        return out.copy_(y)


def pack(weights: Weights, problem: Problem) -> Packed:
    assert problem.activation_quant is ActivationQuant.NONE, "rounded activations are not the row's"
    tensors, meta = weights_to_tensors(weights)
    return Packed("reference", tensors, meta)


def unpack(packed: Packed) -> Weights:
    return weights_from_tensors(packed.tensors, packed.meta)


def experts(packed: Packed, problem: Problem) -> ReferenceExperts:
    return ReferenceExperts(unpack(packed), problem.batch_invariant)
