"""Backend `cpu_torch`: the CPU without our own kernel, on torch's operators.  Correct, and slower than `cpu`.

int4 weights with bf16 scales in groups that torch packs (32, 64, 128, 256; symmetric, natural column order) run on
torch's int4 operator without being dequantized.  Other weights are dequantized one expert at a time for each call.
Experts that no token asks for cost nothing either way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from expertd_kernels.common.problem import Problem
from expertd_kernels.common.protocol import Packed
from expertd_kernels.weights.canonical import QuantTensor, Weights, pack_nibbles, unpack_nibbles
from expertd_kernels.weights.float32 import apply_activation
from expertd_kernels.weights.numerics import COMPUTE_DTYPE
from expertd_kernels.weights.scheme import ActivationQuant, Element, ScaleType, Scheme
from expertd_kernels.weights.serial import weights_from_tensors, weights_to_tensors

__all__ = ["TorchExperts", "experts", "int4_fits", "pack", "unpack"]

INT4_GROUPS = (32, 64, 128, 256)
"""Group sizes of torch's int4 operator on CPU."""

INT4_ROWS = 16
"""Its weights come in multiples of this many rows."""

Linear = Callable[[int, Tensor], Tensor]
"""(expert, x [m, K]) -> [m, N] without bias."""


def int4_fits(s: Scheme, N: int, K: int, columns: bool) -> bool:
    """Whether torch's int4 operator takes an [N, K] matrix; columns: in activation order."""
    return (
        (s.element, s.rows, s.scale, s.zeros) == (Element.INT4, 1, ScaleType.BF16, False)
        and s.cols in INT4_GROUPS
        and K % s.cols == 0
        and N % INT4_ROWS == 0
        and not s.global_scale
        and not columns
    )


def _int4_pack(codes: Tensor, k: int) -> Tensor:
    """[E, N, K/2] canonical nibbles -> [E, N, K/2] in torch's own order."""
    return torch.stack([torch._convert_weight_to_int4pack_for_cpu(unpack_nibbles(c, k).int(), 1) for c in codes])


def _int4_unpack(packed: Tensor, k: int) -> Tensor:
    """The inverse, without knowing torch's order: the operator times the identity is the weight itself."""
    identity = torch.eye(k, dtype=torch.bfloat16)
    n = packed.shape[1]
    ones = torch.ones(k // INT4_GROUPS[0], n, 2, dtype=torch.bfloat16)
    ones[..., 1] = 0.0
    out = [torch._weight_int4pack_mm_for_cpu(identity, p, INT4_GROUPS[0], ones) for p in packed]
    return torch.stack([pack_nibbles((w.float() + 8).round().t().contiguous()) for w in out])


def pack(weights: Weights, problem: Problem) -> Packed:
    """Canonical tensors; the codes of matrices that torch's int4 operator takes are in its order."""
    assert problem.activation_quant is ActivationQuant.NONE, "rounded activations are not the row's"
    tensors, meta = weights_to_tensors(weights)
    for name, q in (("w13", weights.w13), ("w2", weights.w2)):
        fits = int4_fits(q.scheme, *q.shape[1:], q.columns is not None)
        meta[name]["int4"] = problem.compute_dtype == "bf16" and fits
        if meta[name]["int4"]:
            tensors[f"{name}.codes"] = _int4_pack(q.codes.cpu(), q.shape[2])
    return Packed("cpu_torch", tensors, meta)


def unpack(packed: Packed) -> Weights:
    """The exact inverse of pack."""
    tensors = dict(packed.tensors)
    for name in ("w13", "w2"):
        if packed.meta[name]["int4"]:
            tensors[f"{name}.codes"] = _int4_unpack(tensors[f"{name}.codes"], packed.meta[name]["shape"][2])
    return weights_from_tensors(tensors, packed.meta)


def _linear(q: QuantTensor, int4: bool, dtype: torch.dtype) -> Linear:
    if not int4:
        return lambda e, x: F.linear(x, q.experts(slice(e, e + 1)).dequantize()[0].to(dtype))
    assert q.scales is not None
    assert q.factors is None, "builder.pack folds factors"
    scales = q.scales.transpose(1, 2).contiguous()
    zeros = torch.zeros_like(scales)
    pairs = torch.stack((scales, zeros), dim=-1)  # [E, K/g, N, 2]: value = (code - 8) * scale + zero

    def run(e: int, x: Tensor) -> Tensor:
        out: Tensor = torch._weight_int4pack_mm_for_cpu(x, q.codes[e], q.scheme.cols, pairs[e])
        return out

    return run


class TorchExperts:
    """One expert after another, each on all its rows."""

    backend = "cpu_torch"

    def __init__(self, packed: Packed, problem: Problem) -> None:
        self.weights = weights_from_tensors(packed.tensors, packed.meta)
        self.dtype = COMPUTE_DTYPE[problem.compute_dtype]
        meta: Any = packed.meta
        self.w13 = _linear(self.weights.w13, meta["w13"]["int4"], self.dtype)
        self.w2 = _linear(self.weights.w2, meta["w2"]["int4"], self.dtype)

    def _expert(self, e: int, x: Tensor) -> Tensor:
        h = self.w13(e, x).float()
        if self.weights.w13.bias is not None:
            h = h + self.weights.w13.bias[e]
        y = self.w2(e, apply_activation(h, self.weights.activation).to(self.dtype)).float()
        return y if self.weights.w2.bias is None else y + self.weights.w2.bias[e]

    @torch.no_grad()
    def __call__(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        router_weight_on_input: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """See protocol.Experts."""
        total = torch.zeros(hidden_states.shape, dtype=torch.float32)
        x, ids, weights = hidden_states.float(), topk_ids.flatten(), topk_weights.float().flatten()
        order = ids.argsort(stable=True)
        held = order[ids[order] >= 0]
        counts = torch.bincount(ids[held].long(), minlength=self.weights.num_experts).tolist()
        at = 0
        for e, n in enumerate(counts):
            if n == 0:
                continue
            rows = held[at : at + n]
            at += n
            token, w = rows // topk_ids.shape[1], weights[rows][:, None]
            inp = x[token] * w if router_weight_on_input else x[token]
            y = self._expert(e, inp.to(self.dtype))
            total.index_add_(0, token, y if router_weight_on_input else y * w)
        out = torch.empty_like(hidden_states) if out is None else out
        return out.copy_(total)


def experts(packed: Packed, problem: Problem) -> TorchExperts:
    return TorchExperts(packed, problem)
