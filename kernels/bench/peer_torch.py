"""The layer by torch's own grouped product, bf16 weights: what PyTorch alone offers, for compare.py."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from expertd_kernels.weights.activation import ActivationKind
from expertd_kernels.weights.canonical import Weights

__all__ = ["TorchGrouped"]


class TorchGrouped:
    """SwiGLU experts without biases, as protocol.Experts.  ValueError for others."""

    backend = "torch"

    def __init__(self, weights: Weights) -> None:
        a = weights.activation
        if a.kind is not ActivationKind.SILU_AND_MUL or a.limit is not None or weights.w13.bias is not None:
            raise ValueError("torch: plain SwiGLU experts without biases")
        self._w13, self._w2 = (m.codes.view(torch.bfloat16).transpose(1, 2) for m in (weights.w13, weights.w2))
        self._experts = torch.arange(len(self._w13), dtype=torch.int32, device=self._w13.device)

    def __call__(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        router_weight_on_input: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """As protocol.Experts, where every expert is here (no id is -1) and weights are applied at the end."""
        assert not router_weight_on_input, "torch: router weights on the input are not served"
        x, ids = hidden_states, topk_ids
        tokens, k = ids.shape
        order = ids.view(-1).argsort(stable=True)
        ends = (ids.view(-1, 1) <= self._experts).sum(0, dtype=torch.int32)
        gate, up = torch._grouped_mm(x[order // k], self._w13, offs=ends).chunk(2, dim=1)
        y = torch._grouped_mm(F.silu(gate) * up, self._w2, offs=ends)
        routes = torch.empty(tokens * k, x.shape[1], dtype=torch.float32, device=x.device)
        routes[order] = y.float()
        summed = (routes.view(tokens, k, -1) * topk_weights[:, :, None]).sum(1)
        return summed.to(x.dtype) if out is None else out.copy_(summed)
