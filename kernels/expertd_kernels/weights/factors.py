"""Factors of input columns (AWQ's pre_quant_scale), brought to where every kernel can take them.

    w2's   h * f2 = act(gate) * (up * f2): in the scales, and the biases, of w13's up rows
    w13's  one vector for all experts: the hidden states are multiplied by it, once, before the experts see them

A layer for which that is not possible (another activation, scales that cannot hold a product, experts whose factors
differ) is widened where it is read.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from expertd_kernels.weights.activation import Activation, ActivationKind
from expertd_kernels.weights.canonical import QuantTensor, Weights
from expertd_kernels.weights.scheme import Element, ScaleType, Scheme

__all__ = ["fold", "takes_w2_factors"]

_LINEAR = (ActivationKind.SILU_AND_MUL, ActivationKind.GELU_AND_MUL, ActivationKind.GELU_TANH_AND_MUL)


def takes_w2_factors(w13: Scheme, activation: Activation) -> str:
    """Why w13's up rows cannot take w2's factors; "" if they can."""
    if activation.kind not in _LINEAR or activation.limit is not None:
        return f"{activation.name} is not linear in its up rows"
    if w13.element is Element.F32 or (w13.element.quantized and w13.rows == 1 and w13.scale is ScaleType.F32):
        return ""
    return f"the scales of {w13.name} cannot hold a factor for each row"


def fold(weights: Weights) -> tuple[Weights, Tensor | None]:
    """(the same layer without factors, [H] f32 that its hidden states are multiplied by or None).  ValueError where
    that is not possible."""
    w13, w2, hidden = weights.w13, weights.w2, None
    if w2.factors is not None:
        if why := takes_w2_factors(w13.scheme, weights.activation):
            raise ValueError(f"the factors of w2's inputs are not computed: {why}; widen w2 (QuantTensor.widen)")
        w13, w2 = _times_up_rows(w13, w2.factors), replace(w2, factors=None)
    if w13.factors is not None:
        hidden = w13.factors[0].contiguous()
        if not bool((w13.factors == hidden).all()):
            raise ValueError("the factors of w13's inputs differ between experts; widen w13 (QuantTensor.widen)")
        w13 = replace(w13, factors=None)
    return replace(weights, w13=w13, w2=w2), hidden


def _times_up_rows(w13: QuantTensor, factors: Tensor) -> QuantTensor:
    """w13 [E, 2I, H] with row I + j of expert e multiplied by factors[e, j]."""
    rows = torch.cat((torch.ones_like(factors), factors), dim=1)
    bias = None if w13.bias is None else w13.bias * rows
    if w13.scales is None:
        return replace(w13, codes=w13.codes * rows[:, :, None], bias=bias)
    return replace(w13, scales=w13.scales * rows[:, :, None], bias=bias)
