"""A stand-in for the package aiter: its entry point in f32, with the package's own torch code."""

from types import ModuleType, SimpleNamespace

import torch
from vendor import functions

from expertd_kernels.backends import aiter as backend


class Vendor:
    """Stands in for aiter: fused_moe in f32 through the package's own torch_moe, with the mask that it reads."""

    QuantType = SimpleNamespace(No="No", per_Token="per_Token", per_128x128="per_128x128")
    ActivationType = SimpleNamespace(Silu="Silu")

    def __init__(self, folder):
        module = ModuleType("fused")
        module.dtypes = SimpleNamespace(fp32=torch.float32, i32=torch.int32)
        module.ActivationType = self.ActivationType
        module.aiter = SimpleNamespace(get_torch_act=lambda activation: torch.nn.functional.silu)
        self.own = functions(folder / "fused_moe.py", {"torch_moe", "torch_moe_act"}, module)
        self.fused_moe = SimpleNamespace(fused_moe=self.run)

    def run(self, x, w1, w2, weights, ids, *, expert_mask, activation, quant_type, w1_scale, w2_scale):
        assert w1.is_shuffled
        assert w2.is_shuffled
        assert activation == "Silu"
        assert (x.dtype, weights.dtype, ids.dtype) == (torch.bfloat16, torch.float32, torch.int32)
        assert expert_mask.tolist() == [1] * len(w1) + [0]
        assert 0 <= int(ids.min()) <= int(ids.max()) <= len(w1)
        matrices = [self.numbers(w, s, quant_type) for w, s in ((w1, w1_scale), (w2, w2_scale))]
        return self.own.torch_moe(x, *matrices, weights, ids, expert_mask=expert_mask)

    def numbers(self, codes, scales, quant_type):
        w = backend.unshuffle(codes).float()
        if quant_type == "per_Token":
            assert scales.shape == (*w.shape[:2], 1)
            return w * scales
        if quant_type == "per_128x128":
            assert scales.shape == (w.shape[0], w.shape[1] // 128, w.shape[2] // 128)
            return w * scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
        assert scales is None
        return w
