"""How right is right: the compute dtype, the relative error, and the tolerance that belongs to a scheme."""

from __future__ import annotations

import torch
from torch import Tensor

from expertd_kernels.weights.canonical import Weights
from expertd_kernels.weights.scheme import ActivationQuant

__all__ = ["COMPUTE_DTYPE", "relative_error", "tolerance", "weight_errors"]

COMPUTE_DTYPE = {"bf16": torch.bfloat16, "f32": torch.float32}
"""Problem.compute_dtype as torch spells it: of the activations that experts take and give."""


def relative_error(out: Tensor, ref: Tensor) -> float:
    """||out - ref|| / ||ref|| in float64; inf when `out` is not finite, or ref is all zero and out is not."""
    o, r = out.double().cpu(), ref.double().cpu()
    if o.shape != r.shape or not torch.isfinite(o).all():
        return float("inf")
    norm, error = float(r.norm()), float((o - r).norm())
    if norm == 0.0:
        return 0.0 if error == 0.0 else float("inf")
    return error / norm


def weight_errors(quantized: Weights, original: Weights) -> tuple[float, float]:
    """(w13, w2): relative errors of the dequantized weights of the same experts, on any devices."""
    pairs = ((quantized.w13, original.w13), (quantized.w2, original.w2))
    w13, w2 = (relative_error(q.dequantize(), o.dequantize()) for q, o in pairs)
    return w13, w2


def tolerance(compute_dtype: str, activation_quant: ActivationQuant = ActivationQuant.NONE) -> float:
    """Largest relative error against the float32 reference on the same dequantized weights.

    Weight-only: the weights are exact, so only the compute dtype rounds: 2e-3 for f32, 1e-2 for bf16 and f16
    (bf16 operands and intermediate: about 3e-3 measured).  With rounded activations the rounding itself dominates:
    e4m3 has 3 mantissa bits (about 4e-2 measured for w8a8; one token of a layer of 128 columns, computed exactly
    but for the rounding of x and h: 4.6e-2 in the median of 60 drawn, 6.4e-2 at most), e2m1 one.  mxfp8's scales are
    powers of two, which cost more: 4.4e-2 to 5.3e-2 measured, 6.8e-2 in a layer of 64 columns.
    """
    if activation_quant is ActivationQuant.NONE:
        return 2e-3 if compute_dtype == "f32" else 1e-2
    return {
        ActivationQuant.INT8_TOKEN: 5e-2,
        ActivationQuant.INT8_GROUP: 3e-2,
        ActivationQuant.E4M3_TOKEN: 7e-2,
        ActivationQuant.E4M3_GROUP128: 7e-2,
        ActivationQuant.E4M3_TENSOR: 8e-2,
        ActivationQuant.MXFP8: 8e-2,
        ActivationQuant.MXFP4: 2.5e-1,
        ActivationQuant.NVFP4: 2e-1,
    }[activation_quant]
