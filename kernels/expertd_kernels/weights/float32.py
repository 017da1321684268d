"""The float32 reference: what every backend is compared with.  Readable, slow, exact up to f32 rounding."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from expertd_kernels.weights.activation import Activation, ActivationKind
from expertd_kernels.weights.canonical import Weights

__all__ = ["apply_activation", "reference"]


def apply_activation(h: Tensor, activation: Activation) -> Tensor:
    """h [..., 2I] gate columns, then up columns ([..., I] without mul) -> [..., I], in h's dtype."""
    if activation.kind is ActivationKind.RELU2:
        return torch.relu(h).square()
    gate, up = h.chunk(2, dim=-1)
    if activation.limit is not None:
        gate = gate.clamp(max=activation.limit)
        up = up.clamp(-activation.limit, activation.limit)
    match activation.kind:
        case ActivationKind.SILU_AND_MUL:
            return F.silu(gate) * up
        case ActivationKind.GELU_AND_MUL:
            return F.gelu(gate) * up
        case ActivationKind.GELU_TANH_AND_MUL:
            return F.gelu(gate, approximate="tanh") * up
        case ActivationKind.SWIGLUOAI:
            return (up + activation.beta) * gate * torch.sigmoid(activation.alpha * gate)
    raise AssertionError(activation)


@torch.no_grad()
def reference(
    weights: Weights,
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    router_weight_on_input: bool = False,
) -> Tensor:
    """out[t] = sum over j of topk_weights[t, j] * expert[topk_ids[t, j]](hidden_states[t]), all in float32.

    hidden_states [M, H] any float dtype; topk_ids [M, k] integer slots 0..E-1, -1 = computed elsewhere;
    topk_weights [M, k].  router_weight_on_input: the weight multiplies the expert's input instead of its output.
    Returns [M, H] f32.  One expert is dequantized at a time.
    """
    x = hidden_states.float()
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for e in torch.unique(topk_ids).tolist():
        if e < 0:
            continue
        token, j = (topk_ids == e).nonzero(as_tuple=True)
        one = weights.experts(slice(e, e + 1))
        w = topk_weights[token, j].float()[:, None]
        inp = x[token] * w if router_weight_on_input else x[token]
        h = inp @ one.w13.dequantize()[0].t()
        if one.w13.bias is not None:
            h = h + one.w13.bias
        y = apply_activation(h, weights.activation) @ one.w2.dequantize()[0].t()
        if one.w2.bias is not None:
            y = y + one.w2.bias
        out.index_add_(0, token, y if router_weight_on_input else y * w)
    return out
